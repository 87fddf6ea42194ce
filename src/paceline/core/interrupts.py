"""The line logged when Ctrl-C ends a run: the last step and the checkpoint to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.lineage import RunMark, is_part, mark_of

logger = logging.getLogger(__name__)

_PREFIX = "checkpoint-"


@contextmanager
def interrupts_described(describe: Callable[[], str | None]) -> Iterator[None]:
    """Returns a context that logs a line before a KeyboardInterrupt is passed on.

    Args:
        describe: returns the line, or None if this process logs none.
    """
    try:
        yield
    except KeyboardInterrupt:
        line = describe()
        if line is not None:
            logger.warning(line)
        raise


def describe_stop(folder: Path, run: RunMark | None, step: int) -> str:
    """Returns the last step of a stopped run, its newest checkpoint, and how to resume from it.

    Args:
        folder: the output folder.
        run: the mark of the run; None if it was stopped before it began.
        step: optimizer steps so far.
    """
    if run is None:
        return "Stopped before the first step: nothing was written."
    places = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    own = [path for path in places if is_part(run, path.name, mark_of(path))]
    if not own:
        return f"Stopped at step {step:,}. This run has no checkpoint in {folder}: the next start begins from scratch."
    newest = max(own, key=lambda path: int(path.name.removeprefix(_PREFIX)))
    return f"Stopped at step {step:,}. {newest} is complete: train(resume_from_checkpoint=True) resumes from there."
