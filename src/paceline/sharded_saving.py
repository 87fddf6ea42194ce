"""Checkpoints in shards: every process takes part, the first one publishes what all have written.

On the main thread the processes agree on who writes what and copy their parts to the host. The rest goes on behind the
training, over a process group of its own: each writes and hashes its files in one hidden folder, the first adds the
index, the small files and the manifest, and renames the folder when all are done. What became of it, all learn.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from paceline.args.errors import UnsupportedOption
from paceline.args.sharding import wants_shards
from paceline.checkpoint import files
from paceline.checkpoint.adapters import has_adapters
from paceline.checkpoint.background import HostCopy, writes_itself_safely
from paceline.checkpoint.files import DEFAULT_SHARD_BYTES
from paceline.checkpoint.named import (
    load_model_in_place,
    make_notes,
    model_state,
    optimizer_state,
    read_any_weights,
    write_notes,
)
from paceline.checkpoint.shards import MODEL_FOLDER, OPTIMIZER_FOLDER, Part, Plans, is_sharded
from paceline.checkpoint.streaming import Source, reading_order, write_stream
from paceline.checkpoint.tensors import save_tensors
from paceline.checkpoint.weights import DTYPES, EXTRA_STATE_NAME
from paceline.core import folders
from paceline.core.manifest import KnownFile, hash_and_sync, known_file
from paceline.core.space import Place
from paceline.distributed.collectives import gather_objects, on_first, portable
from paceline.distributed.tensor_parts import whole
from paceline.distributed.world import World
from paceline.optim.modes import evaluation_weights

if TYPE_CHECKING:
    from paceline.saving import Saves
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)


class Meeting:
    """Where the threads that write meet: a group of its own, so that the training's exchanges are not disturbed.

    Args:
        world: the processes; one needs no group.
        timeout: how long they wait for each other.
    """

    def __init__(self, world: World, timeout: Any) -> None:
        self.world = world
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout) if world.is_shared else None

    def gather(self, value: Any) -> list[Any]:
        """The object of each process, by rank, on the first; an empty list on the others."""
        if self._group is None:
            return [value]
        gathered: list[Any] | None = [None] * self.world.world_size if self.world.is_first else None
        distributed.gather_object(value, gathered, dst=0, group=self._group)
        return gathered or []

    def share(self, value: Any) -> Any:
        """The object of the first process, for all."""
        if self._group is None:
            return value
        holder = [value]
        distributed.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def close(self) -> None:
        """Let go of the group."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None


@dataclass
class ShardedSaves:
    """What the sharded saves of a run keep from one to the next.

    Attributes:
        plans: who writes what.
        meeting: made at the first save, by all processes together.
    """

    plans: Plans = field(default_factory=Plans)
    meeting: Meeting | None = None

    def meet(self, trainer: Trainer) -> Meeting:
        """The group of the threads."""
        if self.meeting is None:
            self.meeting = Meeting(trainer.world, trainer.args.ddp_timeout_delta)
        return self.meeting

    def close(self) -> None:
        """Let go of the group."""
        if self.meeting is not None:
            self.meeting.close()
            self.meeting = None


@dataclass
class ShardedJob:
    """This process's part of one checkpoint on its way to the disk.

    Attributes:
        folder: where it will be.
        temporary: the hidden folder that all write in.
        parts: what this process writes, by folder.
        meeting: where it tells the others.
        copy: the small files, written by the first process; None: they are there.
        place: asked for room first.
        num_bytes: what this process writes.
        known: files whose hash is known.
        written: (where each tensor lies, hash and size of each file), both of this process, or what went wrong; None
            before.
    """

    folder: Path
    temporary: Path
    parts: dict[str, Part]
    meeting: Meeting
    place: Place
    num_bytes: int
    copy: HostCopy | None = None
    known: dict[str, KnownFile] = field(default_factory=dict)
    is_best: bool = False
    written: Any = None

    def run(self) -> None:
        """Write, meet the others, publish. Raises: on all processes, what went wrong on any; OSError for disks."""
        if self.written is None:
            self.write_parts()
        gathered = self.meeting.gather(self.written)
        outcome: Exception | None = None
        if gathered:
            try:
                self._publish(gathered)
            except Exception as error:
                outcome = error
        outcome = self.meeting.share(outcome if outcome is None else portable(outcome))
        if outcome is not None:
            raise outcome

    def write_parts(self) -> None:
        """Write and hash this process's files; raises nothing: `run` tells the others."""
        try:
            self.place.check(self.num_bytes)
            results = {name: part.write(self.temporary / name) for name, part in self.parts.items()}
            names = {f"{name}/{row.storage_data.relative_path}" for name, rows in results.items() for row in rows}
            self.written = results, {name: hash_and_sync(self.temporary / name) for name in sorted(names)}
        except Exception as error:
            self.written = portable(error)

    def _publish(self, gathered: list[Any]) -> None:
        """On the first process: what belongs to no single one of them, the manifest, the name."""
        for rank, written in enumerate(gathered):
            if isinstance(written, OSError):
                raise OSError(written.errno, f"process {rank}: {written.strerror or written}", written.filename)
            if isinstance(written, Exception):
                raise RuntimeError(f"process {rank}: {written}")
        for name, part in self.parts.items():
            part.write_index(self.temporary / name, [results[name] for results, _ in gathered])
        for _, hashes in gathered:
            found = {name: known_file(self.temporary / name, *entry) for name, entry in hashes.items()}
            self.known.update(found)
        if self.copy is not None:
            self.copy.write()
        folders.publish(self.temporary, self.folder, self.known)

    def later(self, write: Callable[[], Any]) -> None:
        """Write something with the rest, or at once where nothing is put off."""
        if self.copy is None:
            write()
        else:
            self.copy.add(write)

    def drop(self) -> None:
        """Leave nothing of it."""
        if self.meeting.world.is_first:
            folders.discard_unfinished(self.temporary)


# ---- one checkpoint

Fill = Callable[["Trainer", ShardedJob], None]
Reason = Callable[["Trainer", "Saves", int], str | None]


def check_format(trainer: Trainer) -> None:
    """Refuse what cannot be saved in shards, before the first update.

    Raises:
        UnsupportedOption: adapters, a device that hides what it holds, or a folder for each machine.
    """
    if not wants_shards(trainer.args) or str(trainer.args.save_strategy) == "no":
        return
    if trainer.strategy.is_opaque:
        raise UnsupportedOption(
            "checkpoint_format='sharded' (or fsdp_config['state_dict_type']) is not possible on this device, where "
            "processes cannot tell what they hold: leave it out."
        )
    if has_adapters(trainer.strategy.unwrap(trainer.model)):
        raise UnsupportedOption(
            "checkpoint_format='sharded' (or fsdp_config['state_dict_type']) is not possible for a model with "
            "adapters, of which only these are saved: leave it out."
        )
    if trainer.args.save_on_each_node:
        raise UnsupportedOption(
            "checkpoint_format='sharded' with save_on_each_node=True is not possible: all processes write into one "
            "folder, on a disk that they share. Leave one of them out."
        )


def writes_shards(trainer: Trainer) -> bool:
    """Whether the checkpoint being taken is one in shards; outside of a run it is whole."""
    return trainer.run is not None and wants_shards(trainer.args)


@dataclass
class Collected:
    """What a checkpoint is made of.

    Attributes:
        states: what goes into each folder, by its name.
        extra: of the model, what is no plain tensor.
        notes: what the tensors do not say.
    """

    states: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    notes: dict[str, Any]


def collect(trainer: Trainer) -> Collected:
    """Model and optimizer by name, as they lie here; all processes take part."""
    model = trainer.strategy.unwrap(trainer.model)
    found = model_state(model)
    states: dict[str, dict[str, Any]] = {MODEL_FOLDER: {"model": found.tensors}}
    optimizer = None
    if trainer.optimizer is not None and not trainer.args.save_only_model:
        optimizer = optimizer_state(model, trainer.optimizer)
        states[OPTIMIZER_FOLDER] = {"optimizer": optimizer}
    return Collected(states, found.extra, make_notes(model, found.tied, optimizer))


def take_shards(trainer: Trainer, saves: Saves, folder: Path, *, fill: Fill, why_at_once: Reason) -> ShardedJob:
    """Everything that belongs into the checkpoint: copied to be written later, or this process's parts written now.

    A best model that cannot be written is not kept in memory: the processes would have to keep it alike.

    Args:
        fill: writes the small files, by the Trainer's own methods.
        why_at_once: why training must wait until so many bytes are written.

    Raises: on all processes, OSError: there is no room, or the disk refuses.
    """
    with evaluation_weights(trainer.optimizer, trainer.is_in_train):
        collected = collect(trainer)
        parts = saves.sharded.plans.make(trainer.world, collected.states)
        job = begin(trainer, saves, folder, parts)
        reasons = gather_objects(trainer.world, why_at_once(trainer, saves, job.num_bytes))
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason:
            saves.say_once(f"Training waits for each checkpoint to be written: {reason}.")
        job.copy = HostCopy(saves.buffers) if reason is None else None
        saves.job = job
        try:
            for part in parts.values():
                part.copy(saves.buffers.copy if reason is None else _as_it_is)
            if reason is not None:
                job.write_parts()
            write_small_files(trainer, job, collected, fill)
            saves.buffers.finish()
        except BaseException:
            job.drop()
            saves.buffers.give_back()
            raise
        finally:
            saves.job = None
    return job


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def begin(trainer: Trainer, saves: Saves, folder: Path, parts: dict[str, Part]) -> ShardedJob:
    """Make the hidden folder, on the first process, for all.

    Raises: on all processes, OSError: there is no room, or they do not share the disk.
    """
    world, num_bytes = trainer.world, sum(part.num_bytes() for part in parts.values())
    place, total = saves.place_of(folder.parent), sum(gather_objects(trainer.world, num_bytes))

    def make() -> Path:
        place.check(total)
        return folders.begin(folder)

    made = on_first(world, make)
    blind = [rank for rank, sees in enumerate(gather_objects(world, os.path.isdir(made))) if not sees]
    if blind:
        if world.is_first:
            folders.discard_unfinished(made)
        raise OSError(
            errno.ENOENT,
            f"process {blind[0]} does not see the folder, into which all processes write their shards: set output_dir "
            "to a disk that they share, or checkpoint_format='full'",
            str(folder.parent),
        )
    return ShardedJob(folder, made, parts, saves.sharded.meet(trainer), place, num_bytes)


def write_small_files(trainer: Trainer, job: ShardedJob, collected: Collected, fill: Fill) -> None:
    """What the first process writes beside the shards.

    Raises: on all processes, what went wrong on the first; OSError: the disk refused.
    """

    def write() -> None:
        fill(trainer, job)
        job.later(partial(write_notes, collected.notes, job.temporary))
        if collected.extra and job.copy is not None:
            job.copy.add_tensors(collected.extra, job.temporary / EXTRA_STATE_NAME)
        elif collected.extra:
            save_tensors(collected.extra, job.temporary / EXTRA_STATE_NAME)

    on_first(trainer.world, write)


def save_description(model: nn.Module, folder: Path) -> None:
    """The configuration files with which `from_pretrained` finds the model's class, as its library writes them."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(config, "save_pretrained", None)):
        before = getattr(config, "architectures", None)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        try:
            config.save_pretrained(os.fspath(folder))
        finally:
            config.architectures = before
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(os.fspath(folder))


# ---- weights, whatever form they have


def load_weights(trainer: Trainer, model: nn.Module, folder: str) -> list[str]:
    """The body of `_load_from_checkpoint`; returns a sentence for each thing worth knowing."""
    if trainer.strategy.awaits_weights(model):
        return []
    if is_sharded(Path(folder, MODEL_FOLDER)) and load_model_in_place(files.without_compile(model), Path(folder)):
        return []
    has_part = trainer.strategy.holds_part_of(model)
    weights = read_any_weights(Path(folder), has_part)
    if weights is None or not has_part:
        return files.load_model(model, folder, weights)
    missing, unexpected = trainer.strategy.load_full(model, weights)
    return [f"{folder}: {', '.join(names)} {what}" for names, what in
            ((missing, "are missing"), (unexpected, "are not known")) if names]  # fmt: skip


# ---- the whole model, tensor by tensor


def stream_model(trainer: Trainer, folder: Path, write_beside: Callable[[Trainer, Path], None]) -> bool:
    """Write a model of which each process holds a part, one tensor in memory at a time; all processes take part.

    Args:
        write_beside: writes the processing class and the arguments.

    Returns: False, with nothing done, where the model must be put together: its library writes other names than the
        model has, it has adapters, or the Trainer has its own `_save`.
    Raises: on all processes, what went wrong on the one that writes.
    """
    if not can_stream(trainer):
        return False
    model, error = trainer.strategy.unwrap(trainer.model), None
    found = model_state(model)
    forms = {name: (value.shape, value.dtype) for name, value in found.tensors.items() if value.dtype in DTYPES}
    extra = {**found.extra, **{name: whole(value) for name, value in found.tensors.items() if name not in forms}}
    left = reading_order(forms, DEFAULT_SHARD_BYTES)

    def read(name: str) -> Tensor:
        left.remove(name)
        tensor: Tensor = whole(found.tensors[name])
        return tensor

    if trainer.args.should_save:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_description(model, folder)
            source = Source(str(folder), forms, read, found.tied, extra)
            write_stream(source, folder, max_shard_bytes=DEFAULT_SHARD_BYTES)
            write_beside(trainer, folder)
        except Exception as refusal:
            error = portable(refusal)
    for name in list(left):  # those that do not write only take part; one whose disk refused does so to the end
        read(name)
    error = next((each for each in gather_objects(trainer.world, error) if each is not None), None)
    if error is not None:
        raise error
    return True


def can_stream(trainer: Trainer) -> bool:
    """Whether the model is in shards, and writing it is writing its tensors under their names."""
    model = trainer.strategy.unwrap(trainer.model)
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__ == "paceline.trainer")
    has_own_save = getattr(trainer._save, "__func__", None) is not own._save  # type: ignore[attr-defined]
    if not trainer.strategy.is_sharded or has_own_save or has_adapters(model):
        return False
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return False
    return not callable(getattr(model, "save_pretrained", None)) or writes_names_as_they_are(model)


def writes_names_as_they_are(model: Any) -> bool:
    """Whether a library's `save_pretrained` stores each tensor under the name that it has in the model."""
    if not writes_itself_safely(model) or getattr(model, "_keys_to_ignore_on_save", None):
        return False
    mapping = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    try:
        return mapping is not None and not mapping(model, add_legacy=False)
    except (TypeError, ValueError, AttributeError):
        return False
