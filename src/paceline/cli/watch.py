"""`paceline watch RUN`: a dashboard of a live or finished run in the terminal. Does not import torch."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.args.secrets import mask_text
from paceline.callbacks.progress import is_interactive
from paceline.cli.errors import UsageError
from paceline.cli.options import Known, parse_options
from paceline.core.record import jsonable
from paceline.core.terminal import encodable, fit, gauge, plain, show, shows_unicode, sparkline, width_of
from paceline.report.page import duration
from paceline.report.run_table import RUNNING
from paceline.report.status import RunStatus, read_status
from paceline.report.versions import version_of

_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_LABEL = 12  # columns of the names at the left
_MOST_WARNINGS = 4
_LEAST_COLUMNS = 20


@dataclass(frozen=True)
class Options:
    """The command line: the run's folder, one frame only, as JSON, and the seconds between two looks."""

    folder: Path
    is_once: bool
    is_json: bool
    every: float


def run(words: Sequence[str]) -> int:
    """Shows a run until it ends.

    Returns:
        0; 1 if the run failed, or was removed meanwhile.

    Raises:
        UsageError: the command line is wrong, or the folder holds no run.
    """
    options = read_options(words)
    try:
        status = read_status(options.folder)
    except _UNREADABLE as error:
        raise UsageError(str(error) or type(error).__name__) from error
    if options.is_json:
        print(mask_text(json.dumps(to_json(status), indent=2)))
        return 0
    if options.is_once or status.state != RUNNING:
        _print(draw(status, columns_of_terminal(), shows_unicode(sys.stdout)))
    else:
        try:
            status = _follow(options, status)
        except _UNREADABLE as error:
            show(plain(f"The run cannot be read any more: {mask_text(str(error))}"))
            return 1
        except KeyboardInterrupt:
            print("The run goes on; watching has ended.")
            return 0
    return 1 if status.state == "failed" else 0


def read_options(words: Sequence[str]) -> Options:
    """Returns the options.

    Raises:
        UsageError: a word is unknown, missing or out of range.
    """
    given = parse_options(words, Known(("RUN",), {"once": True, "json": True, "every": False}))
    if given.arguments:
        raise UsageError(f"watch takes --once, --json and --every, not --{next(iter(given.arguments))}")
    if not given.positional:
        raise UsageError("watch needs the folder of a run: paceline watch RUN")
    try:
        every = float(given.own.get("every", 1.0))
    except ValueError:
        every = math.nan
    if not 0.1 <= every <= 3600:
        raise UsageError(f"--every {given.own['every']}: give seconds from 0.1 to 3600")
    return Options(Path(given.positional[0]), "once" in given.own, "json" in given.own, every)


def to_json(status: RunStatus) -> dict[str, Any]:
    """Returns a status as JSON values."""
    values = {**asdict(status), "folder": str(status.folder), "best": status.best[1], "metric": status.best[0]}
    found: dict[str, Any] = jsonable(values)
    return found


def draw(status: RunStatus, columns: int, is_unicode: bool = True) -> list[str]:
    """Returns the lines of a dashboard, each at most `columns` wide; texts are made plain, secrets masked."""
    room = max(columns, _LEAST_COLUMNS) - _LABEL
    steps = f"{status.step:,}" + (f" of {status.max_steps:,}" if status.max_steps else "")
    share = status.step / status.max_steps if status.max_steps else None
    rows = [("state", status.state + _since(status))]
    if share is not None:
        percent = f" {min(share, 1.0):.0%}"
        bar = gauge(share, min(max(room - len(steps) - len(percent) - 1, 0), 40), is_unicode)
        steps = f"{steps}{percent} {bar}" if len(bar) >= 5 else f"{steps}{percent}"
    rows.append(("step", steps))
    rows.append(("epoch", "" if status.epoch is None else f"{status.epoch:.4g}"))
    rows.append(("time", _times(status)))
    rows.append(("loss", _curve(status, room, is_unicode)))
    rows.append(("rate", "" if status.learning_rate is None else f"{status.learning_rate:.4g}"))
    rows.append(("grad norm", "" if status.grad_norm is None else f"{status.grad_norm:.4g}"))
    rows.append(("speed", _speeds(status)))
    rows.append(("evaluation", _evaluation(status)))
    if status.best[1] is not None:
        rows.append(("best", f"{status.best[0] or 'metric'} {status.best[1]:.6g}"))
    total = sum(status.times.values())
    for index, (name, seconds) in enumerate(list(status.times.items())[:5]):
        cells = min(max(room - 32, 0), 30)
        filled = gauge(seconds / total, cells, is_unicode) if cells >= 5 else ""
        text = f"{name:<14}{seconds / total:>4.0%} {duration(seconds):>8} {filled}"
        rows.append(("activities" if not index else "", text.rstrip()))
    rows += [("warning", warning) for warning in status.warnings[:_MOST_WARNINGS]]
    if len(status.warnings) > _MOST_WARNINGS:
        rows.append(("", f"and {len(status.warnings) - _MOST_WARNINGS} more warnings (--json lists all)"))
    lines = [
        plain(mask_text(status.name)),
        *(f"{name:<{_LABEL}}{plain(mask_text(text))}" for name, text in rows if text),
    ]
    return [fit(line, columns, is_unicode) for line in lines]


def line_of(status: RunStatus) -> str:
    """Returns the status in one line, for outputs that are no terminal."""
    parts = [f"step {status.step}" + (f"/{status.max_steps}" if status.max_steps else "")]
    parts += [] if status.epoch is None else [f"epoch {status.epoch:.4g}"]
    parts += [] if status.loss is None else [f"loss {status.loss:.4g}"]
    parts += [] if status.learning_rate is None else [f"lr {status.learning_rate:.3g}"]
    parts += [_speeds(status)] if _speeds(status) else []
    parts += [f"{duration(status.seconds_left)} left"] if status.seconds_left is not None else []
    return plain(mask_text(f"{status.state}: " + ", ".join(parts)))


def _follow(options: Options, status: RunStatus) -> RunStatus:
    """Shows frames, or lines, until the run has ended. Returns its last status."""
    is_moving = is_interactive(sys.stdout)
    version, drawn, last_line = version_of(options.folder), 0, ""
    looked = time.monotonic()
    try:
        while True:
            if is_moving:
                lines = draw(status, columns_of_terminal(), shows_unicode(sys.stdout))[
                    : max(shutil.get_terminal_size().lines - 1, 1)
                ]
                redraw(lines)
                drawn = len(lines)
            elif line_of(status) != last_line and (status.state != RUNNING or version or not last_line):
                last_line = line_of(status)
                print(last_line, flush=True)
            if status.state != RUNNING:
                return status
            time.sleep(options.every)
            found = version_of(options.folder)
            if found != version or is_moving or time.monotonic() - looked > 60:
                looked = time.monotonic()
                status = read_status(options.folder)
            version = found
    finally:
        if drawn:
            redraw(lines)  # the terminal has echoed ^C over it
            sys.stdout.write(f"\x1b[{drawn}B\r")  # below the last frame
            sys.stdout.flush()


def redraw(lines: Sequence[str], stream: TextIO | None = None) -> None:
    """Replaces the last frame. The cursor rests at its first column, where it stays when the terminal is resized.

    Args:
        lines: the frame.
        stream: the terminal; by default the standard output.
    """
    stream = sys.stdout if stream is None else stream
    text = encodable("\n".join(lines), stream)  # a name may hold what the terminal cannot show
    stream.write(f"\r\x1b[J{text}\n\x1b[{len(lines)}A")
    stream.flush()


def _print(lines: Sequence[str]) -> None:
    show("\n".join(lines))


def columns_of_terminal() -> int:
    """Returns the number of columns that a line may have."""
    return max(shutil.get_terminal_size((100, 24)).columns - 1, _LEAST_COLUMNS)


def _since(status: RunStatus) -> str:
    quiet = status.since_progress
    return "" if quiet is None or quiet < 60 else f" (last progress {duration(quiet)} ago)"


def _times(status: RunStatus) -> str:
    parts = [f"{duration(status.seconds)}" if status.seconds is not None else ""]
    parts.append(f"{duration(status.seconds_left)} left" if status.seconds_left is not None else "")
    return ", ".join(part for part in parts if part)


def _curve(status: RunStatus, room: int, is_unicode: bool) -> str:
    loss = "" if status.loss is None else f"{status.loss:.4g}"
    curve = sparkline(status.losses, min(room - width_of(loss) - 1, 60), is_unicode)
    return f"{loss} {curve}".strip()


def _speeds(status: RunStatus) -> str:
    pairs = ((status.steps_per_second, "steps/s"), (status.samples_per_second, "samples/s"))
    if status.tokens_per_second is not None:
        pairs = (pairs[0], (status.tokens_per_second, "tokens/s"))
    return ", ".join(
        f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}" for value, unit in pairs if value
    )


def _evaluation(status: RunStatus) -> str:
    values = dict(status.evaluation)
    step = values.pop("step", None)
    shown = [
        f"{name.removeprefix('eval_')} {value:.4g}"
        for name, value in values.items()
        if _is_shown(value) and not name.endswith(("_runtime", "_per_second"))
    ]
    return f"{', '.join(shown)} (step {step:,})" if shown and step is not None else ""


def _is_shown(value: object) -> bool:
    """True for a number, except for integers of a damaged file that no float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)
