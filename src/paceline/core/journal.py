"""The journal of a run: samples, loss, gradient norm and learning rate of every optimizer step.

A step takes 60 bytes. Rows are appended at each log. The samples of a step are stored as a range of positions in the
order of its epoch. That order is a pure function of the seed, so the samples' ids need not be written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.counts import is_count
from paceline.core.lineage import PROGRESS_FILE
from paceline.core.retry_writer import RetryWriter, append_whole, replace_whole, set_aside

JOURNAL_FILE = "journal.bin"
SKIPPED_FILE = "skipped_samples.jsonl"  # the samples skipped by a rewind
CHANGES_FILE = "control.jsonl"  # the settings that a callback or a command changed during the run
NOT_COMPUTED = -1.0  # placeholder for a missing norm: no norm is negative


class UpdateRow(NamedTuple):
    """One optimizer step.

    Attributes:
        step: `global_step` after it.
        epoch: the epoch of its samples.
        first: samples of the epoch consumed before it.
        num_samples: samples it consumed.
        loss: its loss; NaN if every target was ignored.
        grad_norm: the gradient norm before clipping; `NOT_COMPUTED` if it was not computed.
        learning_rate: the learning rate it used.
        is_counted: False if every target was ignored, so that it has no loss.
    """

    step: int
    epoch: int
    first: int
    num_samples: int
    loss: float
    grad_norm: float
    learning_rate: float
    is_counted: bool = True


FORMAT = np.dtype(
    [
        ("step", "<i8"),
        ("epoch", "<i8"),
        ("first", "<i8"),
        ("num_samples", "<i8"),
        ("loss", "<f8"),
        ("grad_norm", "<f8"),
        ("learning_rate", "<f8"),
        ("is_counted", "<i4"),
    ]
)


def append_rows(path: Path, rows: Sequence[UpdateRow]) -> None:
    """Appends rows to a journal, which is created if missing; an incomplete last row is removed first.

    Raises: OSError, if writing fails; the journal is then unchanged.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size % FORMAT.itemsize:
        os.truncate(path, size - size % FORMAT.itemsize)
    append_whole(path, np.array([tuple(row) for row in rows], dtype=FORMAT).tobytes())


def read_rows(path: Path) -> list[UpdateRow]:
    """Returns every row of a journal; an incomplete last row, left by a crash, is ignored."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = len(content) // FORMAT.itemsize * FORMAT.itemsize
    rows: Any = np.frombuffer(content[:whole], dtype=FORMAT)
    return [UpdateRow._make((*row[:-1], bool(row[-1]))) for row in rows.tolist()]


def truncate(path: Path, step: int) -> None:
    """Removes the rows after `step`, the step that the run is resumed from.

    The file is truncated in one call, so that a crash here loses no other row.

    Raises: OSError, if writing fails.
    """
    later = next((index for index, row in enumerate(read_rows(path)) if row.step > step), None)
    if later is not None:
        os.truncate(path, later * FORMAT.itemsize)


def skipped_windows(progress: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Returns (epoch, first sample) of the accumulation windows skipped by rewinds, from a checkpoint's progress.

    Raises: ValueError, if the entries are malformed; the message names the file.
    """
    pairs = progress.get("skipped") or []
    is_list = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_list or not all(is_count(number) for pair in pairs for number in pair):
        raise ValueError(f"{PROGRESS_FILE} is damaged: the skipped windows are not pairs of whole numbers")
    return {(epoch, first) for epoch, first in pairs}


def truncate_skipped(path: Path, skipped: Collection[tuple[int, int]]) -> None:
    """Removes the lines of windows that were skipped after the checkpoint a run is resumed from.

    The resumed run writes these lines again.

    Raises: OSError, if writing fails.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _window_of(line) in skipped]
    if kept != lines:
        replace_whole(path, "".join(kept))


def _window_of(line: str) -> tuple[Any, Any] | None:
    """Returns (epoch, first sample) of a line; None if a crash truncated it."""
    try:
        row = json.loads(line)
        return (row["epoch"], row["first"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def read_changes(path: Path) -> list[dict[str, Any]]:
    """Returns the recorded changes of a run's settings, in order; an incomplete line, left by a crash, is ignored."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            change = json.loads(line)
        except ValueError:
            continue
        if isinstance(change, dict) and is_count(change.get("step")):
            found.append(change)
    return found


def truncate_changes(path: Path, step: int) -> None:
    """Removes the changes that were made at `step`, the step that the run is resumed from, or after it.

    Raises: OSError, if writing fails.
    """
    changes = read_changes(path)
    kept = [change for change in changes if change["step"] < step]
    if kept != changes:
        replace_whole(path, "".join(f"{json.dumps(change)}\n" for change in kept))


def find_row(path: Path, step: int) -> UpdateRow | None:
    """Returns the last row of `step`; None if it is not in the journal."""
    return next((row for row in reversed(read_rows(path)) if row.step == step), None)


def keep_journal(
    retry_writer: RetryWriter, folder: Path | None, step: int, progress: Mapping[str, Any] | None = None
) -> Callable[[Sequence[UpdateRow]], None]:
    """Truncates the journal and the skipped samples of `folder` after a step. Returns a function that appends rows.

    At step 0 the files of an earlier run are renamed. Failed writes are queued and retried with the next rows.

    Args:
        folder: output folder of the run; None writes nothing.
        step: `global_step` at the start of the run.
        progress: the progress of the checkpoint at that step, which lists the windows skipped by then.
    """
    if folder is None:
        return lambda rows: retry_writer.retry()
    path, left_out, changes = folder / JOURNAL_FILE, folder / SKIPPED_FILE, folder / CHANGES_FILE
    if step == 0:
        for file in (path, left_out, changes):
            retry_writer.put(file, partial(set_aside, file))
    else:
        retry_writer.put(path, partial(truncate, path, step))
        retry_writer.put(changes, partial(truncate_changes, changes, step))
        if progress is not None and "skipped" in progress:
            retry_writer.put(left_out, partial(truncate_skipped, left_out, skipped_windows(progress)))

    def record(rows: Sequence[UpdateRow]) -> None:
        retry_writer.retry()
        retry_writer.put(path, partial(append_rows, path, rows))

    return record
