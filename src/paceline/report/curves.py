"""Builds the charts of a report. The number of points per series is limited, so that the page stays small."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.journal import NOT_COMPUTED
from paceline.core.ledger import RESOURCE_PREFIX
from paceline.report import measured
from paceline.report.run_data import RunData, names_of, numbers_of

NUM_COLOURS = 6  # number of line colours in the style sheet
MOST_POINTS = 1_000  # maximum points per series: about 15 kB in the page
_NUM_SMOOTHED = 200  # number of equal parts of a long run over which the loss is averaged
# logged numbers that the journal has in full
_OF_JOURNAL = {"loss": "Loss", "learning_rate": "Learning rate", "grad_norm": "Gradient norm"}
_NO_CURVE = ("_runtime", "_per_second", "total_flos")  # endings of numbers that get no chart


@dataclass(frozen=True)
class Series:
    """Points of one line, in the order of their steps.

    Attributes:
        label: the text in the legend.
        steps: the optimizer steps.
        values: the values at these steps.
        colour: index of the line's colour.
        is_faint: True draws a thin line, behind the line of its mean.
        is_dashed: True for evaluations in a comparison of several runs.
        bases: the lower edge of an area of a stacked chart, whose upper edge the values are; None for a line.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    colour: int = 0
    is_faint: bool = False
    is_dashed: bool = False
    bases: np.ndarray | None = None

    @property
    def heights(self) -> np.ndarray:
        """The values; those of an area without its lower edge."""
        return self.values if self.bases is None else self.values - self.bases

    @property
    def style(self) -> str:
        """The line's classes in the page's style sheet."""
        names = [f"colour{self.colour % NUM_COLOURS}"]
        names += ["faint"] if self.is_faint else []
        names += ["dashed"] if self.is_dashed else []
        names += ["area"] if self.bases is not None else []
        return " ".join(names)


@dataclass(frozen=True)
class Chart:
    """A chart over optimizer steps.

    Attributes:
        title: the chart's title.
        series: the lines.
        num_left_out: number of non-finite values, which are not drawn.
    """

    title: str
    series: list[Series]
    num_left_out: int = 0


def make_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Returns the charts of one run, or common charts of several: loss, metrics, learning rate, norm, others."""
    named: dict[str, list[Series]] = {}
    suffixes = [f" ({name})" if len(runs) > 1 else "" for name in names_of(runs)]
    for index, (run, suffix) in enumerate(zip(runs, suffixes, strict=True)):
        for title, series in _series_of(run, index, suffix):
            named.setdefault(title, []).append(series)
    for index, (run, suffix) in enumerate(zip(runs, suffixes, strict=True)):
        for title, series in _measured_series(run, index, suffix):
            named.setdefault(title, []).append(series)
    return [
        _as_chart(title, series, len(runs))
        for title, series in sorted(named.items(), key=lambda pair: pair[0].startswith(RESOURCE_PREFIX))
        if any(len(each.steps) for each in series)
    ]


def thin(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` points: minimum and maximum of equal parts of the series, so that no peak is lost."""
    if len(steps) <= most:
        return steps, values
    edges = np.linspace(0, len(steps), most // 2 + 1).astype(int)
    kept: set[int] = set()
    for start, end in itertools.pairwise(edges):
        part = values[start:end]
        kept.update((start + int(part.argmin()), start + int(part.argmax())))
    indices = np.array(sorted(kept))
    return steps[indices], values[indices]


def smoothed(steps: np.ndarray, values: np.ndarray, num_parts: int = _NUM_SMOOTHED) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means over equal parts of a series, each at the last step of its part."""
    edges = np.linspace(0, len(steps), num_parts + 1).astype(int)
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    return steps[edges[1:] - 1], means


def _series_of(run: RunData, index: int, suffix: str) -> list[tuple[str, Series]]:
    """Returns (title of the chart, series) for each line of a run; `index` is the colour of all its lines."""
    found: list[tuple[str, Series]] = []
    logged = numbers_of(run.rows)
    updates = run.updates
    if len(updates):
        steps = updates["step"].astype(np.float64)
        is_counted, is_normed = updates["is_counted"] != 0, updates["grad_norm"] != NOT_COMPUTED
        found += _loss_series(steps[is_counted], updates["loss"][is_counted], index, suffix)
        found.append(("Learning rate", Series(f"learning rate{suffix}", steps, updates["learning_rate"], index)))
        norms = Series(f"gradient norm{suffix}", steps[is_normed], updates["grad_norm"][is_normed], index)
        found.append(("Gradient norm", norms))
    for key, (steps, values) in logged.items():
        title = _OF_JOURNAL.get(key, _title(key))
        if (key in _OF_JOURNAL and len(updates)) or key.endswith((*_NO_CURVE, "memory_gb")) or key == "train_loss":
            continue
        if len(steps) > 1 or title == "Loss":
            found.append((title, Series(f"{key}{suffix}", steps, values, index, is_dashed=key.startswith("eval_"))))
    order = {"Loss": 0, "Learning rate": 2, "Gradient norm": 3}
    return sorted(found, key=lambda pair: order.get(pair[0], 1 if pair[0].startswith("eval_") else 4))


def _measured_series(run: RunData, index: int, suffix: str) -> list[tuple[str, Series]]:
    """Returns (title of the chart, series) of throughput, memory and time."""
    found = []
    seconds = measured.seconds_of(run.rows)
    for label, steps, values in measured.throughput(seconds, run.updates):
        if len(steps) > 1:
            found.append(("Throughput", Series(f"{label}{suffix}", steps, values, index)))
    for label, steps, values in measured.memory(run.rows):
        if len(steps) > 1:
            found.append((measured.MEMORY_TITLE, Series(f"{label}{suffix}", steps, values, index)))
    for order, (label, steps, tops, bases) in enumerate(measured.time_by_activity(seconds)):
        if len(steps) > 1:
            found.append((f"{measured.TIME_TITLE}{suffix}", Series(label, steps, tops, order, bases=bases)))
    return found


def _loss_series(steps: np.ndarray, losses: np.ndarray, index: int, suffix: str) -> list[tuple[str, Series]]:
    """Returns the loss of each step and, for a long run, its mean over parts of the run."""
    is_finite = np.isfinite(losses)
    is_long = bool(is_finite.sum() > 2 * _NUM_SMOOTHED)
    raw = Series(f"training loss{suffix}", steps, losses, index, is_faint=is_long)
    if not is_long:
        return [("Loss", raw)]
    mean_steps, means = smoothed(steps[is_finite], losses[is_finite])
    return [("Loss", raw), ("Loss", Series(f"training loss, mean{suffix}", mean_steps, means, index))]


def _title(key: str) -> str:
    """Returns the title of a number's chart: evaluation losses share the chart "Loss", others have their own."""
    return "Loss" if key == "eval_loss" or (key.startswith("eval_") and key.endswith("_loss")) else key


def _as_chart(title: str, series: Sequence[Series], num_runs: int) -> Chart:
    """Makes a chart of thinned series. One run's lines differ in colour; of several runs, each run has one colour."""
    kept: list[Series] = []
    num_left_out = colour = 0
    for each in series:
        is_finite = np.isfinite(each.values) & np.isfinite(each.steps)
        num_left_out += int((~is_finite).sum())
        if each.bases is not None:
            kept.append(each)
            continue
        steps, values = thin(each.steps[is_finite], each.values[is_finite])
        if not len(steps):
            continue
        if num_runs == 1:
            each = replace(each, colour=colour, is_dashed=False)
            colour += not each.is_faint  # a faint line has the colour of its mean
        kept.append(replace(each, steps=steps, values=values))
    return Chart(title, kept, num_left_out)
