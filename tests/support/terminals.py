"""A terminal for tests: a pseudo-terminal, and what it shows of what was written to it."""

from __future__ import annotations

import fcntl
import importlib
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

ROWS = 50
TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n\b])|([^\x1b\r\n\b]+)")


class Screen:
    """Lines of characters that never scroll. A line that is longer than the terminal counts as broken.

    Args:
        columns: width of the terminal.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for number, command, control, plain in TOKEN.findall(text):
            if command:
                self.obey(command, int(number or 1))
            elif control:
                self.move(control)
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)
                assert len(self.lines[self.row].rstrip()) <= self.columns, self.lines[self.row]

    def obey(self, command: str, number: int) -> None:
        if command == "A":
            self.row = max(self.row - number, 0)
        elif command in "KJ":
            self.lines[self.row] = self.lines[self.row][: self.column]
            if command == "J":
                self.lines[self.row + 1 :] = []
        else:
            assert command == "m", command

    def move(self, control: str) -> None:
        if control == "\n":  # the terminal writes a carriage return too
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
        self.column = 0 if control != "\b" else max(self.column - 1, 0)

    def resize(self, columns: int) -> None:
        """Wraps the lines anew, as most terminals do; the cursor stays at its character."""
        wrapped: list[str] = []
        for index, line in enumerate(self.lines):
            if index == self.row:
                row, column = len(wrapped) + self.column // columns, self.column % columns
            wrapped += [line[at : at + columns] for at in range(0, max(len(line.rstrip()), 1), columns)]
        self.lines, self.columns, self.row, self.column = wrapped, columns, row, column

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


class Emulator:
    """The screen of pyte, an emulator of a terminal that scrolls, and that cuts its lines when it becomes narrower.

    Args:
        columns: width of the terminal.
    """

    def __init__(self, columns: int) -> None:
        pyte = importlib.import_module("pyte")
        self._screen: Any = pyte.HistoryScreen(columns, ROWS, history=1000)
        self._stream: Any = pyte.Stream(self._screen)

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    def resize(self, columns: int) -> None:
        self._screen.resize(ROWS, columns)

    @property
    def shown(self) -> list[str]:
        """The lines that are not empty, those that have scrolled away first."""
        above = ["".join(line[at].data for at in range(self._screen.columns)) for line in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display] if line.strip()]


class Terminal:
    """A pseudo-terminal with a stream that writes to it.

    Args:
        columns: width of the terminal.
        kind: the class of its screen.

    Attributes:
        stream: a text stream, as `sys.stdout` is.
        screen: what is shown after `look`.
    """

    def __init__(self, columns: int, kind: type[Screen] | type[Emulator] = Screen) -> None:
        self._outer, inner = pty.openpty()
        self.stream = io.TextIOWrapper(io.FileIO(inner, "w"), encoding="utf-8", write_through=True)
        self.screen = kind(columns)
        self.resize(columns, is_first=True)

    def resize(self, columns: int, is_first: bool = False) -> None:
        self.look()
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        if not is_first:
            self.screen.resize(columns)

    def look(self) -> list[str]:
        """Returns the lines that the terminal shows."""
        content = b""
        while select.select([self._outer], [], [], 0)[0]:
            content += os.read(self._outer, 65536)
        self.screen.feed(content.decode())
        return self.screen.shown

    def close(self) -> None:
        self.stream.close()
        os.close(self._outer)


class TerminalProcess:
    """Runs a command in a pseudo-terminal, in a session of its own, as a context; it is killed at the end.

    Args:
        command: the program and its arguments.
        columns: width of the terminal.

    Attributes:
        text: everything that was written so far.
    """

    def __init__(self, command: list[str], columns: int) -> None:
        self._command, self._columns = command, columns
        self._output = bytearray()

    def __enter__(self) -> TerminalProcess:
        self._outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, self._columns, 0, 0))
        streams = {"stdin": inner, "stdout": inner, "stderr": inner}
        self._process = subprocess.Popen(self._command, **streams, start_new_session=True)
        os.close(inner)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(10)
        os.close(self._outer)

    def _read(self) -> None:
        with suppress(OSError):  # all processes have closed the terminal
            while data := os.read(self._outer, 4096):
                self._output += data

    @property
    def text(self) -> str:
        return self._output.decode(errors="replace")

    def resize(self, columns: int) -> None:
        """Changes the width, of which the system tells the processes in the foreground."""
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))

    def interrupt(self) -> None:
        """Sends what Ctrl-C sends: SIGINT to all processes in the foreground."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for(self, is_met: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not is_met():
            assert self._process.poll() is None, self.text[-2000:]
            assert time.monotonic() < end, self.text[-2000:]
            time.sleep(0.1)

    def wait(self, seconds: float = 120) -> int:
        """Returns the exit code."""
        return self._process.wait(seconds)


@contextmanager
def on_terminal(columns: int, kind: type[Screen] | type[Emulator] = Screen) -> Iterator[Terminal]:
    """Makes a terminal the standard output and error."""
    terminal, before = Terminal(columns, kind), (sys.stdout, sys.stderr)
    sys.stdout = sys.stderr = terminal.stream
    try:
        yield terminal
    finally:
        sys.stdout, sys.stderr = before
        terminal.close()
