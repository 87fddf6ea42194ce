"""Bars on a terminal that stay whole whatever a program prints beside them, and log rows in aligned columns.

A frame leaves the cursor at the first column of the first bar: a terminal that wraps its lines anew when it is resized
keeps the cursor there, so that the next frame, which is drawn from the first bar on, replaces all of the wrapped one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.core.optional import require
from paceline.core.terminal import fit, plain, shows_unicode, width_of

TO_END_OF_LINE, TO_END_OF_SCREEN = "\x1b[K", "\x1b[J"  # of the control sequence "erase"
BAR_FORMAT = "{desc}: {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}{postfix}]"  # at most 80 columns
NEVER = 1e9  # steps and seconds
_LEAST_WIDTH = 5  # columns of a number


def make_terminal_bar(
    total: int | None,
    title: str,
    unit: str,
    initial: int = 0,
    leave: bool = True,
    draws_itself: bool = True,
    style: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a bar of tqdm on the standard error.

    Args:
        total: number of steps; None if unknown.
        title: text before the bar.
        unit: the unit of `total`.
        initial: steps done before.
        leave: True keeps the last frame.
        draws_itself: False draws a frame only when `refresh` is called.
        style: further settings of tqdm.
    """
    tqdm = require("tqdm.std", "progress").tqdm  # light; tqdm.auto also draws in notebooks and imports asyncio
    settings: dict[str, Any] = {} if total is None else {"bar_format": BAR_FORMAT}
    settings |= style or {}
    if not draws_itself:
        settings |= {"miniters": NEVER, "mininterval": NEVER, "maxinterval": NEVER}
    # a delay that is too short to notice keeps tqdm from drawing before the printer is replaced
    bar = tqdm(
        total=total, desc=title, unit=unit, initial=initial, leave=leave, delay=1e-9, dynamic_ncols=True, **settings
    )
    bar.dynamic_ncols = functools.partial(_size_but_last_column, bar.dynamic_ncols)
    bar.sp = _Frames(bar)
    bar.refresh()
    return bar


def _size_but_last_column(measure: Any, file: Any) -> tuple[int, int | None]:
    """Returns the columns, less the last one, in which the cursor may wrap, and the lines of a terminal."""
    columns, lines = measure(file) if callable(measure) else (None, None)
    return max((columns or 80) - 1, 1), lines


class _Frames:
    """Draws the frames of a bar, each on one line.

    Args:
        bar: the bar, whose stream is written to.
    """

    def __init__(self, bar: Any) -> None:
        self._file, self._measure = bar.fp, bar.dynamic_ncols
        self._columns: int = self._measure(self._file)[0]

    def __call__(self, frame: str) -> None:
        columns = self._measure(self._file)[0]
        erased = TO_END_OF_SCREEN if columns < self._columns else ""
        self._columns = columns
        shown = fit(frame, columns, shows_unicode(self._file))
        self._file.write(f"\r{erased}{shown}{TO_END_OF_LINE}\r")
        self._file.flush()


class DetailLine:
    """A line of text below a bar. It is a bar of tqdm without a bar, so that other bars keep their distance."""

    def __init__(self) -> None:
        self._line = make_terminal_bar(None, "", "", draws_itself=False, style={"bar_format": "{desc}"})

    def show(self, text: str) -> None:
        """Shows a text."""
        self._line.desc = text
        self._line.refresh()

    def close(self) -> None:
        """Leaves the text below the last frame of the bar, which has to be closed before."""
        self._line.leave = bool(self._line.desc)
        self._line.close()


class LinesAboveBars:
    """Writes what the program prints on a terminal above the bars of tqdm, from `begin` to `end`.

    The method `write` of `sys.stdout` and `sys.stderr` is replaced on the objects themselves, because log handlers
    keep a reference to them. A line is written once it is complete.
    """

    def __init__(self) -> None:
        self._streams: list[_LinesOfStream] = []

    def begin(self) -> None:
        """Starts, for those of both streams that are terminals."""
        self.end()
        for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():
            with suppress(AttributeError, OSError, ValueError):  # a stream of another class, or a closed one
                if stream.isatty():
                    self._streams.append(_LinesOfStream(stream))

    def end(self) -> None:
        """Writes what is incomplete, and restores the streams."""
        streams, self._streams = self._streams, []
        for stream in reversed(streams):
            stream.restore()


class _LinesOfStream:
    """Replaces the method `write` of one stream.

    Args:
        stream: the stream, a terminal.

    Raises:
        AttributeError: its method cannot be replaced.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._raw = stream, stream.write
        self._tqdm = require("tqdm.std", "progress").tqdm
        self._process = os.getpid()
        self._rest, self._is_active = "", True
        self._had_own = "write" in vars(stream)
        # no bound method: it is compared by identity
        self._mine = functools.partial(_LinesOfStream.write, self)
        stream.write = self._mine

    def write(self, text: str) -> int:
        """Writes the lines that are complete above the bars. Bars write as they are."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not self._is_active or not isinstance(text, str) or str(caller).partition(".")[0] == "tqdm":
            return int(self._raw(text))
        if os.getpid() != self._process:  # a fork, such as a worker: the bars and their lock are not its own
            whole = self._take(text)
            if whole:
                self._raw(f"\r{TO_END_OF_SCREEN}{whole}")
                self._stream.flush()
            return len(text)
        with self._tqdm.get_lock():
            whole = self._take(text)
            if whole:
                with self._tqdm.external_write_mode(file=self._stream, nolock=True):
                    self._raw(whole)
        return len(text)

    def restore(self) -> None:
        """Restores the stream, unless other code has replaced the method since then."""
        if self._rest and os.getpid() == self._process:
            with suppress(OSError, ValueError):
                self.write("\n")
        self._is_active = False
        if vars(self._stream).get("write") is self._mine:
            if self._had_own:
                self._stream.write = self._raw
            else:
                del self._stream.write

    def _take(self, text: str) -> str:
        """Returns the complete lines of all text so far, and keeps the rest of the last one."""
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        return whole + newline


class AlignedRows:
    """Formats log rows in columns: the same number stands at the same place in row after row."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}

    def format(self, row: Mapping[str, Any], columns: int) -> str:
        """Returns a row as names and values, step and epoch first, wrapped at `columns` with an indentation."""
        first = [name for name in ("step", "epoch") if name in row]
        names = [*first, *(name for name in row if name not in first)]
        return "\n".join(wrap([self._cell(name, row[name]) for name in names], columns))

    def _cell(self, name: str, value: Any) -> str:
        text = plain(f"{value:.4g}" if isinstance(value, float) else value)
        width = max(self._widths.get(name, _LEAST_WIDTH), width_of(text))
        self._widths[name] = width
        padding = " " * (width - width_of(text))
        return f"{plain(name)} {padding}{text}" if name == "step" else f"{plain(name)} {text}{padding}"


def wrap(cells: Sequence[str], columns: int) -> list[str]:
    """Returns lines of cells; lines after the first are indented to the second cell, where there is room."""
    lines, line = [], ""
    for cell in cells:
        if line and width_of(f"{line}  {cell.rstrip()}") > columns:
            lines.append(line.rstrip())
            line = " " * max(min(len(cells[0]) + 2, columns // 3, columns - width_of(cell.rstrip())), 0) + cell
        else:
            line = f"{line}  {cell}" if line else cell
    return [*lines, line.rstrip()]
