"""Ownership of checkpoints: maps the checkpoints of a folder to runs. Standard library only.

A checkpoint lists the starts of its run that led to it: a new run has a new id, a resumed run adds a start. `run.json`
in the output folder lists the starts of the run that was started or resumed there last. File times are not used,
because they are meaningless once a clock has been set back.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.counts import is_count
from paceline.core.retry_writer import replace_whole

logger = logging.getLogger(__name__)

RECORD_NAME = "run.json"  # in the output folder
REPORT_FILE = "report.html"  # in the output folder
DIFF_FILE = "uncommitted.diff"  # in the output folder; those of earlier starts are `uncommitted.1.diff` and so on
PACKAGES_FILE = "packages.txt"  # in the output folder
PROGRESS_FILE = "progress.json"  # in a checkpoint
KEY = "run"  # the key of the mark in both files

_MOST_STARTS = 100_000


@dataclass(frozen=True)
class RunMark:
    """The identity of a run and the history of its starts.

    Attributes:
        starts: (id, first `global_step`) of each start in order; the first id is the run's id.
        seconds: training time of all starts up to this checkpoint; None if it was not measured.
        unnamed: in a folder's record, names of the checkpoints without a mark that belong to other runs.
    """

    starts: tuple[tuple[str, int], ...]
    seconds: float | None = 0.0
    unnamed: frozenset[str] = frozenset()

    @property
    def run_id(self) -> str:
        """The id of the run; a resumed run keeps it."""
        return self.starts[0][0]

    def includes(self, other: RunMark, step: int) -> bool:
        """True if a checkpoint that `other` wrote at `step` is in the history of this run.

        False for a checkpoint of another run, and for one after the step from which this run was resumed.
        """
        depth = len(other.starts)
        if self.starts[:depth] != other.starts:
            return False
        return depth == len(self.starts) or step <= self.starts[depth][1]

    def resumed(self, step: int) -> RunMark:
        """Returns the mark of the same run with one more start, at `step`."""
        return replace(self, starts=(*self.starts, (_new_id(), step)), unnamed=frozenset())

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form that checkpoints and records store."""
        values: dict[str, Any] = {"id": self.run_id, "starts": [list(start) for start in self.starts]}
        if self.seconds is not None:
            values["seconds"] = round(self.seconds, 3)
        return {**values, "unnamed": sorted(self.unnamed)} if self.unnamed else values


def at(mark: RunMark, begun: float) -> RunMark:
    """Returns the mark for a checkpoint written now. `begun` is the `time.monotonic()` at which this start began."""
    seconds = None if mark.seconds is None else mark.seconds + time.monotonic() - begun
    return replace(mark, seconds=seconds, unnamed=frozenset())


def mark_from(values: Any) -> RunMark | None:
    """Parses the result of `to_json`; returns None for anything else."""
    starts = values.get("starts") if isinstance(values, Mapping) else None
    if not isinstance(starts, list) or not 0 < len(starts) <= _MOST_STARTS or not all(map(_is_start, starts)):
        return None
    seconds, unnamed = values.get("seconds"), values.get("unnamed") or []
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        seconds = None
    if not isinstance(unnamed, list) or not all(isinstance(name, str) for name in unnamed):
        return None
    return RunMark(tuple((name, step) for name, step in starts), seconds, frozenset(unnamed))


def new_run(step: int = 0) -> RunMark:
    """Returns the mark of a run that begins now."""
    return RunMark(((_new_id(), step),))


def mark_of(checkpoint: Path) -> RunMark | None:
    """Returns the mark of a checkpoint; None if another trainer wrote it or it is unreadable."""
    return _read(checkpoint / PROGRESS_FILE)


def run_in(folder: Path) -> RunMark | None:
    """Returns the run that was started or resumed last in an output folder; None without a record."""
    return _read(folder / RECORD_NAME)


def is_part(run: RunMark | None, name: str, mark: RunMark | None) -> bool:
    """True if a checkpoint is in the history of a run.

    Args:
        run: None if unknown; every checkpoint then counts.
        name: the checkpoint's name.
        mark: the checkpoint's mark, or None. A checkpoint without one is the run's unless it existed when that began.
    """
    if run is None:
        return True
    if mark is None:
        return name not in run.unnamed
    return run.includes(mark, step_in(name))


def is_of_run(run: RunMark, name: str, mark: RunMark | None) -> bool:
    """True if a checkpoint was written by a run, including steps that a later resume discarded."""
    return name not in run.unnamed if mark is None else mark.run_id == run.run_id


def begin_run(folder: Path, checkpoint: Path | None, step: int, present: Iterable[Path]) -> RunMark:
    """Returns the mark of a training that starts now.

    Args:
        folder: its output folder.
        checkpoint: the checkpoint it is resumed from; None for a new run.
        step: the `global_step` it starts at.
        present: the checkpoints in the folder.
    """
    before, saved = run_in(folder), mark_of(checkpoint) if checkpoint is not None else None
    is_here = checkpoint is not None and checkpoint.parent.resolve() == folder.resolve()
    goes_on = is_here and checkpoint is not None and is_part(before, checkpoint.name, saved)
    run = new_run(step)
    if saved is not None:
        run = saved.resumed(step)
    elif goes_on and before is not None:  # another trainer has continued the run in between
        run = replace(before.resumed(step), seconds=None)
    left = before.unnamed if goes_on and before is not None else frozenset()
    has_past = is_here and (goes_on or saved is None)  # earlier checkpoints without a mark belong to the same run
    unnamed = {
        path.name
        for path in present
        if mark_of(path) is None and (not has_past or step_in(path.name) > step or path.name in left)
    }
    return replace(run, unnamed=frozenset(unnamed))


def claimed(run: RunMark, folder: Path, name: str) -> RunMark:
    """Returns the mark of a run that has just saved the checkpoint `name`.

    If user code wrote the checkpoint without a mark, the checkpoint belongs to this run from now on. `run.json` is
    updated too; a failed write is logged.
    """
    if name not in run.unnamed or mark_of(folder / name) is not None:
        return run
    claiming = replace(run, unnamed=run.unnamed - {name})
    path = folder / RECORD_NAME
    try:
        values = json.loads(path.read_bytes())
        replace_whole(path, json.dumps({**values, KEY: claiming.to_json()}, indent=2, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:
        logger.warning("%s could not be written: %s.", path, error)
        return run
    return claiming


def step_in(name: str) -> int:
    """Returns the step in a checkpoint's name."""
    return int(name.rpartition("-")[2])


def parse_mark(content: bytes | None) -> RunMark | None:
    """Returns the mark in the content of a `progress.json` or `run.json`; None if there is none."""
    try:
        values = json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
    return mark_from(values.get(KEY)) if isinstance(values, dict) else None


def _read(path: Path) -> RunMark | None:
    try:
        return parse_mark(path.read_bytes())
    except OSError:
        return None


def _is_start(start: object) -> bool:
    return isinstance(start, list) and len(start) == 2 and isinstance(start[0], str) and is_count(start[1])


def _new_id() -> str:
    return uuid.uuid4().hex
