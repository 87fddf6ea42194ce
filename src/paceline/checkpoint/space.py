"""Checks disk space and mount before a checkpoint is written. Standard library only."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

# configuration, state, random number generators, manifest: about ten files of a few kB, rounded up to blocks of 4 kB
SMALL_FILES_BYTES = 64 << 10
HEADER_BYTES = 320  # per tensor in a file: its name, dtype, shape and alignment


class Place:
    """The folder of a run and the file system it was on when the run began."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.device = _nearest(self.folder).stat().st_dev

    def check(self, num_bytes: int) -> None:
        """Raises OSError if there is no space for a checkpoint, or if the file system has changed.

        An unmounted disk leaves its empty mount point: writing there would fill another disk.

        Args:
            num_bytes: size of the checkpoint's tensors with their headers; small files are added here.
        """
        if _nearest(self.folder).stat().st_dev != self.device:
            raise OSError(
                errno.ENODEV, "it is on another file system than at the start of the run: is its disk mounted?"
            )
        free = shutil.disk_usage(_nearest(self.folder)).free
        needed = num_bytes + SMALL_FILES_BYTES
        if free < needed:
            parts = f"{in_words(num_bytes)} of tensors, {in_words(SMALL_FILES_BYTES)} for small files"
            text = f"about {in_words(needed)} are needed ({parts}) and {in_words(free)} are free"
            raise OSError(errno.ENOSPC, text)


def in_words(num_bytes: float) -> str:
    """Formats bytes for display: `3.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    raise AssertionError


def _nearest(folder: Path) -> Path:
    """Returns the folder or its nearest existing parent."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if path.exists())
