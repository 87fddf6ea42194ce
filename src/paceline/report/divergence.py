"""Finds the first optimizer step at which two runs differ, and the causes that are consistent with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.journal import FORMAT, NOT_COMPUTED
from paceline.report.differences import (
    CODE,
    DATA_CONTENT,
    DATA_ORDER,
    KINDS,
    NUMERICS,
    Difference,
    has_every_row,
)
from paceline.report.run_data import RunData

PLACE = ("epoch", "first", "num_samples")  # the samples of a step
NUMBERS = ("loss", "grad_norm", "learning_rate")
ROUNDING = 1e-4  # greatest relative difference that is taken for another rounding of the same computation


@dataclass(frozen=True)
class Divergence:
    """The first optimizer step at which two runs differ.

    Attributes:
        step: the step.
        values: the columns that differ, each with its values in both runs.
        place: epoch, position of the first sample in it, and number of samples of the step in the first run.
        is_first: the runs have no common step before.
    """

    step: int
    values: dict[str, tuple[float, float]]
    place: tuple[int, int, int]
    is_first: bool

    @property
    def relative(self) -> float:
        """The difference of the losses, or else of the norms, relative to the greater one; infinite if not finite."""
        pair = self.values.get("loss") or self.values.get("grad_norm")
        if pair is None or not all(map(math.isfinite, pair)):
            return math.inf
        return abs(pair[0] - pair[1]) / max(abs(pair[0]), abs(pair[1]))


@dataclass(frozen=True)
class Cause:
    """A cause of a divergence.

    Attributes:
        kind: one of `paceline.report.differences.KINDS`.
        text: the recorded difference, or what the numbers of the step say without one.
        is_recorded: it was found in the records of the runs; False if it was inferred from the numbers.
    """

    kind: str
    text: str
    is_recorded: bool


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of two runs.

    Attributes:
        num_common: steps that both have.
        last: the last step of each run; 0 without any.
        divergence: the first common step that differs, or None.
        are_logged: the steps are those of logs, because a journal is missing.
    """

    num_common: int
    last: tuple[int, int]
    divergence: Divergence | None
    are_logged: bool = False

    @property
    def are_same(self) -> bool:
        """True if both runs end at the same step, and the steps that both have, at least one, are equal."""
        return self.divergence is None and self.last[0] == self.last[1] and self.num_common > 0


def compare_steps(first: RunData, other: RunData) -> Steps:
    """Compares the steps of two runs bit for bit; two NaNs are equal.

    The journals are compared, or without one of them the logged rows, of which only loss, norm and rate are known.
    """
    are_logged = not (len(first.updates) and len(other.updates))
    tables = [_logged(run) if are_logged else _last_of_each(run.updates) for run in (first, other)]
    steps = [table["step"] for table in tables]
    last = (int(steps[0].max(initial=0)), int(steps[1].max(initial=0)))
    common, in_first, in_other = np.intersect1d(steps[0], steps[1], assume_unique=True, return_indices=True)
    a, b = tables[0][in_first], tables[1][in_other]
    columns = NUMBERS if are_logged else (*PLACE, *NUMBERS)
    unequal = {name: _unequal(a[name], b[name]) for name in columns}
    places = np.flatnonzero(np.logical_or.reduce(list(unequal.values())))
    if not len(places):
        return Steps(len(common), last, None, are_logged)
    at = int(places[0])
    values = {name: (a[name][at].item(), b[name][at].item()) for name in columns if unequal[name][at]}
    place = (int(a["epoch"][at]), int(a["first"][at]), int(a["num_samples"][at]))
    return Steps(len(common), last, Divergence(int(common[at]), values, place, at == 0), are_logged)


def find_causes(steps: Steps, differences: Sequence[Difference], first: RunData, other: RunData) -> list[Cause]:
    """Returns the causes that are consistent with the first step that differs, the likeliest first; empty without one.

    Recorded differences come first, in the order of `KINDS`: an option is set on purpose, and rounding follows from
    everything. Without one, the causes are inferred from the numbers of the step.
    """
    divergence = steps.divergence
    if divergence is None:
        return []
    known = [item for item in differences if item.kind is not None and _is_consistent(item, divergence)]
    has_origin = any(item.section != "plan" for item in known)
    causes = [
        Cause(str(item.kind), describe_difference(item), True)
        for item in sorted(known, key=lambda item: KINDS.index(str(item.kind)))
        if item.section != "plan" or not has_origin  # the plan follows from the arguments and the data
    ]
    return causes or [_inferred(divergence, first, other)]


def describe_difference(item: Difference) -> str:
    """Returns a difference in one line."""
    if item.values[0] == item.values[1]:  # a comparison that is one text
        return f"{item.name}: {item.values[0]}"
    return f"{item.name}: {_shown(item.values[0])} -> {_shown(item.values[1])}"


def _is_consistent(item: Difference, divergence: Divergence) -> bool:
    """Returns False for a difference that cannot show itself in these columns first."""
    changes_place = any(name in divergence.values for name in PLACE)
    if item.kind == NUMERICS:
        return not changes_place and set(divergence.values) != {"learning_rate"}
    if item.kind in (DATA_ORDER, DATA_CONTENT) and not item.name.endswith(" length"):
        return "loss" in divergence.values and not changes_place
    return True


def _inferred(divergence: Divergence, first: RunData, other: RunData) -> Cause:
    """Returns the cause that the numbers suggest if the records are equal."""
    columns = set(divergence.values)
    if columns & set(PLACE):
        return Cause(DATA_ORDER, "the step consists of other samples, and no recorded option says why", False)
    if "learning_rate" in columns and "loss" not in columns:
        return Cause(CODE, "the learning rate was set by code: a callback, a schedule, an optimizer", False)
    if divergence.relative <= ROUNDING:
        text = "loss and norm differ by rounding only: an operation that is not deterministic, or another library"
        return Cause(NUMERICS, text, False)
    if "loss" not in columns:
        text = "the losses are equal and the gradients are not: the backward pass, or code that changes gradients"
        return Cause(CODE, text, False)
    if divergence.is_first:
        text = "the first common step differs already: initial weights, model, loss or data code outside the repository"
        return Cause(CODE, text, False)
    if has_every_row(first) and has_every_row(other):
        text = (
            "all rows of the data are equal, and the losses differ by more than rounding: code outside the repository"
        )
        return Cause(CODE, text, False)
    text = "the samples of this step: no row that differs is among those whose hashes were recorded"
    return Cause(DATA_CONTENT, text, False)


def _last_of_each(updates: np.ndarray) -> np.ndarray:
    """Returns one row per step, sorted by step: the last one written."""
    steps, places = np.unique(updates["step"][::-1], return_index=True)
    del steps
    rows: np.ndarray = updates[::-1][places]
    return rows


def _logged(run: RunData) -> np.ndarray:
    """Returns the logged training rows in the form of a journal; the samples of a step are unknown."""
    rows = [row for row in run.rows if "loss" in row]
    table = np.zeros(len(rows), dtype=FORMAT)
    for place, row in enumerate(rows):
        table[place]["step"] = int(row["step"])
        for name in NUMBERS:
            table[place][name] = _number(row.get(name))
    return _last_of_each(table)


def _number(value: Any) -> float:
    try:
        return NOT_COMPUTED if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "f":
        return np.asarray(a != b)
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
