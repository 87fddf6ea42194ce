"""The state of a run in a checkpoint besides weights and optimizer: data position, callbacks, arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from paceline.args.plan import Plan
from paceline.args.registry import SAMPLERS
from paceline.args.warmups import passes_of
from paceline.checkpoint import resuming
from paceline.checkpoint.layout import CALLBACKS, DATA, LOSS, PROGRESS
from paceline.core.contracts import Stateful
from paceline.core.counts import is_count, is_json, shown
from paceline.core.journal import skipped_windows
from paceline.core.lineage import KEY, PROGRESS_FILE, RunMark
from paceline.core.loop import Loop
from paceline.core.summary import UpdateSummary
from paceline.pytorch.checkpoint.items import Items
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_json, load_tensors, plain_values
from paceline.pytorch.checkpoint.validate_state import wrap_load_error
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.dispatch import DispatchedLoader
from paceline.pytorch.data.feed import StatefulDataIterator, place_in
from paceline.pytorch.data.lengths import global_micro_batch_size, length_of, sample_count
from paceline.pytorch.data.portable import from_portable, to_portable
from paceline.pytorch.data.stream import StreamLoader, samples_in
from paceline.pytorch.data.stream_places import CannotContinue, place_for_others
from paceline.pytorch.distributed.launchers import num_restarts, run_identity

logger = logging.getLogger(__name__)

STATE_FILE = resuming.STATE_FILE
CALLBACKS_FILE = "callbacks.pt"  # callback states that JSON would alter: tensors, tuples, keys that are not strings


class LoopProgress:
    """The state of the loop, as an item."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def state_dict(self) -> dict[str, Any]:
        """Returns the skipped windows, the summary of steps not logged yet, the run's length and its batch sizes, and
        the evaluation that a signal has interrupted."""
        loop = self.loop
        return {
            "skipped": sorted(loop.skipped),
            "unlogged": dataclasses.asdict(loop.unlogged),
            "length": {"planned": loop.plan.max_steps, "max_steps": loop.state.max_steps},
            "update_size": loop.plan.update_size,
            "micro_batches": loop.micro_batches.state_dict(),
            "is_epoch_open": loop.is_epoch_open,
            "evaluation": loop.evaluation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restores everything but the run's length."""
        unlogged = UpdateSummary.restored(state.get("unlogged") or {})
        is_epoch_open = state.get("is_epoch_open") is True
        self.loop.resume(
            unlogged, skipped_windows(state), state.get("micro_batches"), is_epoch_open, state.get("evaluation")
        )


NO_PROGRESS: dict[str, Any] = {
    "skipped": [],
    "unlogged": {},
    "length": {},
    "update_size": None,
    "micro_batches": {},
    "is_epoch_open": False,
    "evaluation": {},
}  # outside of a run


def describe_progress(
    items: Items,
    *,
    mark: RunMark | None,
    positions: list[Any] | None,
    arguments: Mapping[str, Any],
    world_size: int,
    data_size: int,
) -> tuple[str, dict[str, Any]]:
    """Returns the text of `progress.json`, and the callback states that JSON would alter, for `callbacks.pt`.

    Args:
        items: the items for data, callbacks, loss and loop are stored here.
        mark: the run's mark for this checkpoint; None outside of a run.
        positions: the processes' positions in the data, if they differ.
        arguments: the current arguments, as plain values.
        world_size: the number of processes.
        data_size: the number of processes that read different data.

    Raises:
        TypeError: a callback's state holds unsupported values; the message names the callback.
    """
    states = items[CALLBACKS].state_dict()
    other = {name: state for name, state in states.items() if not is_json(state)}
    for name, state in other.items():
        try:
            plain_values(state, "state", tensor=lambda value: value)
        except TypeError as error:
            raise TypeError(f"The state of callback {name} cannot be saved: {error}") from error
    loop = items[PROGRESS].state_dict() if PROGRESS in items else NO_PROGRESS
    progress: dict[str, Any] = {
        "format": 1,
        **({KEY: mark.to_json()} if mark is not None else {}),
        "feed": items[DATA].state_dict() if DATA in items else None,
        "feeds": positions,
        "callbacks": {name: state for name, state in states.items() if name not in other},
        "skipped": loop["skipped"],
        "unlogged": loop["unlogged"],
        "loss_rule": items[LOSS].state_dict(),
        "length": loop["length"],
        "arguments": arguments,
        "world_size": world_size,
        "data_size": data_size,
        "update_size": loop["update_size"],
        "micro_batches": loop["micro_batches"],
        "is_epoch_open": loop["is_epoch_open"],
        "evaluation": loop["evaluation"],
        "launch": run_identity(os.environ),
    }
    return json.dumps(progress), other  # without indent: C code writes it, in a tenth of the time


def read_progress(checkpoint: Path) -> dict[str, Any] | None:
    """Returns the contents of `progress.json`; None if another library wrote the checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = checkpoint / PROGRESS_FILE
    if not path.is_file():
        return None
    progress = load_json(path)
    if not isinstance(progress, dict):
        raise CheckpointError(f"{path} does not hold a mapping")
    return progress


def restarted_from(checkpoint: Path) -> bool:
    """True if the launcher restarted these processes after one died, and the same launch wrote the checkpoint."""
    launch = run_identity(os.environ)
    progress = read_progress(checkpoint) if launch is not None and num_restarts(os.environ) > 0 else None
    return progress is not None and progress.get("launch") == launch


def resumed_batch_size(
    checkpoint: Path, *, data_size: int, global_batch_size: int, arguments: Mapping[str, Any], reads_stream: bool
) -> int | None:
    """Returns the global batch size of the original run, if it is resumed on another number of processes.

    Returns None if the number is the same or the current arguments give the same size; if the batch arguments were
    changed, which then take precedence; or if the samples cannot be sharded evenly.

    Args:
        checkpoint: a checkpoint of the original run.
        data_size: the number of processes that read different data now.
        global_batch_size: the size that the current arguments request.
        arguments: the current arguments, as plain values.
        reads_stream: the training data is a stream.
    """
    progress = read_progress(checkpoint) or {}
    before, kept = progress.get("data_size", progress.get("world_size")), progress.get("update_size")
    if before in (None, data_size) or not is_count(before) or not is_count(kept) or kept < 1:
        return None
    changed = changed_batch(progress.get("arguments") or {}, arguments)
    reason = f"{', '.join(changed)} was set" if changed else None
    accumulation = arguments["gradient_accumulation_steps"]
    micro_batch_size = math.ceil(global_batch_size / accumulation / data_size)
    shares = DataShard.of_update(0, data_size, micro_batch_size, kept)
    unit = "samples" if recorded(arguments, "per_device_train_tokens") is None else "micro-batches"
    reason = obstacle(arguments, shares, kept, unit, reads_stream=reads_stream) or reason
    if reason is not None and global_batch_size != kept:
        logger.warning(
            "Each optimizer step now takes %d %s, not %d as before: %s.", global_batch_size, unit, kept, reason
        )
        return None
    if global_batch_size == kept:
        return None
    logger.warning(
        "Begun on %s processes, resuming on %d: each optimizer step takes the same %d %s, in %d micro-batches.",
        before,
        data_size,
        kept,
        unit,
        len(shares.slots),
    )
    return kept


def obstacle(
    arguments: Mapping[str, Any], shares: DataShard, kept: int, unit: str, *, reads_stream: bool
) -> str | None:
    """Returns the reason why the processes cannot keep the global batch size of another number of processes.

    Returns None if they can.

    Args:
        arguments: the current arguments, as plain values.
        shares: the data shards of the current processes.
        kept: the global batch size to keep, in `unit`.
        unit: "samples" or "micro-batches".
        reads_stream: the training data is a stream.
    """
    if reads_stream and shares.each is None:
        return f"of a stream, {kept} samples cannot be sharded evenly across {shares.size} processes"
    if min(shares.slots) < shares.size:
        return f"{kept} {unit} are too few for {shares.size} processes"
    if unit == "micro-batches" and kept % shares.size:
        return f"{kept} micro-batches cannot be dispatched evenly to {shares.size} processes"
    if SAMPLERS[arguments["train_sampling_strategy"]].makes_batches:
        return f"train_sampling_strategy={arguments['train_sampling_strategy']!r} makes its own micro-batches"
    return None


def recorded(arguments: Mapping[str, Any], name: str) -> Any:
    """Returns an option that a checkpoint records; None if it was None, or did not exist then."""
    value = arguments.get(name)
    return None if value == str(None) else value


def changed_batch(saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Returns the options for the global batch size that have changed, with their current values, as text."""
    names = ("per_device_train_batch_size", "per_device_train_tokens", "gradient_accumulation_steps")
    changed = [f"{name}={arguments[name]}" for name in names if recorded(saved, name) != recorded(arguments, name)]
    split, splits = ("'split_batches': True" in str(each.get("accelerator_config")) for each in (saved, arguments))
    return changed + ([f"accelerator_config={{'split_batches': {splits}}}"] if split != splits else [])


def position_of_transformers(checkpoint: Path, loader: object, plan: Plan) -> dict[str, Any]:
    """Returns the position of a transformers checkpoint in the data, which is not recorded in samples.

    The checkpoint records the epoch as a fraction, and the batch size. The position is computed from these, so that it
    is right even if the batch size or accumulation has changed. For a stream of unknown length the whole run counts as
    one epoch.
    """
    path = checkpoint / STATE_FILE
    saved = load_json(path) if path.is_file() else {}
    batch_size = int(saved.get("train_batch_size") or plan.micro_batch_size)
    num_samples = length_of(getattr(loader, "dataset", None)) or plan.samples_per_epoch
    if num_samples is None:
        per_epoch = max(int(saved.get("max_steps") or 0) * plan.accumulation_steps, 1)
    elif getattr(loader, "drop_last", False):
        per_epoch = max(num_samples // batch_size, 1)
    else:
        per_epoch = max(-(-num_samples // batch_size), 1)
    epoch, batches = divmod(round(float(saved.get("epoch") or 0.0) * per_epoch), per_epoch)
    consumed = batches * batch_size
    if num_samples is not None:
        consumed = min(consumed, num_samples)
    return {"epoch": epoch, "batches": batches, "consumed": consumed, "batch_size": batch_size}


@dataclass(eq=False)
class PositionRestorer:
    """Restores the data position from a checkpoint, and plans the remaining optimizer steps.

    The position counts samples. If the batch size, accumulation, number of epochs or number of samples has changed, the
    remaining samples give another number of optimizer steps, and a run measured in epochs becomes longer or shorter. If
    nothing has changed, the length stays the same, even after steps that a rollback or a callback skipped.

    Args:
        checkpoint: holds the position.
        feed: its position is set.
        plan: the plan of a run from the start.
        global_step: the checkpoint's step.
        coordinates: the index of this process among those that read different data, and their number.
        arguments: the current arguments, as plain values.
        warmup_steps: `(optimizer steps of the run) -> warmup steps`.
    """

    checkpoint: Path
    feed: StatefulDataIterator
    plan: Plan
    _: KW_ONLY
    global_step: int
    coordinates: tuple[int, int]
    arguments: Mapping[str, Any]
    warmup_steps: Callable[[int], int]

    def restore(self) -> tuple[Plan, int]:
        """Sets the feed's position; returns the plan and the number of the last optimizer step of the resumed run."""
        checkpoint, feed, plan = self.checkpoint, self.feed, self.plan
        progress = read_progress(checkpoint) or {}
        with wrap_load_error(checkpoint / PROGRESS_FILE):
            position = self._own_position(progress)
        source = PROGRESS_FILE if position is not None else STATE_FILE
        if position is None:
            with wrap_load_error(checkpoint / source):
                position = position_of_transformers(checkpoint, feed.loader, plan)
        with wrap_load_error(checkpoint / source):
            feed.load_state_dict(position, source=str(checkpoint / source))
            if not all(map(is_count, (feed.epoch, feed.consumed, feed.batches))):
                raise ValueError("the position in the data is not made of whole numbers")
            if not feed.is_within(self.global_step + len(progress.get("skipped") or ())):
                raise ValueError(f"{feed.consumed} samples in {self.global_step} steps (global_step of {STATE_FILE})")
            left = (plan.micro_batches_per_epoch or 0) - place_in(feed.loader, position)[1]
            length = self._planned_length(progress)
        if self.arguments["max_steps"] > 0 or plan.updates_per_epoch is None or plan.micro_batches_per_epoch is None:
            return plan, plan.max_steps
        if length is not None:
            planned, max_steps = length
        elif plan.batch_warmup is not None:
            passes = passes_of(plan.num_train_epochs, plan.micro_batches_per_epoch, feed.epoch, left)
            planned = max_steps = plan.batch_warmup.step_after(self.global_step, passes)
        else:
            done = feed.epoch * plan.updates_per_epoch + plan.updates_per_epoch + (-left // plan.accumulation_steps)
            if done == self.global_step:
                return plan, plan.max_steps
            planned = max_steps = self.global_step + max(plan.max_steps - done, 0)
            logger.info("With this batch size the run ends at step %d, not %d.", max_steps, plan.max_steps)
        return dataclasses.replace(plan, max_steps=planned, warmup_steps=self.warmup_steps(planned)), max_steps

    def _own_position(self, progress: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns this process's position in the data, from the positions in a checkpoint.

        Raises:
            ValueError: each process had its own shard, and the current number of processes cannot take these over.
        """
        (rank, size), positions, loader = self.coordinates, progress.get("feeds"), self.feed.loader
        common: dict[str, Any] | None = progress.get("feed")
        was_alone = progress.get("data_size", progress.get("world_size")) == 1 or bool((common or {}).get("is_dealt"))
        if isinstance(loader, DispatchedLoader):  # one process reads for all
            rank, size, loader = 0, 1, loader.loader
        if positions is None and size > 1 and was_alone and isinstance(loader, StreamLoader):
            positions = [common]  # each process now reads a shard of a dataset that one process read whole
        if positions is None:
            return common
        first: dict[str, Any] = positions[0]
        if len(positions) == size:
            own: dict[str, Any] = positions[rank]
            return own
        if self.arguments["ignore_data_skip"] or not first["consumed"]:
            return first
        before, reason = len(positions), "its loader saves a position that only one process can restore"
        try:
            if isinstance(loader, StreamLoader) and "stream" in first:
                return position_for_others(positions, size, loader)
        except CannotContinue as error:
            reason = str(error)
        raise ValueError(
            f"The checkpoint was written in the middle of a stream ({PROGRESS_FILE}) that {before} "
            f"process{'es' if before > 1 else ''} read, and there are {size} now: {reason}. Resume on {before}, or set "
            "ignore_data_skip=True to restart the epoch."
        )

    def _planned_length(self, progress: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the saved numbers of optimizer steps (of the schedule, of the run); None if they are outdated."""
        length, position, before = (progress.get(name) or {} for name in ("length", "feed", "arguments"))
        names = ("num_train_epochs", "max_steps", "gradient_accumulation_steps")
        is_as_before = all(name in before and resuming.is_same(before[name], self.arguments[name]) for name in names)
        for name in ("per_device_train_tokens", "batch_size_warmup"):
            is_as_before &= recorded(self.arguments, name) == recorded(before, name)
        loader = self.feed.loader
        sizes = {"batch_size": global_micro_batch_size(loader), "num_samples": sample_count(loader)}
        if (
            not length
            or not is_as_before
            or any(name not in position or position[name] != sizes[name] for name in sizes)
        ):
            return None
        planned, max_steps = length["planned"], length["max_steps"]
        if not all(is_count(number) and number >= self.global_step for number in (planned, max_steps)):
            raise ValueError(f"the length of the run cannot be {shown(planned)}, {shown(max_steps)}")
        return planned, max_steps


def position_for_others(positions: list[dict[str, Any]], size: int, loader: StreamLoader) -> dict[str, Any]:
    """Returns the stream position from which `size` processes resume, given the positions of the old processes."""
    common, at_once = positions[0], loader.global_micro_batch_size
    before = [from_portable(position["stream"]) for position in positions]
    consumed, per_reader = common["consumed"], max(int(common["batch_size"] or 1) // len(positions), 1)
    stream = place_for_others(before, size, loader.num_workers, consumed, per_reader)
    return {
        **common,
        "batches": -(-consumed // at_once),
        "batch_size": at_once,
        "own_consumed": samples_in(stream),
        "stream": to_portable(stream),
    }


def saved_callbacks(
    checkpoint: Path, progress: Mapping[str, Any] | None, exported: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the callbacks' states in a checkpoint, and the names of the files that hold them.

    Args:
        checkpoint: holds them.
        progress: the contents of its `progress.json`; None if another library wrote the checkpoint.
        exported: the states in its `trainer_state.json`.
    """
    if progress is None:
        return dict(exported), [STATE_FILE]
    sources = [PROGRESS_FILE]
    with wrap_load_error(checkpoint / PROGRESS_FILE):
        states = dict(progress.get("callbacks") or {})
    if (checkpoint / CALLBACKS_FILE).is_file():
        sources.append(CALLBACKS_FILE)
        with wrap_load_error(checkpoint / CALLBACKS_FILE):
            states.update(load_tensors(checkpoint / CALLBACKS_FILE))
    return states, sources


def restore_loop(loop: Loop, normalizer: Stateful, progress: Mapping[str, Any], label_smoothing: float) -> None:
    """Restores the summary of steps not logged yet, the skipped windows, and the loss normalization."""
    LoopProgress(loop).load_state_dict(progress)
    saved, arguments = progress.get("loss_rule"), progress.get("arguments") or {}
    # other label smoothing changes the loss, so its normalization must be inferred again
    if saved is not None and arguments.get("label_smoothing_factor") == label_smoothing:
        normalizer.load_state_dict(saved)
