"""Sharded checkpoints: every process takes part, and the first one publishes.

On the main thread the processes agree on a save plan and copy their shards to the host. The rest happens
asynchronously, over a separate process group: each process writes and hashes its files in a shared hidden folder. When
all are done, the first process adds the index, the small files and the manifest, and renames the folder. The outcome is
sent to all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import distributed, nn

from paceline.args.errors import UnsupportedOption
from paceline.checkpoint import folders
from paceline.checkpoint.layout import MODEL_FOLDER, OPTIMIZER_FOLDER
from paceline.checkpoint.manifest import hash_and_sync, known_file
from paceline.core.optional import LateModule
from paceline.pytorch.checkpoint.adapters import has_adapters
from paceline.pytorch.checkpoint.background import HostCopy
from paceline.pytorch.checkpoint.fqn_state import make_notes, model_state, optimizer_state, write_notes
from paceline.pytorch.checkpoint.items import Contents, Fill, WhyAtOnce
from paceline.pytorch.checkpoint.saves import Job, Saves
from paceline.pytorch.checkpoint.tensors import save_tensors
from paceline.pytorch.checkpoint.weights import EXTRA_STATE_NAME
from paceline.pytorch.distributed.collectives import gather_objects, on_first, portable
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import shards
else:
    shards = LateModule("paceline.pytorch.checkpoint.shards")


def check_sharded(strategy: SingleDevice, model: nn.Module, save_on_each_node: bool) -> None:
    """Refuses models and options that sharded saving does not support, before the first optimizer step.

    Raises:
        UnsupportedOption: adapters, a device that does not expose its shards, or a folder for each machine.
    """
    if strategy.is_spmd:
        raise UnsupportedOption(
            "checkpoint_format='sharded' (or fsdp_config['state_dict_type']) is not supported on this device, where "
            "processes do not expose their shards: leave it out."
        )
    if has_adapters(strategy.unwrap(model)):
        raise UnsupportedOption(
            "checkpoint_format='sharded' (or fsdp_config['state_dict_type']) is not supported for a model with "
            "adapters, of which only these are saved: leave it out."
        )
    if save_on_each_node:
        raise UnsupportedOption(
            "checkpoint_format='sharded' with save_on_each_node=True is not supported: all processes write into one "
            "folder, on a disk that they share. Leave one of them out."
        )


class Meeting:
    """Synchronizes the writing threads over a separate group, so that the training's collectives are not disturbed.

    Args:
        world: the processes; a single process needs no group.
        timeout: time limit for the threads' collectives.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        self.world = world
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout) if world.is_distributed else None

    def gather(self, value: object) -> list[Any]:
        """Gathers the object of each process on the first, by rank; returns an empty list on the others."""
        if self._group is None:
            return [value]
        gathered: list[Any] | None = [None] * self.world.world_size if self.world.is_first else None
        distributed.gather_object(value, gathered, dst=0, group=self._group)
        return gathered or []

    def share(self, value: object) -> Any:
        """Broadcasts the object of the first process to all."""
        if self._group is None:
            return value
        holder = [value]
        distributed.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def close(self) -> None:
        """Destroys the group."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None


@dataclass
class ShardedSaves:
    """The state of a run's sharded saves between two of them.

    Attributes:
        plans: the save plans; None before the first save.
        meeting: created at the first save, by all processes together.
    """

    plans: shards.Plans | None = None
    meeting: Meeting | None = None

    def plan(self, world: World, states: Mapping[str, Mapping[str, Any]]) -> dict[str, shards.Part]:
        """Returns the shards of this process by folder. Collective. For `states` see `Plans.make`."""
        if self.plans is None:
            self.plans = shards.Plans()
        return self.plans.make(world, states)

    def synchronize(self, world: World, timeout: timedelta) -> Meeting:
        """Returns the writing threads' group; the first call, which is collective, creates it."""
        if self.meeting is None:
            self.meeting = Meeting(world, timeout)
        return self.meeting

    def close(self) -> None:
        """Destroys the group."""
        if self.meeting is not None:
            self.meeting.close()
            self.meeting = None


@dataclass(kw_only=True)
class ShardedJob(Job):
    """This process's shards of one checkpoint that is being written; `copy` holds the small files.

    Attributes:
        parts: the shards of this process, by folder.
        meeting: synchronizes with the other processes.
        written: (location of each tensor, hash and size of each file) of this process, or the error; None before
            writing.
    """

    in_shards: ClassVar[bool] = True
    parts: dict[str, shards.Part]
    meeting: Meeting
    written: Any = None

    def run(self) -> None:
        """Writes, synchronizes and publishes. Raises the error of any process on all; OSError if a disk refused."""
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
        """Writes and hashes this process's files. Raises nothing: `run` sends an error to the other processes."""
        try:
            self.place.check(self.num_bytes)
            results = {name: part.write(self.temporary / name) for name, part in self.parts.items()}
            names = {f"{name}/{row.storage_data.relative_path}" for name, rows in results.items() for row in rows}
            self.written = results, {name: hash_and_sync(self.temporary / name) for name in sorted(names)}
        except Exception as error:
            self.written = portable(error)

    def _publish(self, gathered: list[Any]) -> None:
        """Writes the index, the small files and the manifest on the first process, and renames the folder."""
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

    def drop(self) -> None:
        """Discards the hidden folder, on the first process."""
        if self.meeting.world.is_first:
            folders.discard_unfinished(self.temporary)


@dataclass
class Collected:
    """Model and optimizer as this process holds them.

    Attributes:
        states: the state to write into each folder, by folder name.
        extra: model state other than plain tensors.
        notes: metadata that the tensors do not hold.
    """

    states: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    notes: dict[str, Any]


class ShardedFormat:
    """The checkpoint format in which each process writes its shards.

    Args:
        contents: what is saved.
        saves: the state of the run's saves.
        timeout: time limit for the writing threads of all processes to wait for each other.
    """

    all_write = True

    def __init__(self, contents: Contents, saves: Saves, timeout: timedelta) -> None:
        self.contents = contents
        self.saves = saves
        self.timeout = timeout

    def gather(self) -> None:
        """Returns None: nothing is gathered, since each process writes its own shards."""

    def take(self, folder: Path, is_best: bool, fill: Fill, why_at_once: WhyAtOnce) -> ShardedJob:
        """Collects the contents of the checkpoint: copies them to be written later, or writes its own shards now.

        A best model that cannot be written is not kept in memory, since all processes would have to keep it.

        Raises: OSError, on all processes, if there is no disk space or the disk refuses.
        """
        saves, world = self.saves, self.contents.world
        kept: ShardedSaves = saves.of_shards(ShardedSaves)
        with self.contents.evaluation_weights():
            collected = self._collect()
            parts = kept.plan(world, collected.states)
            temporary, num_bytes = self._begin(folder, parts)
            reasons = gather_objects(world, why_at_once(num_bytes))
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason:
                saves.say_once(f"Training waits for each checkpoint to be written: {reason}.")
            copy = HostCopy(saves.buffers) if reason is None else None
            place, meeting = saves.place_of(folder.parent), kept.synchronize(world, self.timeout)
            job = ShardedJob(folder, temporary, place, num_bytes, copy, parts=parts, meeting=meeting)
            try:
                with saves.taking(job):
                    for part in parts.values():
                        part.copy(saves.buffers.copy if reason is None else lambda tensor: tensor)
                    if reason is not None:
                        job.write_parts()
                    self._write_small_files(job, collected, fill)
                    saves.buffers.finish()
            except BaseException:
                job.drop()
                saves.buffers.give_back()
                raise
        return job

    def _collect(self) -> Collected:
        """Returns model and optimizer state by name, as sharded on this process. Collective."""
        model, own = self.contents.model, self.contents.saved_optimizer
        found = model_state(model)
        states: dict[str, dict[str, Any]] = {MODEL_FOLDER: {"model": found.tensors}}
        optimizer = None
        if own is not None:
            optimizer = optimizer_state(model, own)
            states[OPTIMIZER_FOLDER] = {"optimizer": optimizer}
        return Collected(states, found.extra, make_notes(model, found.tied, optimizer))

    def _begin(self, folder: Path, parts: dict[str, shards.Part]) -> tuple[Path, int]:
        """Creates the hidden folder on the first process; returns it, and the bytes that this process writes.

        Raises: OSError, on all processes, if there is no disk space, or they do not share the disk.
        """
        world, num_bytes = self.contents.world, sum(part.num_bytes() for part in parts.values())
        place, total = self.saves.place_of(folder.parent), sum(gather_objects(world, num_bytes))

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
                f"process {blind[0]} does not see the folder, into which all processes write their shards: set "
                "output_dir to a disk that they share, or checkpoint_format='full'",
                str(folder.parent),
            )
        return made, num_bytes

    def _write_small_files(self, job: ShardedJob, collected: Collected, fill: Fill) -> None:
        """Writes the small files of the checkpoint on the first process.

        Raises: the error of the first process on all processes; OSError if the disk refused.
        """

        def write() -> None:
            fill(job)
            job.later(partial(write_notes, collected.notes, job.temporary))
            if collected.extra and job.copy is not None:
                job.copy.add_tensors(collected.extra, job.temporary / EXTRA_STATE_NAME)
            elif collected.extra:
                save_tensors(collected.extra, job.temporary / EXTRA_STATE_NAME)

        on_first(self.contents.world, write)
