"""The status of one run, live or finished, from the files in its folder."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.counts import is_count, is_number
from paceline.core.journal import JOURNAL_FILE
from paceline.core.ledger import ACTIVITIES, PREFIX
from paceline.report.differences import mapping
from paceline.report.run_data import RunData, read_run
from paceline.report.run_table import RUNNING, best_of, seconds_of, state_of

MOST_LOSSES = 400  # the part of the loss curve that a status holds: points, over the whole run
_QUIET = 10.0  # a run is quiet if it made no progress for this many times the usual interval of its files,
_LEAST_QUIET = 60.0  # and at least this many seconds


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes:
        name: its name.
        folder: its output folder.
        state: `running`, `finished`, `interrupted` or `failed`.
        step: the last known optimizer step.
        max_steps: the steps of the whole run; None if unknown.
        epoch: the epoch after the last known step, with its fraction unless the data has no length; None if unknown.
        seconds: training time over all starts; None if unknown.
        seconds_left: the expected rest of a running run; None if unknown.
        steps_per_second, samples_per_second, tokens_per_second: speed of the later half of this start; None if unknown.
        loss: the last training loss; None if unknown.
        losses: the training losses of the run, thinned.
        learning_rate, grad_norm: of the last step; None if unknown.
        evaluation: the last known row of an evaluation, with its `step`; empty without one.
        best: name and best value of the metric of the best model; None for what is unknown.
        times: the seconds of each activity of this run, largest first; empty if they were not recorded.
        warnings: sentences about what went wrong.
        since_progress: seconds since the files of a running run recorded a step; None if unknown.
    """

    name: str
    folder: Path
    state: str
    step: int
    max_steps: int | None = None
    epoch: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    learning_rate: float | None = None
    grad_norm: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    best: tuple[str | None, float | None] = (None, None)
    times: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    since_progress: float | None = None


@dataclass(frozen=True)
class _Pace:
    """Seconds and quantities of the later half of a start."""

    seconds_a_step: float | None
    samples_a_second: float | None
    tokens_a_second: float | None
    last: float | None  # time of the last known step
    usual: float | None  # usual seconds between two signs of progress


def read_status(folder: Path, now: float | None = None) -> RunStatus:
    """Reads the status of a run.

    Args:
        folder: its output folder.
        now: the time in seconds since 1970; None for the clock.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    now = time.time() if now is None else now
    run = read_run(folder)
    end = mapping(run.record.get("end"))
    state = state_of(run, end)
    pace = _pace_of(run)
    is_running = state == RUNNING
    passed = max(now - pace.last, 0.0) if is_running and pace.last is not None else None
    left = None
    if is_running and run.max_steps is not None and pace.seconds_a_step is not None:
        left = max((run.max_steps - run.last_step) * pace.seconds_a_step - (passed or 0.0), 0.0)
    journal = _last_values(run)
    return RunStatus(
        name=run.name,
        folder=folder,
        state=state,
        step=max(run.last_step, end["step"] if is_count(end.get("step")) else 0),
        max_steps=run.max_steps,
        epoch=run.last_epoch,
        seconds=seconds_of(run, end, is_running=is_running),
        seconds_left=left,
        steps_per_second=1 / pace.seconds_a_step if pace.seconds_a_step else None,
        samples_per_second=pace.samples_a_second,
        tokens_per_second=pace.tokens_a_second,
        loss=journal["loss"] if journal else _last(run, "loss"),
        losses=_losses(run),
        learning_rate=journal["learning_rate"] if journal else _last(run, "learning_rate"),
        grad_norm=journal["grad_norm"] if journal else _last(run, "grad_norm"),
        evaluation=_evaluation(run),
        best=best_of(run, end),
        times=_times(run),
        warnings=_warnings(run, end, state, passed, pace.usual),
        since_progress=passed,
    )


def _pace_of(run: RunData) -> _Pace:
    """Measures the later half of the last start by the times of its log rows, or by the time of the journal."""
    first = run.first_step
    points = _points_of(run, first)
    if len(points) < 2:
        return _Pace(None, None, None, points[-1][0] if points else None, None)
    last = points[-1]
    half = (last[1] + first) / 2
    old = next((point for point in reversed(points[1:-1]) if point[1] <= half), points[1 if len(points) > 2 else 0])
    if last[0] <= old[0] or last[1] <= old[1]:
        old = points[0]
    seconds, steps = last[0] - old[0], last[1] - old[1]
    usual = (last[0] - points[0][0]) / (len(points) - 1)
    if seconds <= 0 or steps <= 0:
        return _Pace(None, None, None, last[0], usual)
    updates = run.updates
    is_half = (updates["step"] > old[1]) & (updates["step"] <= last[1])
    samples = float(updates["num_samples"][is_half].sum()) / seconds
    tokens = (last[2] - old[2]) / seconds if last[2] > old[2] > 0 else None
    return _Pace(seconds / steps, samples or None, tokens, last[0], usual)


def _points_of(run: RunData, first: int) -> list[tuple[float, float, float]]:
    """Returns (time, step, tokens) of the last start and of the steps since then that its files record."""
    began = _seconds_of_time(run.record.get("started"))
    points = [(began, float(first), 0.0)] if began is not None else []
    for row in run.rows:
        moment, tokens = row.get("time"), row.get("num_input_tokens_seen")
        if not is_number(moment) or row["step"] <= first:
            continue
        if began is None or moment >= began:
            points.append((float(moment), float(row["step"]), float(tokens) if is_number(tokens) else 0.0))
    if len(points) < 3 and began is not None and len(run.updates):
        try:
            written = (run.folder / JOURNAL_FILE).stat().st_mtime
        except OSError:
            written = began
        points = [points[0], (written, float(run.updates["step"][-1]), 0.0)]
    return points


def _last_values(run: RunData) -> dict[str, Any]:
    """Returns the last counted row of the journal; empty without one."""
    counted = run.updates[run.updates["is_counted"] != 0]
    if not len(counted):
        return {}
    row = counted[-1]
    norm = float(row["grad_norm"])
    return {
        "loss": float(row["loss"]),
        "learning_rate": float(row["learning_rate"]),
        "grad_norm": norm if norm >= 0 or math.isnan(norm) else None,
    }


def _losses(run: RunData) -> list[float]:
    counted = run.updates[run.updates["is_counted"] != 0]
    values = counted["loss"]
    if not len(counted):
        values = np.array([float(row["loss"]) for row in run.rows if is_number(row.get("loss"))])
    values = values[np.isfinite(values)]
    if len(values) > MOST_LOSSES:
        edges = np.linspace(0, len(values), MOST_LOSSES + 1).astype(int)
        values = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    found: list[float] = values.tolist()
    return found


def _evaluation(run: RunData) -> dict[str, Any]:
    for row in reversed(run.rows):
        values = {name: value for name, value in row.items() if name.startswith("eval_")}
        if values:
            return {"step": row["step"], **values}
    return {}


def _times(run: RunData) -> dict[str, float]:
    totals = dict.fromkeys(ACTIVITIES, 0.0)
    for row in run.rows:
        for name in ACTIVITIES:
            value = row.get(PREFIX + name)
            if is_number(value):
                totals[name] += float(value)
    known = {name: seconds for name, seconds in totals.items() if seconds > 0}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def _warnings(run: RunData, end: Mapping[str, Any], state: str, passed: float | None, usual: float | None) -> list[str]:
    found = []
    if isinstance(end.get("error"), str) and state != RUNNING:
        found.append(str(end["error"]))
    if passed is not None and passed > max(_LEAST_QUIET, _QUIET * (usual or 0.0)):
        found.append(f"its files have recorded no step for {passed / 60:.0f} minutes")
    losses = run.updates["loss"][run.updates["is_counted"] != 0]
    num_infinite = int((~np.isfinite(losses)).sum())
    if num_infinite:
        found.append(f"the loss of {num_infinite:,} of {len(losses):,} steps is not finite")
    if run.skipped:
        found.append(f"{len(run.skipped):,} accumulation windows were skipped after values that were not finite")
    return found + run.problems


def _last(run: RunData, key: str) -> float | None:
    values = (row[key] for row in reversed(run.rows) if is_number(row.get(key)))
    return next((float(value) for value in values), None)


def _seconds_of_time(value: object) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
