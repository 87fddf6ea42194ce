"""The small files that a run keeps beside its checkpoints, on a disk that may refuse them for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Outbox:
    """Writes at once what it is given; what the disk refuses is kept, and tried again in the same order.

    A run does not end because its journal or its record cannot be written: it warns, once for each file and outage. One
    file that cannot be written does not hold up the others.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, list[Callable[[], Any]]] = {}

    def put(self, path: Path, write: Callable[[], Any]) -> None:
        """Write, now or later.

        Args:
            path: of the file, for the order and the warning.
            write: does it; raises OSError where it could not, and has then changed nothing.
        """
        waiting = self._waiting.setdefault(path, [])
        waiting.append(write)
        if len(waiting) == 1:
            error = self._write(path)
            if error is not None:
                logger.warning(
                    "%s could not be written (%s): training goes on, and it is tried again with the next updates. Free "
                    "space on the disk, or make the folder writable.",
                    path,
                    error,
                )

    def retry(self) -> None:
        """Try again what is waiting; says nothing where the disk still refuses."""
        for path in list(self._waiting):
            self._write(path)

    def close(self) -> None:
        """Try for the last time, and say what is lost."""
        self.retry()
        if self._waiting:
            logger.error("The run ends, and this is not up to date: %s.", ", ".join(map(str, self._waiting)))
            self._waiting.clear()

    def _write(self, path: Path) -> OSError | None:
        """Write what waits for one file, as far as the disk lets; what it said where it did not."""
        waiting = self._waiting[path]
        while waiting:
            try:
                waiting[0]()
            except OSError as error:
                return error
            del waiting[0]
        del self._waiting[path]
        return None


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, all of it or nothing.

    Raises: OSError, when the disk refuses.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        view = memoryview(content)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.truncate(end)  # part of it may be there: a full disk takes what fits
            raise
