"""Signals that ask a run to stop: recorded at once, obeyed at the next step boundary."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

SECOND_INTERRUPT = "a second Ctrl-C"
PREEMPTION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interrupted(Exception):
    """An evaluation was interrupted because the run was asked to stop. Caught by the loop, never seen by a user."""


class StopSignals:
    """Context manager in which SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) set `requested`; exit restores the old handlers.

    SIGTERM and SIGUSR1 let the run save and end normally, and the previous handler is called too. Ctrl-C also lets the
    run save, then raises KeyboardInterrupt; a second Ctrl-C raises it at once. Python allows no handlers outside the
    main thread: none is installed there, and this is logged.

    Args:
        enabled: False installs no handler.
        is_distributed: True if there are other ranks. A signal then only sets `noted`; `requested` is set when all
            ranks agree.
    """

    def __init__(self, enabled: bool = True, is_distributed: bool = False) -> None:
        self.enabled, self.is_distributed = enabled, is_distributed
        self.requested: int | None = None
        self.noted: int | None = None
        self.stops_evaluation = False  # an evaluation in progress is one that the loop repeats in a resumed run
        self._before: dict[int, Any] = {}

    @property
    def is_keyboard(self) -> bool:
        """True if the stop was requested by Ctrl-C."""
        return self.requested == signal.SIGINT

    @contextmanager
    def stopping_evaluation(self) -> Iterator[None]:
        """Returns a context in which evaluations raise `Interrupted` once a stop is requested.

        Others, such as those of a callback, run to their end: nothing outside of the loop handles the exception.
        """
        self.stops_evaluation = True
        try:
            yield
        finally:
            self.stops_evaluation = False

    def agree(self, by_keyboard: bool) -> None:
        """Sets `requested` after all ranks have agreed to stop because one of them was asked to."""
        if self.requested is None:
            other = self.noted or getattr(signal, "SIGTERM", signal.SIGINT)
            self.requested = signal.SIGINT if by_keyboard else other

    def __enter__(self) -> StopSignals:
        if not self.enabled:
            return self
        if threading.current_thread() is not threading.main_thread():
            logger.info("Training outside the main thread: SIGTERM and Ctrl-C will not save a checkpoint first.")
            return self
        for number in (*PREEMPTION_SIGNALS, signal.SIGINT):
            before = signal.getsignal(number)
            # a handler that was not set from Python (None) cannot be chained or restored: leave it in place.
            # SIGINT ignored on purpose (a job in the background of a shell) stays ignored.
            if before is None or (number == signal.SIGINT and before == signal.SIG_IGN):
                continue
            self._before[number] = before
            signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.noted == signal.SIGINT:
            raise KeyboardInterrupt(SECOND_INTERRUPT)
        first, self.noted = self.noted is None, number
        if not self.is_distributed:
            self.requested = number
        if first:
            name = signal.Signals(number).name
            # a handler may run while the same thread writes to the same stream, which Python's buffers refuse
            with suppress(RuntimeError):
                logger.warning("%s: stopping at the next step boundary, after a checkpoint if saving is on.", name)
        before = self._before.get(number)
        if number != signal.SIGINT and callable(before):
            before(number, frame)
