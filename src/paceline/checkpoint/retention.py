"""Retention policies for checkpoints. Standard library only.

Policies compose: a checkpoint is kept if any of them keeps it. The newest and the run's best one are always kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.metric_names import is_maximized
from paceline.args.sections import Options
from paceline.checkpoint.folders import delete_oldest, sort_checkpoints, step_of, surplus
from paceline.core.lineage import RunMark, is_of_run, is_part, mark_of
from paceline.core.metrics import best_metric_value, is_better


@dataclass(frozen=True)
class Retention:
    """A retention policy; without any option, all checkpoints are kept.

    Attributes:
        last: keep the N newest checkpoints, including the run's best; None, with another policy set, keeps only the
            newest.
        best: also keep the N best checkpoints by `metric`.
        every_steps: also keep the checkpoints at multiples of N optimizer steps.
        every_hours: also keep the first checkpoint, and then one per N hours of training.
        metric: an evaluation metric, with or without `eval_`.
        greater_is_better: True if larger values are better.
    """

    last: int | None = None
    best: int = 0
    every_steps: int = 0
    every_hours: float = 0.0
    metric: str = "loss"
    greater_is_better: bool = False

    @property
    def is_set(self) -> bool:
        """True if any checkpoint is ever deleted."""
        return bool(self.last or self.best or self.every_steps or self.every_hours)


def retention_of(args: Options) -> Retention:
    """Returns the policy of the save options, metric_for_best_model and greater_is_better."""
    chosen = args.metric_for_best_model or "loss"
    metric = args.keep_best_metric or chosen
    is_chosen = metric.removeprefix("eval_") == chosen.removeprefix("eval_")
    greater = args.greater_is_better if is_chosen and args.greater_is_better is not None else is_maximized(metric)
    return Retention(
        last=args.save_total_limit,
        best=args.keep_best,
        every_steps=args.keep_every_steps,
        every_hours=args.keep_every_hours,
        metric=metric,
        greater_is_better=greater,
    )


def rotate(
    output_dir: str | os.PathLike[str],
    retention: Retention,
    history: Iterable[Mapping[str, Any]] = (),
    best: str | None = None,
    *,
    run: RunMark | None = None,
) -> list[str]:
    """Deletes the checkpoints of a run that no policy keeps, oldest first; other runs' checkpoints are not touched.

    Args:
        history: the rows logged so far; rows of evaluations determine the best checkpoints.
        best: the run's best checkpoint.
        run: the run that owns the checkpoints; None includes all checkpoints.

    Returns: the deleted paths. A failed deletion is logged.
    """
    if not retention.is_set:
        return []
    marks = {path: mark_of(Path(path)) for path in sort_checkpoints(output_dir)}
    order = in_order(marks, run)
    pinned = pinned_by(
        retention, _on_the_way(marks, order, run), scores_of(history if retention.best else (), retention.metric)
    )
    return delete_oldest(order, retention.last or 1, best, pinned)


def unwanted(
    marks: Mapping[str, RunMark | None],
    retention: Retention,
    history: Iterable[Mapping[str, Any]] = (),
    best: str | None = None,
    *,
    run: RunMark | None = None,
) -> list[str]:
    """Returns the names of the checkpoints that no policy keeps, for stores without folders.

    Args:
        marks: maps names to marks.
        history, best, run: see `rotate`; `best` is a name here.
    """
    order = in_order(marks, run)
    if not retention.is_set or not order:
        return []
    pinned = pinned_by(
        retention, _on_the_way(marks, order, run), scores_of(history if retention.best else (), retention.metric)
    )
    candidates, num_to_delete = surplus(order, retention.last or 1, best if best in order else None, pinned)
    return candidates[: max(0, num_to_delete)]


def in_order(marks: Mapping[str, RunMark | None], run: RunMark | None) -> list[str]:
    """Returns the checkpoints of a run, oldest first: discarded ones (after a resume step), then the rest, by step.

    No file times are used, so the checkpoint that was just written is always last.
    """
    own = [path for path, mark in marks.items() if run is None or is_of_run(run, Path(path).name, mark)]
    return sorted(own, key=lambda path: (is_part(run, Path(path).name, marks[path]), step_of(path)))


def _on_the_way(
    marks: Mapping[str, RunMark | None], order: Sequence[str], run: RunMark | None
) -> dict[str, float | None]:
    """Maps the paths of the checkpoints in a run's history to their seconds of training."""
    found = {path: marks[path] for path in order if is_part(run, Path(path).name, marks[path])}
    return {path: None if mark is None else mark.seconds for path, mark in found.items()}


def pinned_by(retention: Retention, seconds: Mapping[str, float | None], scores: Mapping[int, float]) -> set[str]:
    """Returns the checkpoints that `best`, `every_steps` and `every_hours` keep.

    Args:
        retention: the policy.
        seconds: maps the path of each checkpoint to its seconds of training. `every_hours` keeps checkpoints with
            unknown seconds.
        scores: maps steps to their evaluation metric.
    """
    by_step = {step_of(path): path for path in seconds}
    pinned = set(_best(retention, [step for step in sorted(by_step) if step in scores], scores, by_step))
    if retention.every_steps:
        pinned.update(path for step, path in by_step.items() if step % retention.every_steps == 0)
    if retention.every_hours:
        last = -math.inf
        for _, path in sorted(by_step.items()):
            at = seconds[path]
            if at is None:
                pinned.add(path)
            elif at - last >= 3600 * retention.every_hours:
                pinned.add(path)
                last = at
    return pinned


def scores_of(history: Iterable[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Maps steps to their evaluation metric; steps without the metric, or with NaN, are omitted."""
    scores: dict[int, float] = {}
    key = metric if metric.startswith("eval_") else f"eval_{metric}"
    for row in history:
        if key not in row:  # skips training rows, which are most of the rows, cheaply
            continue
        try:
            value = best_metric_value({key: row[key]}, key)
        except TypeError:
            continue
        if not math.isnan(value):
            scores[int(row.get("step", -1))] = value
    return scores


def _best(
    retention: Retention, steps: Sequence[int], scores: Mapping[int, float], by_step: Mapping[int, str]
) -> list[str]:
    """Returns the best checkpoints; ties are won by the earlier one."""
    left, chosen = list(steps), []
    for _ in range(min(retention.best, len(left))):
        top = left[0]
        for step in left[1:]:
            if is_better(scores[step], scores[top], retention.greater_is_better):
                top = step
        left.remove(top)
        chosen.append(by_step[top])
    return chosen
