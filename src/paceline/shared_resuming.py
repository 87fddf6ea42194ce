"""The checkpoint that all processes go on from: the one asked for, or the last of a start whose launcher began anew."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from paceline.core import folders
from paceline.core.resuming import find_checkpoint
from paceline.distributed.collectives import share_object
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
    return None if found is None else Path(found)


def newest_of_launch(args: Any) -> Path | None:
    """The newest good checkpoint of this very start, where its launcher has started the processes anew; else None."""
    if num_restarts(os.environ) == 0:
        return None
    folders.recover(Path(args.output_dir), logger.warning)
    found = folders.newest_valid(Path(args.output_dir), logger.warning)
    return found if found is not None and restarted_from(found) else None
