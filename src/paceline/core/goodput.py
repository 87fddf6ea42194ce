"""Goodput: the share of the time since a run's first start that contributed to its weights. Standard library only."""

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
        useful: seconds that contributed to the current weights, over all starts. Steps that were lost and repeated
            count once.
        wall: seconds since the first start, including the time in which nothing ran.
        num_starts: the number of times that the run was started or resumed.
    """

    useful: float
    wall: float
    num_starts: int

    @property
    def share(self) -> float:
        """The useful fraction of the wall time, from 0 to 1."""
        return min(self.useful / self.wall, 1.0) if self.wall > 0 else 1.0

    def describe(self) -> str:
        """Returns a sentence for the log."""
        return (
            f"Goodput {self.share * 100:.0f} %: {self.useful:.0f} s of training led to these weights, in "
            f"{self.wall:.0f} s since the first of {self.num_starts} starts."
        )


def goodput(folder: Path, mark: RunMark, now: float | None = None) -> Goodput | None:
    """Returns the goodput of a run.

    The useful time is the training time recorded in the checkpoint that the run was resumed from, plus that of the
    present start. The time of the first start is read from the run's first entry in `run.json`.

    Args:
        folder: output folder of the run.
        mark: the mark of a checkpoint written now.
        now: a value of `time.time()`; None for the present.

    Returns:
        The goodput; None if the folder has no record of the run's first start, or the time before a resume is unknown.
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
    """True if an entry records the run's first start. A run resumed from another folder has no such entry here."""
    mark = mark_from(entry.get(KEY))
    return mark is not None and mark.run_id == run_id and len(mark.starts) == 1


def _begin(entry: Any) -> float:
    """Returns the start time of an entry as a value of `time.time()`."""
    return datetime.datetime.fromisoformat(entry["started"]).timestamp()
