"""Who is late, and where: each process says now and then what it is doing, and one that waits long reads it.

A process that is late dumps the stacks of its threads to standard error, so that what it hangs in can be seen.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d

from paceline.distributed.world import World

logger = logging.getLogger(__name__)

SHARE_OF_TIMEOUT = 6  # a process is late after this part of `ddp_timeout`
LEAST_INTERVAL, MOST_INTERVAL = 0.2, 10.0  # seconds between two looks


class Watchdog:
    """A thread beside the training; used as a context manager.

    Args:
        world: the processes.
        timeout: seconds after which a collective operation fails (`ddp_timeout`).
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world, self.patience = world, timeout / SHARE_OF_TIMEOUT
        self.stage, self._since = "starting", time.monotonic()
        self._is_waiting = False
        self._has_spoken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._store: Any = distributed_c10d._get_default_store()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def enter(self, stage: str) -> None:
        """Say what this process does from now on."""
        self.stage, self._since, self._has_spoken = stage, time.monotonic(), False

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While the block waits for the others.

        Raises:
            RuntimeError: the wait failed or timed out; the message says what the others were doing.
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
        """What the processes that keep the others waiting were doing when last heard of."""
        try:
            records = [record for record in self._read() if not record[-1]]
            late = [f"process {rank} was {stage} for {age:.0f} s" for rank, stage, age, _ in records]
        except RuntimeError:  # the process that keeps the records is gone
            return "process 0 cannot be reached any more, so it has ended or its machine is cut off"
        return ", ".join(late) or "a process has ended or cannot be reached; its own last lines say more"

    def _watch(self) -> None:
        interval = min(max(self.patience / 4, LEAST_INTERVAL), MOST_INTERVAL)
        while not self._stop.wait(interval):
            try:
                self._publish()
                if time.monotonic() - self._since > self.patience and not self._has_spoken:
                    self._has_spoken = True
                    self._speak()
            except RuntimeError:  # the store is gone: the group is being taken down
                return

    def _publish(self) -> None:
        record = [self.stage, time.monotonic() - self._since, self._is_waiting, time.time()]
        self._store.set(self._key(self.world.process_index), json.dumps(record))

    def _read(self) -> Iterator[tuple[int, str, float, bool]]:
        for rank in range(self.world.world_size):
            if rank != self.world.process_index and self._store.check([self._key(rank)]):
                stage, age, waits, when = json.loads(self._store.get(self._key(rank)))
                yield rank, stage, age + time.time() - when, waits

    def _speak(self) -> None:
        if self._is_waiting:
            logger.warning("Process %d is waiting: %s.", self.world.process_index, self.report())
            return
        logger.warning(
            "Process %d has been %s for %.0f s; what its threads do:",
            self.world.process_index,
            self.stage,
            time.monotonic() - self._since,
        )
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)

    def _key(self, rank: int) -> str:
        return f"paceline/watchdog/{rank}"


@contextmanager
def watching(world: World, args: Any) -> Iterator[Watchdog | None]:
    """A watchdog beside a run, where there are other processes to wait for."""
    if not world.is_shared:
        yield None
        return
    with Watchdog(world, float(args.ddp_timeout)) as watchdog:
        yield watchdog
