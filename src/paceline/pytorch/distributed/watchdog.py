"""A watchdog for hanging processes: each process records its current stage, and one that waits too long reports the
stages of the others.

A late process dumps the stacks of its threads to standard error, which shows where it hangs. The records are in a store
that one process serves. If that process is stopped, a request to the store does not return. A separate thread therefore
makes the requests, nothing waits for it, and an unresponsive store is reported too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import distributed
from torch.distributed import distributed_c10d

from paceline.args.sections import Options
from paceline.pytorch.distributed.world import World

logger = logging.getLogger(__name__)

SHARE_OF_TIMEOUT = 6  # a process is late after `ddp_timeout` divided by this
LEAST_INTERVAL, MOST_INTERVAL = 0.2, 10.0  # seconds between two checks
CONNECTION_WORDS = ("gloo", "NCCL", "Connection closed by peer")  # in errors of a collective
SECONDS_TO_LEAVE = 1.0  # the end of a run waits this long for a pending request to the store


class Record(NamedTuple):
    """The state that a process reports.

    Attributes:
        stage: its current activity.
        age: duration of the stage so far, in seconds.
        waits: True if the process is waiting for others.
        number: counts the records, so that no two are equal.
    """

    stage: str
    age: float
    waits: bool
    number: int


class Records:
    """The latest record of each process, exchanged by a background thread that may block.

    Args:
        world: the processes.
        interval: seconds between two exchanges.
        describe: returns the current record of this process.
    """

    def __init__(self, world: World, interval: float, describe: Any) -> None:
        self.world = world
        self.interval = interval
        self._describe = describe
        self.heard: dict[int, tuple[Record, float]] = {}  # rank -> (its last record, its time of arrival)
        self.answered = time.monotonic()  # time of the store's last answer
        self.is_gone = False  # the store is gone: its process has ended, or the group is being destroyed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="paceline-watchdog-store", daemon=True)

    def start(self, store: Any) -> None:
        """Starts exchanging records."""
        try:
            self._store = store.clone()  # its own connection, so that other users in this process need not wait
        except (AttributeError, RuntimeError):
            self._store = store
        self.answered = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; a blocked thread ends with the process."""
        self._stop.set()
        self._thread.join(SECONDS_TO_LEAVE)

    @property
    def patience(self) -> float:
        """Returns the seconds without a record after which a process counts as silent."""
        return max(3 * self.interval, 1.0)

    @property
    def is_held_up(self) -> bool:
        """True if the store is gone or does not answer."""
        return self.is_gone or self.silence(self.answered) is not None

    def silence(self, since: float) -> float | None:
        """Returns the seconds since a time if they exceed `patience`; else None."""
        seconds = time.monotonic() - since
        return seconds if seconds > self.patience else None

    def _exchange(self) -> None:
        while not self._stop.is_set():
            try:
                self._store.set(self._key(self.world.process_index), json.dumps(self._describe()))
                for rank in range(self.world.world_size):
                    self._read(rank)
            except RuntimeError:
                self.is_gone = True
                return
            self.answered = time.monotonic()
            self._stop.wait(self.interval)

    def _read(self, rank: int) -> None:
        if rank == self.world.process_index or not self._store.check([self._key(rank)]):
            return
        record = Record(*json.loads(self._store.get(self._key(rank))))
        if rank not in self.heard or self.heard[rank][0] != record:
            self.heard[rank] = record, time.monotonic()

    def _key(self, rank: int) -> str:
        return f"paceline/watchdog/{rank}"


class Watchdog:
    """Monitors a run in a background thread; used as a context manager.

    Args:
        world: the processes.
        timeout: seconds after which a collective operation fails (`ddp_timeout`).
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world = world
        self.patience = timeout / SHARE_OF_TIMEOUT
        self.stage = "starting"
        self._since = time.monotonic()
        self._is_waiting = False
        self._has_spoken = False
        self._count = 0
        self.interval = min(max(self.patience / 4, LEAST_INTERVAL), MOST_INTERVAL)
        self.records = Records(world, self.interval, self._describe)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.records.start(distributed_c10d._get_default_store())
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_lost_connection(error):
            error.add_note(f"Process {self.world.process_index}, {self.stage}: {self.report()}.")
        self._stop.set()
        self._thread.join()
        self.records.close()

    def enter(self, stage: str) -> None:
        """Sets the stage of this process."""
        self.stage, self._since, self._has_spoken = stage, time.monotonic(), False

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Marks the block as waiting for the others.

        Raises:
            RuntimeError: the wait failed or timed out; the message names the others' stages.
        """
        before = self.stage
        self.enter(what)
        self._is_waiting = True
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"Process {self.world.process_index}, {what}: {self.report()}.") from error
        finally:
            self._is_waiting = False
            self.enter(before)

    def report(self) -> str:
        """Returns the last known stages of the processes that keep the others waiting, without blocking."""
        busy = [
            f"process {rank} was {record.stage} for {record.age + time.monotonic() - at:.0f} s"
            for rank, (record, at) in sorted(self.records.heard.items())
            if not record.waits and self.records.silence(at) is None
        ]
        # while the store does not answer, all records are outdated
        late = self.silent() if self.records.is_held_up else [*busy, *self.silent()]
        return ", ".join(late) or "a process has ended or cannot be reached; see the last lines of its log"

    def silent(self) -> list[str]:
        """Returns descriptions of the processes that do not respond."""
        records = self.records
        if records.is_gone:
            return ["process 0 cannot be reached any more, so it has ended or its machine is cut off"]
        if records.is_held_up:
            seconds = time.monotonic() - records.answered
            return [f"{keeper_of_records()} has not answered for {seconds:.0f} s: it is stopped, or cut off"]
        return [
            f"process {rank}, last heard of {record.stage}, has not responded for "
            f"{time.monotonic() - at:.0f} s: it is stopped, or cut off"
            for rank, (record, at) in sorted(records.heard.items())
            if records.silence(at) is not None
        ]

    def _describe(self) -> Record:
        self._count += 1
        return Record(self.stage, time.monotonic() - self._since, self._is_waiting, self._count)

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            if time.monotonic() - self._since > self.patience and not self._has_spoken:
                self._has_spoken = True
                self._speak()

    def _speak(self) -> None:
        if self._is_waiting:
            logger.warning("Process %d is waiting: %s.", self.world.process_index, self.report())
            return
        logger.warning(
            "Process %d has been %s for %.0f s%s; what its threads do:",
            self.world.process_index,
            self.stage,
            time.monotonic() - self._since,
            "".join(f" ({text})" for text in self.silent()),
        )
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)


def is_lost_connection(error: BaseException) -> bool:
    """Returns True for an error of torch about the connection to another process, which does not name the process."""
    is_general = isinstance(error, RuntimeError) and any(word in str(error) for word in CONNECTION_WORDS)
    return is_general or isinstance(error, distributed.DistError)


def keeper_of_records() -> str:
    """Returns the name of the process that serves the store: torchrun's agent if it does, else the first process."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return "the launcher, which keeps the records," if is_agents else "process 0, which keeps the records,"


@contextmanager
def watching(world: World, args: Options) -> Iterator[Watchdog | None]:
    """Runs a watchdog during a run, if there are other processes to wait for."""
    if not world.is_distributed:
        yield None
        return
    with Watchdog(world, float(args.ddp_timeout)) as watchdog:
        yield watchdog
