"""Disk buffers for evaluation rows: unnamed temporary files, memory-mapped, freed with the last array over them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
# file systems that hold their files in memory: writing there frees no memory
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTS = Path("/proc/self/mounts")


class DiskBuffer:
    """Moves the rows of an evaluation to disk past a memory limit.

    All collectors of one evaluation share one buffer, so that the limit is on their sum. The buffer is a context
    manager: exit closes the files. Arrays mapped over them stay valid: a file has no directory entry, and the system
    frees it with the last array over it or at the end of the process.

    Args:
        limit: bytes that may be held in memory; None for no limit.
        folder: used if the system's temporary folder (`TMPDIR`) is in memory itself; None uses `TMPDIR` always.
    """

    def __init__(self, limit: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        self.limit = limit
        self.fallback = folder
        self.held = 0
        self.announced = 0  # expected bytes of collected predictions that were last logged
        self._files: list[IO[bytes]] = []

    @property
    def is_due(self) -> bool:
        """True if more bytes are held in memory than the limit allows."""
        return self.limit is not None and self.held > self.limit

    @property
    def folder(self) -> Path:
        """The folder that the temporary files are created in."""
        return choose_folder(self.fallback)

    def announce(self, num_bytes: int) -> None:
        """Records the expected number of bytes that was logged last."""
        self.announced = num_bytes

    def open(self) -> SpillFile:
        """Creates a new, empty file."""
        try:
            file: IO[bytes] = tempfile.TemporaryFile(prefix="paceline-", dir=self.folder)  # noqa: SIM115
        except OSError as error:
            raise spill_error(error, self.folder) from error
        self._files.append(file)
        return SpillFile(file, self.folder)

    def __enter__(self) -> DiskBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            self._files.pop().close()


class SpillFile:
    """A file of consecutive arrays. They are read by memory mapping, so that the system may drop their pages."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self._folder = file, folder
        self.num_bytes = 0

    def append(self, array: Array) -> None:
        """Appends one array."""
        if array.size == 0:
            return
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        try:
            self._file.write(raw.data)
        except OSError as error:
            raise spill_error(error, self._folder) from error
        self.num_bytes += raw.size

    def map(self, dtype: np.dtype[Any], shape: Sequence[int], offset: int = 0) -> Array:
        """Returns a writable memory-mapped array over a part of the file."""
        if 0 in shape:
            return np.empty(shape, dtype)
        try:
            self._file.flush()
        except OSError as error:
            raise spill_error(error, self._folder) from error
        return np.memmap(self._file, dtype=dtype, mode="r+", offset=offset, shape=tuple(shape))


def spill_error(error: OSError, folder: Path) -> OSError:
    """Returns the error with advice on how to avoid it."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
    return OSError(
        error.errno,
        f"Predictions could not be written to {folder}: {reason}. Set TMPDIR to a folder with more space, or keep "
        "less: `preprocess_logits_for_metrics`, a streaming metric, or prediction_loss_only=True.",
    )


def choose_folder(fallback: str | os.PathLike[str] | None) -> Path:
    """Returns the system's temporary folder, or the fallback if only the former is in memory."""
    folder = Path(tempfile.gettempdir())
    if fallback is None or not Path(fallback).is_dir() or not is_in_memory(folder) or is_in_memory(Path(fallback)):
        return folder
    return Path(fallback)


def is_in_memory(folder: Path, mounts: Path = MOUNTS) -> bool:
    """True if the folder's file system is held in memory, by Linux's table of mounts; False if there is no table."""
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
        if folder.is_relative_to(place) and len(place.parts) >= found:  # a later mount hides an earlier one
            found, kind = len(place.parts), fields[2]
    return kind in IN_MEMORY
