"""The checkpoint that all processes go on from: the one asked for, or the last of a start whose launcher began anew."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from paceline.core.resuming import find_checkpoint, newest_checkpoint
from paceline.core.stores import StoreError, bring_named
from paceline.distributed.collectives import gather_objects, share_object
from paceline.distributed.launchers import num_restarts
from paceline.distributed.world import World
from paceline.progress import restarted_from

logger = logging.getLogger(__name__)


def find_for_all(world: World, args: Any, resume: str | bool | None) -> Path | None:
    """The checkpoint to go on from, looked for by the first process, for all.

    Raises:
        ValueError: on all of them, what it was on the first.
    """
    if not world.is_shared:
        return find_checkpoint(args, resume) or newest_of_launch(args)
    found: Any = None
    if world.is_first:
        try:
            found = find_checkpoint(args, resume) or newest_of_launch(args)
        except ValueError as error:
            found = error
    found = share_object(world, found)
    if isinstance(found, ValueError):
        raise found
    if found is not None and getattr(args, "output_store", None):
        bring_to_each_machine(world, args, found)
    return None if found is None else Path(found)


def bring_to_each_machine(world: World, args: Any, checkpoint: Path) -> None:
    """On machines other than the first's, bring the checkpoint from the store where no disk is shared.

    Raises: StoreError, on all processes.
    """
    error: StoreError | None = None
    if world.local_process_index == 0 and not world.is_first and not checkpoint.is_dir():
        try:
            bring_named(f"{args.output_store}/{checkpoint.name}", args.output_store, checkpoint.parent)
        except StoreError as raised:
            error = raised
    found = next((one for one in gather_objects(world, error) if one is not None), None)
    if found is not None:
        raise found


def newest_of_launch(args: Any) -> Path | None:
    """The newest good checkpoint of this very start, where its launcher has started the processes anew; else None."""
    if num_restarts(os.environ) == 0:
        return None
    found = newest_checkpoint(args)
    return found if found is not None and restarted_from(found) else None
