"""What a checkpoint says of its run beside the weights and the optimizer: position, callbacks, arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from paceline.args.plan import Plan, resolve_update
from paceline.checkpoint.plausible import blame
from paceline.checkpoint.tensors import CheckpointError, load_json, load_tensors
from paceline.core import resuming
from paceline.core.events import callback_states, restore_callback_states
from paceline.core.loop import Loop
from paceline.core.summary import UpdateSummary
from paceline.data.dispatch import DispatchedLoader
from paceline.data.feed import Feed, place_in
from paceline.data.lengths import length_of, sample_count, samples_at_once
from paceline.data.loading import is_stream
from paceline.data.portable import from_portable, to_portable
from paceline.data.shares import Shares
from paceline.data.stream import StreamLoader, samples_in
from paceline.data.stream_places import CannotContinue, place_for_others
from paceline.distributed.launchers import num_restarts, run_identity

if TYPE_CHECKING:
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)

STATE_FILE, PROGRESS_FILE = resuming.STATE_FILE, resuming.PROGRESS_FILE
CALLBACKS_FILE = "callbacks.pt"  # the states of callbacks that hold tensors (moving averages, for instance)


def describe_progress(trainer: Trainer) -> tuple[str, dict[str, Any]]:
    """What to write: the text of `progress.json`, and the states with tensors, for `callbacks.pt`.

    Raises:
        TypeError: a callback's state holds what neither can; the message names the callback.
    """
    run, loop = trainer.run, trainer.run.loop if trainer.run is not None else None
    states = callback_states(trainer.callback_handler)
    heavy = {name: state for name, state in states.items() if holds_arrays(state)}
    progress: dict[str, Any] = {
        "format": 1,
        "feed": run.feed.state_dict() if run is not None else None,
        "feeds": run.saves.positions if run is not None else None,
        "callbacks": {name: state for name, state in states.items() if name not in heavy},
        "skipped": sorted(loop.skipped) if loop is not None else [],
        "unlogged": dataclasses.asdict(loop.unlogged) if loop is not None else {},
        "loss_rule": trainer.loss_rule.state_dict(),
        "length": {"planned": loop.plan.max_steps, "max_steps": trainer.state.max_steps} if loop is not None else {},
        "arguments": trainer.args.to_sanitized_dict(),
        "world_size": trainer.world.world_size,
        "data_size": trainer.strategy.mesh.data_size,
        "update_size": loop.plan.global_batch_size if loop is not None else None,
        "launch": run_identity(os.environ),
    }
    try:
        return json.dumps(progress, indent=1), heavy
    except (TypeError, ValueError):
        for name, state in progress["callbacks"].items():
            _check_plain(name, state)
        raise


def read_progress(checkpoint: Path) -> dict[str, Any] | None:
    """What `progress.json` says; None in a checkpoint that another library wrote.

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
    """Whether the launcher started these processes anew after one died, and this run of it wrote the checkpoint."""
    launch = run_identity(os.environ)
    progress = read_progress(checkpoint) if launch is not None and num_restarts(os.environ) > 0 else None
    return progress is not None and progress.get("launch") == launch


def kept_update_size(trainer: Trainer, checkpoint: Path) -> int | None:
    """Samples of one update as the run was begun with them, where it goes on on another number of processes.

    None where the number is the same; where the arguments of the batch were changed, which then win; and where the
    samples cannot be dealt out.
    """
    progress, size, args = read_progress(checkpoint) or {}, trainer.strategy.mesh.data_size, trainer.args
    before, kept = progress.get("data_size", progress.get("world_size")), progress.get("update_size")
    if before in (None, size) or not isinstance(kept, int) or kept < 1:
        return None
    saved, now = progress.get("arguments") or {}, args.to_sanitized_dict()
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    changed = [f"{name}={now[name]}" for name in names if saved.get(name) != now[name]]
    split, splits = ("'split_batches': True" in str(each.get("accelerator_config")) for each in (saved, now))
    changed += [f"accelerator_config={{'split_batches': {splits}}}"] if split != splits else []
    asked = resolve_update(args, size, None)[1]
    reason = f"{', '.join(changed)} was set" if changed else None
    shares = Shares.of_update(0, size, math.ceil(asked / args.gradient_accumulation_steps / size), kept)
    if is_stream(trainer.train_dataset) and shares.each is None:
        reason = f"of a stream, {kept} samples cannot be dealt out to {size} processes alike"
    elif min(shares.slots) < size:
        reason = f"{kept} samples are too few for {size} processes"
    elif str(args.train_sampling_strategy) == "batch_rebalance":
        reason = "train_sampling_strategy='batch_rebalance' makes its own micro-batches"
    if reason is not None and asked != kept:
        logger.warning("Each update now takes %d samples, not %d as before: %s.", asked, kept, reason)
        return None
    if asked == kept:
        return None
    logger.warning(
        "Begun on %s processes, going on on %d: each update takes the same %d samples as before, in %d micro-batches.",
        before,
        size,
        kept,
        len(shares.slots),
    )
    return kept


def position_of_transformers(checkpoint: Path, loader: Any, plan: Plan) -> dict[str, Any]:
    """Where a checkpoint of transformers stands in the data, which it does not record in samples.

    It tells the epoch, as a fraction of its micro-batches, and their size, so that another batch size or accumulation
    than at the time finds the same place. Of a stream of unknown length an epoch counts as the whole run's.
    """
    path = checkpoint / STATE_FILE
    saved = load_json(path) if path.is_file() else {}
    batch_size = int(saved.get("train_batch_size") or plan.micro_batch_size)
    num_samples = length_of(getattr(loader, "dataset", None)) or plan.samples_per_epoch
    if num_samples is None:
        per_epoch = max(int(saved.get("max_steps") or 0) * plan.accumulation, 1)
    elif getattr(loader, "drop_last", False):
        per_epoch = max(num_samples // batch_size, 1)
    else:
        per_epoch = max(-(-num_samples // batch_size), 1)
    epoch, batches = divmod(round(float(saved.get("epoch") or 0.0) * per_epoch), per_epoch)
    consumed = batches * batch_size
    if num_samples is not None:
        consumed = min(consumed, num_samples)
    return {"epoch": epoch, "batches": batches, "consumed": consumed, "batch_size": batch_size}


def restore_position(trainer: Trainer, feed: Feed, plan: Plan, checkpoint: Path) -> Plan:
    """Put the feed where the checkpoint stands, and plan the updates that are left from there.

    The position counts samples. With another batch size, accumulation, number of epochs or of samples than before, the
    samples that are left make another number of updates; a run that is measured in epochs is then as many updates
    longer or shorter. With the same ones its length stays what it was, whatever a rollback or a callback left out.
    """
    state, progress = trainer.state, read_progress(checkpoint) or {}
    position = own_position(trainer, feed.loader, progress)
    source = PROGRESS_FILE if position is not None else STATE_FILE
    if position is None:
        with blame(checkpoint / source):
            position = position_of_transformers(checkpoint, feed.loader, plan)
    with blame(checkpoint / source):
        feed.load_state_dict(position, source=str(checkpoint / source))
        if not all(isinstance(number, int) and number >= 0 for number in (feed.epoch, feed.consumed, feed.batches)):
            raise ValueError("the position in the data is not made of whole numbers")
        if not feed.is_within(state.global_step + len(progress.get("skipped") or ())):
            raise ValueError(f"{feed.consumed} samples in {state.global_step} updates (global_step of {STATE_FILE})")
        left = (plan.micro_batches_per_epoch or 0) - place_in(feed.loader, position)[1]
        length = planned_length(trainer, feed, progress)
    if trainer.args.max_steps > 0 or plan.updates_per_epoch is None or plan.micro_batches_per_epoch is None:
        return plan
    if length is None:
        done = feed.epoch * plan.updates_per_epoch + plan.updates_per_epoch + (-left // plan.accumulation)
        if done == state.global_step:
            return plan
        planned = state.max_steps = state.global_step + max(plan.max_steps - done, 0)
        logger.info("With this batch size the run ends at step %d, not %d.", state.max_steps, plan.max_steps)
    else:
        planned, state.max_steps = length
    return dataclasses.replace(plan, max_steps=planned, warmup_steps=trainer.args.get_warmup_steps(planned))


def own_position(trainer: Trainer, loader: Any, progress: Mapping[str, Any]) -> dict[str, Any] | None:
    """This process's place in the data, of those that a checkpoint holds.

    Raises:
        ValueError: each process had a part of its own, and the other ones of now cannot take these over.
    """
    (rank, size), positions = trainer.strategy.data_coordinates(), progress.get("feeds")
    common: dict[str, Any] | None = progress.get("feed")
    was_alone = progress.get("data_size", progress.get("world_size")) == 1 or bool((common or {}).get("is_dealt"))
    if isinstance(loader, DispatchedLoader):  # one process reads for all
        rank, size, loader = 0, 1, loader.loader
    if positions is None and size > 1 and was_alone and isinstance(loader, StreamLoader):
        positions = [common]  # each process reads a part of what one read whole
    if positions is None:
        return common
    first: dict[str, Any] = positions[0]
    if len(positions) == size:
        own: dict[str, Any] = positions[rank]
        return own
    if trainer.args.ignore_data_skip or not first["consumed"]:
        return first
    before, reason = len(positions), "its loader keeps a place that only one process can go to"
    try:
        if isinstance(loader, StreamLoader) and "stream" in first:
            return position_for_others(positions, size, loader)
    except CannotContinue as error:
        reason = str(error)
    raise ValueError(
        f"The checkpoint was written in the middle of a stream that {before} process{'es' if before > 1 else ''} read, "
        f"and there are {size} now: {reason}. Resume on {before}, or set ignore_data_skip=True to begin the epoch anew."
    )


def position_for_others(positions: list[dict[str, Any]], size: int, loader: StreamLoader) -> dict[str, Any]:
    """The position in a stream that each of `size` processes goes on from, of those that other ones stood at."""
    common, at_once = positions[0], loader.samples_at_once
    before = [from_portable(position["stream"]) for position in positions]
    consumed, dealt = common["consumed"], max(int(common["batch_size"] or 1) // len(positions), 1)
    stream = place_for_others(before, size, loader.num_workers, consumed, dealt)
    return {
        **common,
        "batches": -(-consumed // at_once),
        "batch_size": at_once,
        "own_consumed": samples_in(stream),
        "stream": to_portable(stream),
    }


def planned_length(trainer: Trainer, feed: Feed, progress: Mapping[str, Any]) -> tuple[int, int] | None:
    """(updates that the schedule was made for, updates of the run), as saved; None where they do not hold any more."""
    length, position, before = (progress.get(name) or {} for name in ("length", "feed", "arguments"))
    now = trainer.args.to_sanitized_dict()
    names = ("num_train_epochs", "max_steps", "gradient_accumulation_steps")
    is_as_before = all(name in before and resuming.is_same(before[name], now[name]) for name in names)
    sizes = {"batch_size": samples_at_once(feed.loader), "num_samples": sample_count(feed.loader)}
    if not length or not is_as_before or any(name not in position or position[name] != sizes[name] for name in sizes):
        return None
    planned, max_steps = length["planned"], length["max_steps"]
    if not all(isinstance(number, int) and number >= trainer.state.global_step for number in (planned, max_steps)):
        raise ValueError(f"the length of the run cannot be {planned!r}, {max_steps!r}")
    return planned, max_steps


def restore_callbacks(trainer: Trainer, checkpoint: Path, progress: Mapping[str, Any] | None) -> None:
    """Give the callbacks their states back, ours or those of a checkpoint of transformers."""
    exported = trainer.state.stateful_callbacks or {}
    states: dict[str, Any] = dict(exported)
    sources = [STATE_FILE]
    if progress is not None:
        sources = [PROGRESS_FILE]
        with blame(checkpoint / PROGRESS_FILE):
            states = dict(progress.get("callbacks") or {})
        if (checkpoint / CALLBACKS_FILE).is_file():
            sources.append(CALLBACKS_FILE)
            with blame(checkpoint / CALLBACKS_FILE):
                states.update(load_tensors(checkpoint / CALLBACKS_FILE))
        with blame(checkpoint / STATE_FILE):
            control = exported.get("TrainerControl", {}).get("args", {})
            for name in ("should_evaluate", "should_epoch_stop"):  # asked for, and not done yet
                setattr(trainer.control, name, bool(control.get(name, False)))
    if states or progress is not None:
        whole = trainer.args.restore_callback_states_from_checkpoint  # also what the callbacks were constructed with
        with blame(checkpoint / " or ".join(sources)):
            restore_callback_states(trainer.callback_handler, states, with_arguments=whole)


def restore_loop(trainer: Trainer, loop: Loop, progress: Mapping[str, Any]) -> None:
    """Give back the updates that the next log is a mean of, the windows that are left out, and what the loss is."""
    loop.unlogged = UpdateSummary.restored(progress.get("unlogged") or {})
    loop.skipped = {(int(epoch), int(first)) for epoch, first in progress.get("skipped") or ()}
    rule, arguments = progress.get("loss_rule"), progress.get("arguments") or {}
    # with other smoothing it is another loss, to be looked at anew
    if rule is not None and arguments.get("label_smoothing_factor") == trainer.args.label_smoothing_factor:
        trainer.loss_rule.load_state_dict(rule)
    loop.num_allowed_for = len(loop.skipped) - (loop.plan.max_steps - loop.state.max_steps)


def holds_arrays(value: Any) -> bool:
    """Whether a nest of dicts, lists and tuples holds a tensor or an array."""
    if isinstance(value, Mapping):
        return any(holds_arrays(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_arrays(item) for item in value)
    return isinstance(value, Tensor | np.ndarray)


def _check_plain(name: str, state: Any) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The state of callback {name} cannot be saved ({error}): let state_dict() return numbers, text, lists, "
            "dicts and tensors."
        ) from error
