"""Warns of stopped (SIGSTOP) data workers, for which the loader would wait silently. Standard library only."""

from __future__ import annotations

import logging
import multiprocessing.process
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 5.0  # each check reads one file of /proc per worker


class WorkerWatch:
    """A background thread, used as a context manager while data is read. Does nothing without /proc.

    It warns of a worker that two checks in a row find stopped, once until the worker continues. One check is not
    enough, because debuggers stop processes briefly.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # process id -> time at which it was first found stopped
        self._named: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-workers", daemon=True)

    def __enter__(self) -> WorkerWatch:
        if Path("/proc/self/stat").exists():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            self.look()

    def look(self) -> None:
        """Checks each worker once."""
        stopped = [pid for pid in worker_ids() if state_of(pid) == "T"]
        now = time.monotonic()
        self._named.intersection_update(stopped)
        for pid in stopped:
            if pid in self._since and pid not in self._named:
                self._named.add(pid)
                logger.warning(
                    "Data worker %d is stopped (SIGSTOP) and has given no batches for %.0f s; the loader waits for it. "
                    "`kill -CONT %d` continues it.",
                    pid,
                    now - self._since[pid],
                    pid,
                )
        self._since = {pid: self._since.get(pid, now) for pid in stopped}


def worker_ids() -> list[int]:
    """Returns the ids of the child processes started through multiprocessing, as data workers are."""
    # `active_children` would reap dead workers before their loader has seen the exit status
    children: set[Any] = getattr(multiprocessing.process, "_children", set())
    return [child.pid for child in children.copy() if child.pid is not None]


def state_of(pid: int) -> str | None:
    """Returns Linux's letter for the state of a process (T: stopped); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
