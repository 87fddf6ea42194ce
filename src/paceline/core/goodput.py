"""Goodput: of the time since a run was first started, the part that led to its weights. Standard library only."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.lineage import KEY, RECORD_NAME, RunMark, mark_from


class Goodput(NamedTuple):
    """The use of the time since a run was first started.

    Attributes:
        useful: seconds that led to the present weights, over all starts; steps that were lost and made again are not
            among them.
        wall: seconds since the first start, with the time in which nothing ran.
        num_starts: of the run.
    """

    useful: float
    wall: float
    num_starts: int

    @property
    def share(self) -> float:
        """The useful part, from 0 to 1."""
        return min(self.useful / self.wall, 1.0) if self.wall > 0 else 1.0

    def describe(self) -> str:
        """Returns a sentence."""
        return (
            f"Goodput {self.share * 100:.0f} %: {self.useful:.0f} s of training led to these weights, in "
            f"{self.wall:.0f} s since the first of {self.num_starts} starts."
        )


def goodput(folder: Path, mark: RunMark, now: float | None = None) -> Goodput | None:
    """Returns the goodput of a run.

    The useful time is that of the checkpoint the run was resumed from, and of the present start. The first start is
    that of the run's first entry in `run.json`.

    Args:
        folder: output folder of the run.
        mark: as for a checkpoint that is written now.
        now: `time.time()`; None: the present.

    Returns:
        None if the folder has no record of the run's first start, or the time before a resume is unknown.
    """
    if mark.seconds is None:
        return None
    try:
        record = json.loads((folder / RECORD_NAME).read_bytes())
        entries = [*record.get("history", []), record]
        begin = next((_begin(entry) for entry in entries if _is_first_start(entry, mark.run_id)), None)
    except (OSError, ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    if begin is None:
        return None
    return Goodput(mark.seconds, (time.time() if now is None else now) - begin, len(mark.starts))


def _is_first_start(entry: Any, run_id: str) -> bool:
    """True if an entry is of a run's first start; that of a run resumed from another folder is not in this one."""
    mark = mark_from(entry.get(KEY))
    return mark is not None and mark.run_id == run_id and len(mark.starts) == 1


def _begin(entry: Any) -> float:
    """Returns the start of an entry in seconds of `time.time()`."""
    return datetime.datetime.fromisoformat(entry["started"]).timestamp()
