"""Asynchronous pushes: one thread, one push at a time; the newest waiting push replaces older ones by default."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.hub.contents import PUSHING_THREAD
from paceline.hub.repository import in_words

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_WORDS = 30.0  # between log lines while the end of training waits for a push
SECONDS_OF_A_SLOW_PUSH = 600.0  # from which on a push that others wait for is warned of


@dataclass
class Push:
    """One push.

    Attributes:
        name: description of its content.
        send: runs the push and returns the hub's response.
        drop: called when the push has ended, with or without success.
        can_be_skipped: True if a newer push may replace this one while it waits.
        result: future of the result or exception of `send`.
    """

    name: str
    send: Callable[[], Any]
    drop: Callable[[], None] = lambda: None
    can_be_skipped: bool = True
    result: Future[Any] = field(default_factory=Future)


class Pushes:
    """The pushes of a Trainer. A failure is logged once per outage and never raised.

    Args:
        repo_id: the repository, for messages.
        clock: returns the time in seconds.

    Attributes:
        failure: the error of the last finished push, if it failed.
    """

    def __init__(self, repo_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.repo_id = repo_id
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: deque[Push] = deque()
        self._clock = clock
        self._current: Push | None = None
        self._begun = 0.0  # the time at which the current push began
        self._is_told = False  # that it takes long
        self._thread: threading.Thread | None = None
        self._waits_at_exit = False

    def start(self, push: Push) -> Future[Any]:
        """Queues a push after the earlier ones. Returns the future of its result."""
        skipped: list[Push] = []
        slow: tuple[str, float] | None = None
        with self._lock:
            if push.can_be_skipped:
                skipped = [other for other in self._waiting if other.can_be_skipped]
                self._waiting = deque(other for other in self._waiting if not other.can_be_skipped)
            if self._thread is not None:
                self._waiting.append(push)
                slow = self._take_slow()
            else:
                self._begin(push)
                # a daemon thread, so that Ctrl-C can abandon it: an incomplete commit has no effect
                self._thread = threading.Thread(target=self._work, args=(push,), name=PUSHING_THREAD, daemon=True)
                self._thread.start()
        self._wait_at_exit()
        for other in skipped:
            logger.info("The push of %s is skipped in favour of the newer push of %s.", other.name, push.name)
            other.drop()
            other.result.cancel()
            other.result.set_running_or_notify_cancel()  # who waits for it is told
        if slow is not None:
            logger.warning(
                "The push of %s to %s has been running for %.0f minutes, and newer pushes wait for it. Training "
                "continues, and the files are in the output folder.",
                slow[0],
                self.repo_id,
                slow[1] / 60,
            )
        return push.result

    def _begin(self, push: Push | None) -> None:
        """Notes the current push; None without one. The lock is held."""
        self._current, self._begun, self._is_told = push, self._clock(), False

    def _take_slow(self) -> tuple[str, float] | None:
        """Returns name and seconds of the current push the first time that it is slow. The lock is held."""
        seconds = self._clock() - self._begun
        if self._current is None or self._is_told or seconds <= SECONDS_OF_A_SLOW_PUSH:
            return None
        self._is_told = True
        return self._current.name, seconds

    def is_done(self) -> bool:
        """True if no push is running or waiting."""
        return self._thread is None

    def wait_until_done(self) -> None:
        """Waits for all pushes and logs this periodically.

        Raises: KeyboardInterrupt; the interpreter then does not wait for the pushes at exit.
        """
        try:
            self._wait()
        except KeyboardInterrupt:
            self._waits_at_exit = False
            raise

    def _wait(self) -> None:
        with self._lock:
            thread, current = self._thread, self._current
        if thread is None:
            return
        name = current.name if current is not None else "the last checkpoint"
        logger.info("Waiting for the push of %s to %s; Ctrl-C leaves without it.", name, self.repo_id)
        start = time.monotonic()
        while thread is not None:
            thread.join(SECONDS_BETWEEN_WORDS)
            if thread.is_alive():
                seconds = time.monotonic() - start
                logger.info("Still pushing %s to %s, for %.0f seconds now.", self._names(), self.repo_id, seconds)
            else:
                with self._lock:
                    thread = self._thread

    def _names(self) -> str:
        with self._lock:
            pushes = [self._current, *self._waiting]
        return ", ".join(push.name for push in pushes if push is not None) or "nothing"

    def report(self, name: str, error: BaseException | None) -> None:
        """Records the result of a push; logs a new failure or recovery."""
        before, self.failure = self.failure, error
        if error is not None and before is None:
            logger.warning(
                "The push of %s to %s failed (%s). Training continues, the files are in the output folder, and the "
                "next checkpoint is pushed again; trainer.push_to_hub() pushes at any time.",
                name,
                self.repo_id,
                in_words(error),
            )
        elif error is None and before is not None:
            logger.warning("%s could be pushed to %s again.", name, self.repo_id)

    def _wait_at_exit(self) -> None:
        """Waits for the pushes at interpreter exit, unless Ctrl-C ended an earlier wait."""
        if self._waits_at_exit:
            return
        self._waits_at_exit = True
        reference = weakref.ref(self)

        def wait() -> None:
            pushes = reference()
            if pushes is not None and pushes._waits_at_exit:
                with suppress(KeyboardInterrupt):
                    pushes.wait_until_done()

        # `atexit` is too late: the executors of huggingface_hub accept no more work by then
        register: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the interpreter is already ending
            register(wait)

    def _work(self, first: Push) -> None:
        push: Push | None = first
        try:
            while push is not None:
                self._carry_out(push)
                with self._lock:
                    push = self._waiting.popleft() if self._waiting else None
                    self._begin(push)
                    if push is None:
                        self._thread = None
        finally:
            with self._lock:  # after an error, nobody waits for this thread
                if self._thread is threading.current_thread():
                    self._thread = None
                    self._begin(None)

    def _carry_out(self, push: Push) -> None:
        """Runs a push, unless it was cancelled while it waited."""
        if not push.result.set_running_or_notify_cancel():
            push.drop()
            return
        error: BaseException | None = None
        answer = None
        try:
            answer = push.send()
        except BaseException as raised:
            error = raised
        push.drop()
        self.report(push.name, error)
        if error is None:
            push.result.set_result(answer)
        else:
            push.result.set_exception(error)
