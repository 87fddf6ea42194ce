"""Builds the series of measurements of a run: time by activity, throughput and memory, from its log rows.

A row of measurements holds its step, its time, and entries that reporters get and the trainer state does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from paceline.core.ledger import ACTIVITIES, GROUPS, NOT_TRAINING, PREFIX, RESOURCE_PREFIX

MEMORY_TITLE, TIME_TITLE = "Memory (GB)", "Time by activity (%)"
MOST_AREAS = 6  # activities that a chart distinguishes; the others are added up
MOST_PARTS = 200  # parts of a long run, over which seconds are added up
TIME_KEYS = tuple(PREFIX + name for name in ACTIVITIES)
_TIME_KEYS = frozenset(TIME_KEYS)
_MOST_SECONDS = 1e15
_STAMPS = {"step", "time"}
_MEMORY = "memory_gb"  # ending of the keys of memory

Row = Mapping[str, Any]
Points = tuple[str, np.ndarray, np.ndarray]  # label, steps, values
Area = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # label, steps, tops, bases


def is_entry(key: str) -> bool:
    """True for the key of a measurement."""
    return key.startswith((PREFIX, RESOURCE_PREFIX))


def is_measured(row: Row) -> bool:
    """True for a row that holds nothing but measurements."""
    return len(row) > 1 and all(key in _STAMPS or is_entry(key) for key in row)


def has_measurements(row: Row) -> bool:
    """True for a row with the seconds of activities."""
    return not _TIME_KEYS.isdisjoint(row)


def memory(rows: Sequence[Row]) -> list[Points]:
    """Returns the memory of the process and its devices, in GB."""
    known: set[str] = set().union(*rows)
    keys = sorted(key for key in known if key.startswith(RESOURCE_PREFIX) and key.endswith(_MEMORY))
    found = []
    for key in keys:
        label = key.removeprefix(RESOURCE_PREFIX).removesuffix(f"_{_MEMORY}").replace("_", " ")
        points = [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]
        found.append((label, *_columns(points)))
    return found


@dataclass(frozen=True)
class Seconds:
    """The seconds of each activity in the log rows of a run.

    Attributes:
        steps: the optimizer steps of the rows, in their order; each row covers the time since the one before.
        values: `(rows, activities)`, in the order of `paceline.core.ledger.ACTIVITIES`.
        first: the step that the first row starts after.
    """

    steps: np.ndarray
    values: np.ndarray
    first: int


def seconds_of(rows: Sequence[Row]) -> Seconds:
    """Returns the seconds in the rows of a log."""
    found = {int(row["step"]): row for row in rows if has_measurements(row)}
    steps = sorted(found)
    timed = [found[step] for step in steps]
    columns = [_column(timed, key) for key in TIME_KEYS]
    earlier = (int(row["step"]) for row in rows if "loss" in row and steps and row["step"] < steps[0])
    return Seconds(np.array(steps, np.int64), np.stack(columns, axis=1), max(earlier, default=0))


def throughput(seconds: Seconds, updates: np.ndarray) -> list[Points]:
    """Returns samples per second of training time, without setup, evaluations and saves.

    Args:
        seconds: the seconds of the run.
        updates: the journal, of `paceline.core.journal.FORMAT`.
    """
    is_training = [key not in NOT_TRAINING for key in TIME_KEYS]
    spent = seconds.values[:, is_training].sum(axis=1)
    consumed = np.concatenate([[0], np.cumsum(updates["num_samples"])]).astype(np.float64)
    ends = np.searchsorted(updates["step"], np.concatenate([[seconds.first], seconds.steps]), side="right")
    samples = np.diff(consumed[ends])
    steps, spent, samples = _joined(seconds.steps.astype(np.float64), spent, samples)
    is_known = (samples > 0) & (spent > 0)
    if not is_known.any():
        return []
    return [("samples per second", steps[is_known], samples[is_known] / spent[is_known])]


def time_by_activity(seconds: Seconds) -> list[Area]:
    """Returns areas whose heights are the share of each activity in the time since the row before, in percent."""
    if not len(seconds.steps):
        return []
    parts = [seconds.values[:, list(members)].sum(axis=1) for members, _ in GROUPS]
    steps, *grouped = _joined(seconds.steps.astype(np.float64), *parts)
    order = sorted(range(len(GROUPS)), key=lambda index: -float(grouped[index].sum()))
    named = [(GROUPS[index][1], grouped[index]) for index in order[: MOST_AREAS - 1]]
    named.append(("everything else", np.sum([grouped[index] for index in order[MOST_AREAS - 1 :]], axis=0)))
    total = np.maximum(np.sum(grouped, axis=0), 1e-12)
    found, base = [], np.zeros(len(steps))
    for label, values in named:
        if values.any():
            top = base + 100 * values / total
            found.append((label, steps, top, base))
            base = top
    return found


def _joined(steps: np.ndarray, *sums: np.ndarray) -> list[np.ndarray]:
    """Adds up neighbouring rows of a long run, each part at the step of its last row."""
    if len(steps) <= MOST_PARTS:
        return [steps, *sums]
    edges = np.linspace(0, len(steps), MOST_PARTS + 1).astype(int)
    return [steps[edges[1:] - 1], *(np.add.reduceat(values, edges[:-1]) for values in sums)]


def _column(rows: Sequence[Row], key: str) -> np.ndarray:
    """Returns the seconds of one activity; 0 for what is no finite number of seconds."""
    try:
        values = np.array([row.get(key, 0.0) for row in rows], np.float64).reshape(len(rows))
    except (TypeError, ValueError, OverflowError):
        values = np.array([_seconds(row, key) for row in rows], np.float64)
    with np.errstate(invalid="ignore"):
        return np.where((values >= 0) & (values < _MOST_SECONDS), values, 0.0)


def _seconds(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if _is_number(value) and value >= 0 else 0.0


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MOST_SECONDS < value < _MOST_SECONDS  # math.isfinite overflows for large integers


def _columns(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    merged = dict(points)
    return np.array(sorted(merged), np.float64), np.array([merged[step] for step in sorted(merged)], np.float64)
