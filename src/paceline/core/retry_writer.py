"""Writes of a run's small files (journal, record, logs) with retries while the disk fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class RetryWriter:
    """Writes immediately; failed writes are queued and retried in the same order.

    A run continues if its journal or record cannot be written, with one warning for each file and outage. A failing
    file does not block the others.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, list[Callable[[], Any]]] = {}

    def put(self, path: Path, write: Callable[[], Any]) -> None:
        """Writes now, or queues the write.

        Args:
            path: the file, for the order and the warning.
            write: writes; raises OSError on failure, without having changed anything.
        """
        waiting = self._waiting.setdefault(path, [])
        waiting.append(write)
        if len(waiting) == 1:
            error = self._write(path)
            if error is not None:
                logger.warning(
                    "%s could not be written (%s): training continues, and the write is retried later. Free space on "
                    "the disk, or make the folder writable.",
                    path,
                    error,
                )

    def retry(self) -> None:
        """Retries the queued writes; a repeated failure is not logged."""
        for path in list(self._waiting):
            self._write(path)

    def close(self) -> None:
        """Retries for the last time and logs the files that are incomplete."""
        self.retry()
        if self._waiting:
            logger.error("The run has ended with incomplete files: %s.", ", ".join(map(str, self._waiting)))
            self._waiting.clear()

    def _write(self, path: Path) -> OSError | None:
        """Writes the queue of one file. Returns the error at which it stopped, or None."""
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
    """Appends the whole content to a file, or nothing.

    Raises: OSError, if writing fails.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        view = memoryview(content)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                file.truncate(end)  # a full disk accepts a part of the content
            raise


def append_line(path: Path, line: str) -> None:
    """Appends a whole line to a text file, or nothing. Ends an incomplete last line, left by a crash, first.

    Raises: OSError, if writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    start = b""
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            start = b"" if file.read(1) == b"\n" else b"\n"
    append_whole(path, start + line.encode())


def replace_whole(path: Path, content: str) -> None:
    """Replaces a file atomically. Raises: OSError, with the old file unchanged."""
    temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(content)  # a lone surrogate, an odd byte of a file name, becomes what JSON writes for it
        temporary.replace(path)
    except OSError as error:
        if error.filename2 is None:
            error.filename = str(path)  # a write to a full disk names no file
        raise
    finally:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)


def set_aside(path: Path) -> Path | None:
    """Renames a file of an earlier run, `log.csv` to `log.1.csv` or the next free number, so that it is not lost."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(free)
