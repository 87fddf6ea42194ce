"""Which checkpoint a run goes on from: named, the newest good one, or the last of a start whose launcher began anew."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from paceline.core import folders
from paceline.distributed.collectives import share_object
from paceline.distributed.launchers import num_restarts
from paceline.distributed.world import World
from paceline.progress import STATE_FILE, restarted_from

logger = logging.getLogger(__name__)


def find_for_all(world: World, args: Any, resume: str | bool | None) -> Path | None:
    """`find_checkpoint`, looked for by the first process, for all: they go on from the same one.

    Raises:
        ValueError: on all of them, what it was on the first.
    """
    if not world.is_shared:
        return find_checkpoint(args, resume)
    found: Any = None
    if world.is_first:
        try:
            found = find_checkpoint(args, resume)
        except ValueError as error:
            found = error
    found = share_object(world, found)
    if isinstance(found, ValueError):
        raise found
    return None if found is None else Path(found)


def find_checkpoint(args: Any, resume: str | bool | None) -> Path | None:
    """The checkpoint to go on from: named, or for True the newest in `output_dir` that verifies.

    Raises:
        ValueError: none was found, or the one named is damaged; the message says which and why.
    """
    if resume is None:
        resume = args.resume_from_checkpoint
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = resume.lower() == "true"
    if resume is None or resume is False:
        return newest_of_launch(args)
    if resume is True:
        folders.recover(Path(args.output_dir), logger.warning)
        found = folders.newest_valid(Path(args.output_dir), logger.warning)
        if found is None:
            raise ValueError(f"No valid checkpoint found in output directory ({args.output_dir})")
        return Path(found)
    named = Path(resume)
    problems = folders.verify(named) if named.is_dir() else ["it is not a folder"]
    if problems and not any((named / name).exists() for name in (folders.MANIFEST_NAME, STATE_FILE)):
        problems = ["it holds no manifest and no trainer_state.json, so it is no checkpoint"]
    if problems:
        raise ValueError(
            f"Can't resume from {named}: {'; '.join(problems)}. resume_from_checkpoint=True takes the newest good one."
        )
    return named


def newest_of_launch(args: Any) -> Path | None:
    """The newest good checkpoint of this very start, where its launcher has started the processes anew; else None."""
    if num_restarts(os.environ) == 0:
        return None
    folders.recover(Path(args.output_dir), logger.warning)
    found = folders.newest_valid(Path(args.output_dir), logger.warning)
    return found if found is not None and restarted_from(found) else None
