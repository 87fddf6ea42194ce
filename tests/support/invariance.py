"""Differences between the numbers of several processes and of one, and the page of the docs that shows them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

Result = dict[str, Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "invariance.md"
# exactly the same
EXACT = ("learning_rate", "global_step", "epoch", "tokens", "scheduler_steps", "count")
# greatest relative difference (L2) of what has a column in the page
LIMITS = {
    "gradient": 1e-5,
    "loss": 1e-5,
    "grad_norm": 1e-5,
    "eval_loss": 1e-5,
    "test_loss": 1e-5,
    "predictions": 1e-4,
    "weights": 1e-4,
}
TITLES = {"gradient": "first gradient", "grad_norm": "grad norm", "weights": "final weights"}
UPDATES = 20  # after which the weights are to be the same, at the least


def relative(found: Any, expected: Any) -> float:
    """The norm of the difference, by that of what is expected; without a number, what is expected has none there."""
    left, right = (np.nan_to_num(np.asarray(value, dtype=np.float64)) for value in (found, expected))
    difference, size = float(np.linalg.norm(left - right)), float(np.linalg.norm(right))
    return 0.0 if difference == 0 else difference / size if size else math.inf


def differences(found: Result, one: Result) -> dict[str, float]:
    """Of everything that the run on one process has."""
    present = [name for name in LIMITS if one.get(name) is not None and len(one[name])]
    return {name: relative(found[name], one[name]) for name in present}


def check_same(several: list[Result], one: Result, limits: Mapping[str, float] = LIMITS) -> None:
    """Checks that the results of several processes are those of one."""
    for rank, found in enumerate(several):
        for name in EXACT:
            assert found.get(name) == one.get(name), f"{name} of process {rank}"
        assert torch.equal(found["weights"], several[0]["weights"]), "the processes have drifted apart"
        torch.testing.assert_close(found["gradient"], one["gradient"], rtol=1e-5, atol=1e-7)
        # AdamW makes a step of a gradient that is nothing but rounding: a thousandth of such a step is let pass
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-4, atol=1e-5)
        for name in ("loss", "grad_norm", "eval_loss", "test_loss"):
            assert found[name] == pytest.approx(one[name], rel=1e-5, nan_ok=True), f"{name} of process {rank}"
        for name in ("predictions", "labels"):
            if name in one:
                np.testing.assert_allclose(found[name], one[name], rtol=1e-4, atol=1e-5)
        for name, difference in differences(found, one).items():
            assert difference <= limits[name], f"{name} of process {rank}"


def check_complete(one: Result) -> None:
    """A run that has all that is to be the same, for long enough: else nothing would be compared."""
    assert one["global_step"] >= UPDATES
    assert one["scheduler_steps"] == one["global_step"] == len(one["loss"]) == len(one["grad_norm"])
    assert {name for name in LIMITS if one.get(name) is None or not len(one[name])} == set()
    for name in ("loss", "grad_norm", "eval_loss", "test_loss"):
        assert all(math.isfinite(number) for number in one[name])


def power(difference: float) -> str:
    """Rounded up to a power of ten."""
    return "0" if difference == 0 else f"1e{math.ceil(math.log10(difference))}"


class Matrix:
    """The differences of scenarios on engines: those of the weights, and the greatest of all else.

    Args:
        heading: of the part of the page.
        columns: engine and number of processes.
        limits: of what is compared.
    """

    def __init__(self, heading: str, columns: Iterable[tuple[str, int]], limits: Mapping[str, float] = LIMITS) -> None:
        self.heading, self.limits = heading, limits
        self.titles = [f"{engine.upper()} x {size}" for engine, size in columns]
        self.weights: dict[str, list[str]] = {}
        self.greatest: dict[str, dict[str, float]] = {title: dict.fromkeys(LIMITS, 0.0) for title in self.titles}

    def add(self, scenario: str, columns: list[list[Result]], one: Result) -> None:
        """Check what the processes of each column found in a scenario, and keep how far it is from that of one.

        A column of no process has not run it.
        """
        cells = []
        for title, several in zip(self.titles, columns, strict=True):
            if not several:
                cells.append("")
                continue
            check_same(several, one, self.limits)
            cells.append(power(max(differences(found, one)["weights"] for found in several)))
            for name, difference in (item for found in several for item in differences(found, one).items()):
                self.greatest[title][name] = max(self.greatest[title][name], difference)
        self.weights[scenario.replace("_", " ")] = cells

    def tables(self) -> list[str]:
        """Weights by scenario and engine; everything by engine."""
        names = [TITLES.get(name, name) for name in LIMITS]
        greatest = {title: [power(value) for value in row.values()] for title, row in self.greatest.items()}
        return [table(["scenario", *self.titles], self.weights), table(["engine", *names], greatest)]

    def write(self) -> None:
        """Put the tables in the place of those below the heading."""
        before, heading, rest = PAGE.read_text("utf-8").partition(f"## {self.heading}\n")
        part, *others = rest.partition("\n## ")
        paragraphs, tables = part.split("\n\n"), iter(self.tables())
        paragraphs = [next(tables) if paragraph.startswith("|") else paragraph for paragraph in paragraphs]
        part = "\n\n".join(paragraphs).rstrip("\n") + "\n"
        PAGE.write_text(before + heading + part + "".join(others), "utf-8")

    def check_page(self, scenarios: Iterable[str], blanks: Collection[tuple[str, int]] = ()) -> None:
        """The page has every scenario and engine, and no difference that is too large.

        Args:
            scenarios: all of them, in order.
            blanks: the scenario and the column of what was not run.
        """
        scenarios = list(scenarios)
        part = PAGE.read_text("utf-8").partition(f"## {self.heading}\n")[2].partition("\n## ")[0]
        weights, everything = (each.strip().splitlines() for each in part.split("\n\n") if each.startswith("|"))
        expected = [each.splitlines() for each in self.tables()]
        assert (weights[0], everything[0]) == (expected[0][0], expected[1][0])
        assert [row[0] for row in cells(weights)] == [name.replace("_", " ") for name in scenarios]
        assert [row[0] for row in cells(everything)] == self.titles
        for name, row in zip(scenarios, cells(weights), strict=True):
            for column, cell in enumerate(row[1:]):
                assert cell == "" if (name, column) in blanks else float(cell) <= self.limits["weights"]
        for row in cells(everything):
            assert all(float(cell) <= limit for cell, limit in zip(row[1:], self.limits.values(), strict=True))


def table(head: list[str], rows: dict[str, list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()])


def cells(lines: list[str]) -> list[list[str]]:
    """The rows of a table below its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
