"""Ctrl-C in tests that were started where it is ignored: in the background of a shell script, or under nohup."""

import signal


def restore() -> None:
    """Give SIGINT the handler that Python gives it, if this process was started with the signal ignored.

    A process that is started inherits that a signal is ignored, and none of its handlers: those that tests start
    from here on have the system's default, and Python's handler if they are Python.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
