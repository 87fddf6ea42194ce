"""The trials of a search while it runs: a table that is redrawn in a terminal, or a line for each event elsewhere."""

from __future__ import annotations

import datetime
import io
import logging
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.args.secrets import mask_text
from paceline.callbacks.progress import is_interactive
from paceline.cli.display import AboveBars, say
from paceline.cli.tables import draw_table
from paceline.cli.watch import columns_of_terminal, redraw
from paceline.core.events import TrainerCallback
from paceline.core.optional import LateModule
from paceline.core.terminal import fit, plain, shows_unicode
from paceline.report.page import duration
from paceline.report.status import read_status
from paceline.search.optuna_study import ERROR, RUN_NAME, STUDY_FILE, STUDY_NAME, close_storage, own_storage

if TYPE_CHECKING:
    import optuna
else:
    optuna = LateModule("optuna")

logger = logging.getLogger(__name__)

SECONDS = 1.0  # seconds between two reads of the study
HEAD = ("trial", "state", "objective", "step", "time", "parameters")
_WIDEST = {"parameters": 400}
_LEAST_ROWS = 3


class TrialsDisplay:
    """Shows the trials of the study in a folder from another thread, which only reads: an error in it costs no trial.

    Args:
        folder: the output folder of the search.
        seconds: the seconds between two reads of the study.

    Attributes:
        terminal: the output.
        is_moving: True if a table is redrawn in place.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder, self.seconds = folder, seconds
        self.terminal = sys.stdout
        self.is_moving = is_interactive(self.terminal)
        self._study: optuna.Study | None = None
        self._told = {trial.number: trial.state.name for trial in self._look()}  # nothing is said of earlier starts
        self._steps: dict[int, str] = {}  # of trials that have ended
        self._drawn = 0
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. The study must exist."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="trials", daemon=True)
            self._thread.start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Returns a context in which what is printed or logged is written above the table.

        At its end the last events are shown.
        """
        handlers = [one for one in logging.getLogger().handlers if isinstance(one, AboveBars)] if self.is_moving else []
        for handler in handlers:
            handler.around = self.above
        try:
            with ExitStack() as stack:
                if self.is_moving:
                    for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
                        stack.enter_context(redirect(stack.enter_context(closing(Above(self, stream)))))  # type: ignore[type-var]
                yield
        finally:
            for handler in handlers:
                handler.around = None
            self._stop()

    @contextmanager
    def above(self) -> Iterator[None]:
        """Returns a context in which text can be written; the table is drawn below it afterwards."""
        with self._lock:
            if self._drawn:
                self.terminal.write("\r\x1b[J")
                self.terminal.flush()
                self._drawn = 0
            yield

    def _stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._show()
        if self._drawn:
            self.terminal.write(f"\x1b[{self._drawn}B\r")  # below the last frame
            self.terminal.flush()
        if self._study is not None:
            close_storage(self._study._storage)
            self._study = None

    def _follow(self) -> None:
        while not self._is_over.wait(self.seconds):
            self._show()

    def _show(self) -> None:
        try:
            trials = self._look()
            with self._lock:
                if self.is_moving and trials:
                    self._draw(trials)
                elif not self.is_moving:
                    self._tell(trials)
        except Exception as error:  # a failing display must not end the search
            logger.info("The trials cannot be shown: %s", error)

    def _look(self) -> list[optuna.trial.FrozenTrial]:
        """Returns the trials of the study; none while it cannot be read."""
        try:
            if self._study is None:
                if not (self.folder / STUDY_FILE).is_file():
                    return []
                self._study = optuna.load_study(study_name=STUDY_NAME, storage=own_storage(self.folder))
            trials: list[optuna.trial.FrozenTrial] = self._study.get_trials(deepcopy=False)
            return trials
        except Exception as error:  # locked, or not a study: the search itself reports it
            logger.info("The study cannot be read: %s", error)
            return []

    def _draw(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
        room = max(shutil.get_terminal_size().lines - 3, _LEAST_ROWS)
        lines = table_of(chosen(trials, room), [self._step_of(trial) for trial in chosen(trials, room)])
        if len(trials) > room:
            lines.append(f"and {len(trials) - room} more trials")
        is_unicode = shows_unicode(self.terminal)
        lines = [fit(plain(mask_text(line)), columns_of_terminal(), is_unicode) for line in lines]
        redraw(lines, self.terminal)
        self._drawn = len(lines)

    def _tell(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
        for trial in trials:
            state = trial.state.name
            is_named = trial.state.is_finished() or RUN_NAME in trial.user_attrs  # its hyperparameters are known
            if self._told.get(trial.number) != state and state != "WAITING" and is_named:
                self._told[trial.number] = state
                say(line_of(trial))

    def _step_of(self, trial: optuna.trial.FrozenTrial) -> str:
        """Returns the last known optimizer step of a trial, of all its steps."""
        if trial.number in self._steps:
            return self._steps[trial.number]
        name = trial.user_attrs.get(RUN_NAME)
        if name is None:
            return "-"
        try:
            status = read_status(self.folder / name)
        except Exception:  # its files are being written
            return "-"
        step = f"{status.step:,}" + (f"/{status.max_steps:,}" if status.max_steps else "")
        if trial.state.is_finished():
            self._steps[trial.number] = step
        return step


class Above(io.TextIOBase):
    """A stream whose lines are written above the table; the rest of a line waits for its end.

    Args:
        display: the display of the table.
        stream: the stream that gets the lines.
    """

    def __init__(self, display: TrialsDisplay, stream: TextIO) -> None:
        self._display, self._stream, self._rest = display, stream, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._display.above():
            lines, end, self._rest = (self._rest + text).rpartition("\n")
            if end:
                self._stream.write(lines + end)
                self._stream.flush()
        return len(text)

    def close(self) -> None:
        """Writes the rest of the last line."""
        if self._rest:
            self.write("\n")


class Beginning(TrainerCallback):
    """Starts the display with the first trial, when the study exists.

    Args:
        display: the display.
    """

    def __init__(self, display: TrialsDisplay) -> None:
        self.display = display

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.display.start()

    def __deepcopy__(self, memo: Any) -> Beginning:
        return self


def table_of(trials: Sequence[optuna.trial.FrozenTrial], steps: Sequence[str]) -> list[str]:
    """Returns the lines of a table of trials with their steps."""
    rows = [
        (str(trial.number), trial.state.name.lower(), value_of(trial), step, seconds_of(trial), params_text(trial))
        for trial, step in zip(trials, steps, strict=True)
    ]
    return draw_table(HEAD, rows, _WIDEST)


def chosen(trials: Sequence[optuna.trial.FrozenTrial], room: int) -> list[optuna.trial.FrozenTrial]:
    """Returns at most `room` trials in their order: first those that run, then the newest that have begun."""
    rank = {"RUNNING": 0, "WAITING": 2}
    by_weight = sorted(trials, key=lambda trial: (rank.get(trial.state.name, 1), -trial.number))
    return sorted(by_weight[:room], key=lambda trial: trial.number)


def line_of(trial: optuna.trial.FrozenTrial) -> str:
    """Returns a line about a trial that has begun or ended."""
    error = f"  ({trial.user_attrs[ERROR]})" if ERROR in trial.user_attrs and trial.state.is_finished() else ""
    text = f"trial {trial.number:<4} {trial.state.name.lower():<9} {value_of(trial):>12}   {params_text(trial)}{error}"
    return plain(text).rstrip()


def value_of(trial: optuna.trial.FrozenTrial) -> str:
    """Returns the objective of a trial, or that of its last evaluation while it runs; "-" without one."""
    if trial.state.is_finished():
        return f"{trial.value:.6g}" if trial.value is not None else "-"
    reported = trial.intermediate_values
    return f"{reported[max(reported)]:.6g}" if reported else "-"


def seconds_of(trial: optuna.trial.FrozenTrial) -> str:
    """Returns how long a trial has run, as text."""
    if trial.datetime_start is None:
        return "-"
    end = trial.datetime_complete or datetime.datetime.now()
    return duration(max((end - trial.datetime_start).total_seconds(), 0.0)) or "-"


def params_text(trial: optuna.trial.FrozenTrial) -> str:
    """Returns the hyperparameters of a trial that can differ between trials."""
    spaces = trial.distributions
    varied = {name: value for name, value in trial.params.items() if name not in spaces or not spaces[name].single()}
    return "  ".join(f"{name}={shown(value)}" for name, value in varied.items())


def shown(value: Any) -> str:
    """Returns a hyperparameter as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
