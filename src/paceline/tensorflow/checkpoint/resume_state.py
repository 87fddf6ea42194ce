"""`progress.json`: the state of a run besides its variables (data position, callbacks, random state, arguments)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.plan import Plan
from paceline.checkpoint.resuming import is_same
from paceline.core.counts import is_count, is_json, shown
from paceline.core.journal import skipped_windows
from paceline.core.lineage import KEY, PROGRESS_FILE, RunMark
from paceline.core.log_text import LogText
from paceline.core.loop import Loop
from paceline.core.summary import UpdateSummary
from paceline.tensorflow.checkpoint.variables import CheckpointError
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.engine import TFEngine
from paceline.tensorflow.optim.following import FollowingSchedule
from paceline.tensorflow.optim.schedules import StepSchedule
from paceline.tensorflow.randomness import capture_random

# if these are unchanged, a resumed run keeps the length of the original run
LENGTH_OPTIONS = ("num_train_epochs", "max_steps", "gradient_accumulation_steps", "per_device_train_batch_size")


@dataclass(frozen=True)
class RunInProgress:
    """The parts of a run whose states a checkpoint holds.

    Attributes:
        mark: the run's current mark, which identifies its checkpoints.
        feed: iterates over the data.
        engine: runs the optimizer steps.
        loop: schedules steps, logs, evaluations and saves; None before it is created.
        log_text: the rows of the log as text.
    """

    mark: RunMark
    feed: TFFeed
    engine: TFEngine
    loop: Loop | None
    log_text: LogText


def describe_progress(
    run: RunInProgress | None,
    *,
    max_steps: int,
    callbacks: Mapping[str, Any],
    schedule: object,
    arguments: Mapping[str, Any],
) -> str:
    """Returns the text of `progress.json`.

    Args:
        run: None outside of `train`.
        max_steps: the value of the trainer's state, which an out-of-memory error may have changed.
        callbacks: the states of the callbacks, by name.
        schedule: the learning-rate schedule.
        arguments: options by name, as plain values.

    Raises:
        TypeError: a callback's state is not made of plain values.
    """
    loop = run.loop if run is not None else None
    progress: dict[str, Any] = {
        "format": 1,
        "framework": "tensorflow",
        **({KEY: run.mark.to_json()} if run is not None else {}),
        "feed": run.feed.state_dict() if run is not None else None,
        "callbacks": callbacks,
        "skipped": sorted(loop.skipped) if loop is not None else [],
        "unlogged": dataclasses.asdict(loop.unlogged) if loop is not None else {},
        "length": {"planned": loop.plan.max_steps, "max_steps": max_steps} if loop is not None else {},
        "micro_batches": loop.micro_batches.state_dict() if loop is not None else {},
        "is_epoch_open": loop is not None and loop.is_epoch_open,
        "evaluation": loop.evaluation.state_dict() if loop is not None else {},
        "random": capture_random(),
        "traces": run.engine.traces() if run is not None else {},
        "schedule": schedule_state(schedule),
        "arguments": arguments,
    }
    for name, state in callbacks.items():
        if not is_json(state, (list, tuple)):
            raise TypeError(
                f"The state of callback {name} cannot be saved: let state_dict() return numbers, text, lists, and "
                "dicts whose keys are text."
            )
    return json.dumps(progress, indent=1)


def schedule_state(schedule: object) -> dict[str, Any] | None:
    """Returns the state of a schedule that depends on evaluations, or that can be scaled; None for any other."""
    return schedule.state_dict() if isinstance(schedule, FollowingSchedule | StepSchedule) else None


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Returns the contents of `progress.json`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        progress = json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} holds no readable {PROGRESS_FILE}: {error}") from error
    if not isinstance(progress, dict):
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE} does not hold a mapping.")
    return progress


@contextmanager
def wrap_load_error(checkpoint: Path | None) -> Iterator[None]:
    """Converts errors that a damaged `progress.json` causes in the block to a CheckpointError that names the file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if checkpoint is None or checkpoint.name in str(error):
            raise
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE} is damaged, or does not fit this run: {told}") from error


def read_unlogged(checkpoint: Path, progress: Mapping[str, Any]) -> tuple[UpdateSummary, set[tuple[int, int]]]:
    """Returns the summary of steps not logged yet, and the skipped accumulation windows.

    Raises:
        CheckpointError: the file's contents are invalid.
    """
    try:
        return UpdateSummary.restored(progress.get("unlogged") or {}), skipped_windows(progress)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE}: {error}") from error


def restore_position(
    feed: TFFeed,
    plan: Plan,
    checkpoint: Path,
    progress: Mapping[str, Any],
    *,
    global_step: int,
    arguments: Mapping[str, Any],
    warmup_steps: Callable[[int], int],
) -> tuple[Plan, int]:
    """Restores the feed's position from the checkpoint, and plans the remaining optimizer steps.

    If the batch size, accumulation or number of epochs has changed, the number of remaining optimizer steps is
    recomputed from the remaining samples.

    Args:
        feed: its position is set.
        plan: the plan of a run from the start.
        checkpoint: the checkpoint's folder.
        progress: contents of `progress.json`.
        global_step: the checkpoint's step.
        arguments: the current options by name, as plain values.
        warmup_steps: `(optimizer steps of the run) -> warmup steps`.

    Returns: the plan, and `max_steps` for the trainer's state.

    Raises:
        CheckpointError: the position or the length is damaged.
    """
    try:
        feed.load_state_dict(progress["feed"])
        if not all(map(is_count, (feed.epoch, feed.consumed, feed.batches))):
            raise ValueError("the position in the data is not made of whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE}: {error}") from error
    if arguments["max_steps"] > 0 or plan.updates_per_epoch is None or plan.micro_batches_per_epoch is None:
        return plan, plan.max_steps
    length: Mapping[str, Any] = progress.get("length") or {}
    before = progress.get("arguments") or {}
    planned: Any
    max_steps: Any
    if length and all(name in before and is_same(before[name], arguments[name]) for name in LENGTH_OPTIONS):
        planned, max_steps = (length.get(name) for name in ("planned", "max_steps"))
        if not all(is_count(number) and number >= global_step for number in (planned, max_steps)):
            raise CheckpointError(
                f"{checkpoint / PROGRESS_FILE}: the length of the run cannot be {shown(planned)}, {shown(max_steps)}"
            )
    else:
        left = plan.micro_batches_per_epoch - feed.batches
        done = feed.epoch * plan.updates_per_epoch + plan.updates_per_epoch + (-left // plan.accumulation_steps)
        planned = max_steps = global_step + max(plan.max_steps - done, 0)
    return dataclasses.replace(plan, max_steps=planned, warmup_steps=warmup_steps(planned)), max_steps
