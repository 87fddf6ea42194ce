"""The journal of a run: for every update which samples it saw, its loss, gradient norm and learning rate.

Sixty bytes an update, appended at each log. Which samples an update saw is kept as a range of positions in the order of
its epoch: that order is a pure function of the seed, so the samples' ids need not be written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.outbox import Outbox, append_whole

JOURNAL_FILE = "journal.bin"
SKIPPED_FILE = "skipped_samples.jsonl"  # the samples that a rewind left out
NOT_COMPUTED = -1.0  # in place of a norm: no norm is negative


class UpdateRow(NamedTuple):
    """One update.

    Attributes:
        step: `global_step` after it.
        epoch: whose samples it saw.
        first: how many samples of the epoch were consumed before it.
        num_samples: how many it consumed.
        loss: of the update; NaN where every target was ignored.
        grad_norm: before clipping; `NOT_COMPUTED` where it was not.
        learning_rate: that the update was made with.
        is_counted: whether the update has a loss: False where every target was ignored.
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
    """Append updates to a journal, which is made where there is none; half a row at its end goes.

    Raises: OSError, when the disk refuses; none of them is there then, and what was written before is whole.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size % FORMAT.itemsize:
        os.truncate(path, size - size % FORMAT.itemsize)
    append_whole(path, np.array([tuple(row) for row in rows], dtype=FORMAT).tobytes())


def read_rows(path: Path) -> list[UpdateRow]:
    """Every update of a journal; half a row at its end, left by a crash, is passed over."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = len(content) // FORMAT.itemsize * FORMAT.itemsize
    rows: Any = np.frombuffer(content[:whole], dtype=FORMAT)
    return [UpdateRow._make((*row[:-1], bool(row[-1]))) for row in rows.tolist()]


def truncate(path: Path, step: int) -> None:
    """Forget the updates after `step`: the run goes on from there.

    The file is cut in one call, so that a process that dies here loses no other row.

    Raises: OSError, when the disk refuses.
    """
    later = next((index for index, row in enumerate(read_rows(path)) if row.step > step), None)
    if later is not None:
        os.truncate(path, later * FORMAT.itemsize)


def find_row(path: Path, step: int) -> UpdateRow | None:
    """The update that led to `step`, as it was made last; None where it is not in the journal."""
    return next((row for row in reversed(read_rows(path)) if row.step == step), None)


def keep_journal(outbox: Outbox, folder: Path | None, step: int) -> Callable[[Sequence[UpdateRow]], None]:
    """Cut the journal of `folder` off after a step. Returns what appends rows to it; without a folder, nothing is done.

    What the disk refuses waits in the outbox, and is tried again with the next rows.
    """
    if folder is None:
        return lambda rows: outbox.retry()
    path = folder / JOURNAL_FILE
    outbox.put(path, partial(truncate, path, step))

    def record(rows: Sequence[UpdateRow]) -> None:
        outbox.retry()
        outbox.put(path, partial(append_rows, path, rows))

    return record
