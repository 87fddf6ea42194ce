"""Checks disk space and mount before a checkpoint is written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from paceline.core.byte_sizes import format_bytes

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
            parts = f"{format_bytes(num_bytes)} of tensors, {format_bytes(SMALL_FILES_BYTES)} for small files"
            text = f"about {format_bytes(needed)} are needed ({parts}) and {format_bytes(free)} are free"
            raise OSError(errno.ENOSPC, text)


def _nearest(folder: Path) -> Path:
    """Returns the folder or its nearest existing parent."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if path.exists())
