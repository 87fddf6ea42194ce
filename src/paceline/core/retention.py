"""Which checkpoints stay. Standard library only.

Policies compose: a checkpoint stays when any of them wants it. The newest and the run's best always stay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.folders import MANIFEST_NAME, rotate_checkpoints, sort_checkpoints, step_of, surplus
from paceline.core.metrics import best_metric_value, is_better


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; nothing set: all.

    Attributes:
        last: the newest so many. The run's best counts among them; None, when another policy is set: only the newest.
        best: the best so many by `metric`, beside the last.
        every_steps: those at multiples of so many updates, beside the last.
        every_hours: the first, and then one for each so many hours, beside the last.
        metric: a metric of the evaluations, with or without its `eval_`.
        greater_is_better: whether a larger one is the better.
    """

    last: int | None = None
    best: int = 0
    every_steps: int = 0
    every_hours: float = 0.0
    metric: str = "loss"
    greater_is_better: bool = False

    @property
    def is_set(self) -> bool:
        """Whether anything is ever deleted."""
        return bool(self.last or self.best or self.every_steps or self.every_hours)


def retention_of(args: Any) -> Retention:
    """What the arguments ask for. Reads the save options, metric_for_best_model and greater_is_better."""
    chosen = args.metric_for_best_model or "loss"
    metric = args.keep_best_metric or chosen
    by_name = not metric.endswith("loss")
    is_chosen = metric.removeprefix("eval_") == chosen.removeprefix("eval_")
    greater = args.greater_is_better if is_chosen and args.greater_is_better is not None else by_name
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
) -> list[str]:
    """Delete the checkpoints of `output_dir` that no policy wants, oldest first.

    Args:
        history: the rows logged so far; those of evaluations tell which checkpoints are the best ones.
        best: the run's best checkpoint.

    Returns: the paths deleted. What cannot be deleted is logged and stays.
    """
    if not retention.is_set:
        return []
    checkpoints = sort_checkpoints(output_dir)
    pinned = pinned_by(retention, {path: _time_of(path) for path in checkpoints}, scores_of(history, retention.metric))
    # by time, since an earlier run's may lie there
    return rotate_checkpoints(output_dir, retention.last or 1, best, use_mtime=True, pinned=pinned)


def unwanted(
    times: Mapping[str, float],
    retention: Retention,
    history: Iterable[Mapping[str, Any]] = (),
    best: str | None = None,
) -> list[str]:
    """Names of the checkpoints that no policy wants, for places that hold no folders.

    Args:
        times: name -> when it was written; the order in which they count as old.
        history, best: as for `rotate`; the best by its name.
    """
    if not retention.is_set or not times:
        return []
    checkpoints = sorted(times, key=lambda name: (times[name], step_of(name)))
    pinned = pinned_by(retention, times, scores_of(history, retention.metric))
    candidates, num_to_delete = surplus(checkpoints, retention.last or 1, best if best in times else None, pinned)
    return candidates[: max(0, num_to_delete)]


def pinned_by(retention: Retention, times: Mapping[str, float], scores: Mapping[int, float]) -> set[str]:
    """Those that stay whatever comes after them.

    Args:
        times: path -> seconds at which the checkpoint was written, for all there are.
        scores: step -> its evaluation.
    """
    by_step = {step_of(path): path for path in times}
    pinned = set(_best(retention, [step for step in sorted(by_step) if step in scores], scores, by_step))
    if retention.every_steps:
        pinned.update(path for step, path in by_step.items() if step % retention.every_steps == 0)
    if retention.every_hours:
        last = -math.inf
        for path in sorted(times, key=lambda path: (times[path], step_of(path))):
            if times[path] - last >= 3600 * retention.every_hours:
                pinned.add(path)
                last = times[path]
    return pinned


def scores_of(history: Iterable[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Step -> the metric that was evaluated there; steps without it, or with NaN, are left out."""
    scores: dict[int, float] = {}
    for row in history:
        evaluated = {name: value for name, value in row.items() if name.startswith("eval_")}
        try:
            value = best_metric_value(evaluated, metric)
        except (KeyError, TypeError):
            continue
        if not math.isnan(value):
            scores[int(row.get("step", -1))] = value
    return scores


def _best(
    retention: Retention, steps: Sequence[int], scores: Mapping[int, float], by_step: Mapping[int, str]
) -> list[str]:
    """The best ones; of equals, the earlier."""
    left, chosen = list(steps), []
    for _ in range(min(retention.best, len(left))):
        top = left[0]
        for step in left[1:]:
            if is_better(scores[step], scores[top], retention.greater_is_better):
                top = step
        left.remove(top)
        chosen.append(by_step[top])
    return chosen


def _time_of(path: str) -> float:
    """When a checkpoint was written; its manifest tells, since a folder's own time changes with what is put into it."""
    for place in (Path(path, MANIFEST_NAME), Path(path)):
        try:
            return place.stat().st_mtime
        except OSError:
            continue
    return 0.0
