"""The checkpoint that all processes resume from: the requested one, or the last one of a restarted launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoint.folders import list_checkpoints
from paceline.checkpoint.lock import FolderLock, acquire
from paceline.checkpoint.resuming import find_checkpoint, newest_checkpoint, report_kept
from paceline.checkpoint.stores import StoreError, bring_named
from paceline.core.lineage import RunMark, begin_run
from paceline.pytorch.checkpoint.resume_state import restarted_from
from paceline.pytorch.distributed.collectives import gather_objects, on_first, share_object
from paceline.pytorch.distributed.launchers import num_restarts
from paceline.pytorch.distributed.world import World


def find_for_all(world: World, resume: str | bool | None, output_dir: str, store: str | None) -> Path | None:
    """Returns the checkpoint to resume from, which the first process finds for all. Arguments: see `find_checkpoint`.

    Raises:
        ValueError: the error of the first process, on all processes.
    """
    if not world.is_distributed:
        return find_checkpoint(resume, output_dir, store) or newest_of_launch(Path(output_dir), store)
    found: Any = None
    if world.is_first:
        try:
            found = find_checkpoint(resume, output_dir, store) or newest_of_launch(Path(output_dir), store)
        except ValueError as error:
            found = error
    found = share_object(world, found)
    if isinstance(found, ValueError):
        raise found
    if found is not None and store:
        bring_to_each_machine(world, store, found)
    return None if found is None else Path(found)


@contextmanager
def locked(world: World, folder: Path) -> Iterator[FolderLock | None]:
    """Returns a context in which no other run can train in the folder: the first process holds its lock for all.

    Raises:
        FolderInUse: another run uses the folder; on the other processes, a RuntimeError with the same message.
    """
    lock: FolderLock | None = None

    def take() -> None:
        nonlocal lock
        lock = acquire(folder)

    on_first(world, take)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def begin_for_all(world: World, folder: Path, checkpoint: Path | None, step: int) -> RunMark:
    """Returns the mark of a run that starts now, which the first process makes for all; logs remains of other runs."""
    mark = None
    if world.is_first:
        mark = begin_run(folder, checkpoint, step, list_checkpoints(folder))
        report_kept(folder, mark, checkpoint)
    found: RunMark = share_object(world, mark)
    return found


def bring_to_each_machine(world: World, store: str, checkpoint: Path) -> None:
    """Downloads the checkpoint from the store on each machine that does not share the first process's disk.

    Raises: StoreError, on all processes.
    """
    error: StoreError | None = None
    if world.local_process_index == 0 and not world.is_first and not checkpoint.is_dir():
        try:
            bring_named(f"{store}/{checkpoint.name}", store, checkpoint.parent)
        except StoreError as raised:
            error = raised
    found = next((one for one in gather_objects(world, error) if one is not None), None)
    if found is not None:
        raise found


def newest_of_launch(folder: Path, store: str | None) -> Path | None:
    """Returns the newest intact checkpoint of this launch if the launcher has restarted the processes; else None."""
    if num_restarts(os.environ) == 0:
        return None
    found = newest_checkpoint(folder, store)
    return found if found is not None and restarted_from(found) else None
