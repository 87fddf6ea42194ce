"""Raises Ctrl-C again if Python has dropped it: in a finalizer, or in a callback that each import of a module runs."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

DELAY = 0.05  # seconds, after which the code that cannot raise has returned


@contextmanager
def raised_again() -> Iterator[None]:
    """Returns a context in which no Ctrl-C is dropped; other errors that cannot be raised are reported as before.

    Python's handler of SIGINT raises KeyboardInterrupt wherever the main thread is. In a finalizer or a callback of a
    weak reference it cannot be passed on: Python prints it and goes on. The import system runs such a callback for
    each module, so that about one Ctrl-C in a hundred during the imports had no effect.
    """
    before = sys.unraisablehook
    hook = partial(_raise_again, before)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _raise_again(others: Callable[[Any], Any], unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        others(unraisable)
        return
    timer = threading.Timer(DELAY, _thread.interrupt_main)
    timer.daemon = True
    timer.start()
