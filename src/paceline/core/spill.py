"""Rows on disk instead of in memory: files without a name, mapped as arrays, gone with the last array over them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
# file systems whose files are held in memory: writing there frees none
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTS = Path("/proc/self/mounts")


class Spill:
    """Says when the rows of an evaluation leave memory, and opens the files they go to.

    One is shared by everything that collects rows in one evaluation, so that the limit is on their sum. A context
    manager: leaving it closes the files. Arrays mapped over them stay valid: a file has no name in any folder, and the
    system frees it when the last array over it is gone, or the process has ended, however it did.

    Args:
        limit: bytes that may be held in memory; None: any number.
        folder: where to write when the system's temporary folder (`TMPDIR`) lies in memory itself; None: there anyway.
    """

    def __init__(self, limit: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        self.limit = limit
        self.fallback = folder
        self.held = 0
        self.announced = 0  # bytes that the user was told will be kept
        self._files: list[IO[bytes]] = []

    @property
    def is_due(self) -> bool:
        """Whether more is held in memory than may be."""
        return self.limit is not None and self.held > self.limit

    @property
    def folder(self) -> Path:
        """The folder whose file system is written to."""
        return choose_folder(self.fallback)

    def open(self) -> SpillFile:
        """A new, empty file."""
        try:
            file: IO[bytes] = tempfile.TemporaryFile(prefix="paceline-", dir=self.folder)  # noqa: SIM115
        except OSError as error:
            raise spill_error(error, self.folder) from error
        self._files.append(file)
        return SpillFile(file, self.folder)

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            self._files.pop().close()


class SpillFile:
    """Arrays one after the other in a file; they are read back by mapping, so that the system may drop their pages."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self._folder = file, folder
        self.num_bytes = 0

    def append(self, array: Array) -> None:
        """Write one array behind the others."""
        if array.size == 0:
            return
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        try:
            self._file.write(raw.data)
        except OSError as error:
            raise spill_error(error, self._folder) from error
        self.num_bytes += raw.size

    def map(self, dtype: np.dtype[Any], shape: Sequence[int], offset: int = 0) -> Array:
        """An array over a part of the file, to be read and written: what is changed in it is changed on disk."""
        if 0 in shape:
            return np.empty(shape, dtype)
        try:
            self._file.flush()
        except OSError as error:
            raise spill_error(error, self._folder) from error
        return np.memmap(self._file, dtype=dtype, mode="r+", offset=offset, shape=tuple(shape))


def spill_error(error: OSError, folder: Path) -> OSError:
    """The same error, with what to do."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
    return OSError(
        error.errno,
        f"Predictions could not be written to {folder}: {reason}. Set TMPDIR to a folder with more space, or keep "
        "less: `preprocess_logits_for_metrics`, a streaming metric, or prediction_loss_only=True.",
    )


def choose_folder(fallback: str | os.PathLike[str] | None) -> Path:
    """The system's temporary folder; the fallback where that one lies in memory and the fallback does not."""
    folder = Path(tempfile.gettempdir())
    if fallback is None or not Path(fallback).is_dir() or not is_in_memory(folder) or is_in_memory(Path(fallback)):
        return folder
    return Path(fallback)


def is_in_memory(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether the files of a folder are held in memory, as far as the system's table of mounts (Linux) tells."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    folder = folder.resolve()
    found, kind = -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(fields[1].replace("\\040", " "))
        if folder.is_relative_to(place) and len(place.parts) >= found:  # of two on one place, the later one counts
            found, kind = len(place.parts), fields[2]
    return kind in IN_MEMORY
