"""Shows progress: a bar in a terminal, periodic lines if the output is a file."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paceline.args.training import TrainingArguments
from paceline.callbacks.memory import describe_memory
from paceline.callbacks.printer import readable_row
from paceline.callbacks.speed import Speedometer, TimeLeft, format_seconds, length_of, speedometer_of
from paceline.core.events import TrainerCallback, ignores_keywords
from paceline.core.optional import LateModule, require
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.callbacks import bar_text, terminal_bar
    from paceline.core import terminal
else:  # a run without a terminal needs none of them
    bar_text = LateModule("paceline.callbacks.bar_text")
    terminal_bar = LateModule("paceline.callbacks.terminal_bar")
    terminal = LateModule("paceline.core.terminal")

REFRESH_SECONDS = 0.5
MOST_LOSSES = 256  # logged losses that the curve shows


class Bar(Protocol):
    """The part of tqdm's interface that is used here; `LineBar` implements it too."""

    total: Any
    n: Any

    def update(self, n: int = 1) -> Any: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any: ...
    def write(self, s: str) -> Any: ...
    def refresh(self) -> Any: ...
    def close(self) -> Any: ...


def make_bar(
    total: int | None,
    title: str,
    unit: str,
    initial: int = 0,
    leave: bool = True,
    seconds_between_lines: float = 30.0,
    draws_itself: bool = True,
) -> Bar:
    """Returns a bar on a terminal, and a `LineBar` elsewhere. One on a terminal may be drawn by `refresh` only."""
    bar: Bar
    if not is_interactive(sys.stderr):
        return LineBar(total, title, unit, initial, leave, seconds_between_lines)
    if is_notebook():
        tqdm = require("tqdm.auto", "progress").tqdm
        bar = tqdm(total=total, desc=title, unit=unit, initial=initial, leave=leave, dynamic_ncols=True)
    else:
        bar = terminal_bar.make_terminal_bar(total, title, unit, initial, leave, draws_itself)
    return bar


class ProgressCallback(TrainerCallback):
    """Shows step, loss, learning rate, tokens (or samples) per second, remaining time and memory, and each log row.

    The display is a bar on a terminal, and a line every `seconds_between_lines` elsewhere (a file, a pipe), so that the
    logs of a cluster job stay readable. Only rank 0 displays anything.

    Args:
        max_str_len: longer strings in a log row are replaced by their length.
        seconds_between_lines: interval between lines without a terminal.
        write_logs: True also writes each log row as a line above the bar.

    Attributes:
        training_bar: the bar of the training, or None.
        prediction_bar: the bar of the current evaluation or prediction, or None.
    """

    reads_checkpoint = False

    def __init__(self, max_str_len: int = 100, seconds_between_lines: float = 30.0, write_logs: bool = True) -> None:
        self.max_str_len = max_str_len
        self.seconds_between_lines = seconds_between_lines
        self.write_logs = write_logs
        self.training_bar: Bar | None = None
        self.prediction_bar: Bar | None = None
        self.current_step = 0
        self._optimizer: Any = None
        self._loss, self._rate = "", ""
        self._losses: list[float] = []
        self._speed = Speedometer(1)
        self._time = TimeLeft(0, 0.0)
        self._next_refresh = self._step_ended = 0.0
        self._memory, self._next_memory = "", 0.0
        self._lines: Any = None  # writes lines of the program above the bars
        self._rows: Any = None
        self._details: Any = None  # the line below the bar on a terminal

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.current_step = state.global_step
        self._close_bars()  # of an interrupted run
        if not state.is_world_process_zero:
            return
        self._optimizer, self._loss, self._rate = optimizer, "", ""
        self._losses = []
        self._speed = speedometer_of(args, state)
        self._speed.mark(state)
        self._step_ended, self._next_refresh = time.perf_counter(), 0.0
        self._time = TimeLeft(state.global_step, self._step_ended)
        self.training_bar = make_bar(
            state.max_steps,
            "train",
            "step",
            initial=state.global_step,
            seconds_between_lines=self.seconds_between_lines,
            draws_itself=False,
        )
        self._rows = None
        if _is_terminal_bar(self.training_bar):
            self._rows, self._details = terminal_bar.AlignedRows(), terminal_bar.DetailLine()
        self._guard(self.training_bar)

    @ignores_keywords
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        bar = self.training_bar
        if bar is None:
            return
        step = state.global_step
        self._step_ended = now = time.perf_counter()
        if now >= self._next_refresh or step >= state.max_steps - 1:
            self._show(bar, args, state)
        else:
            bar.update(step - self.current_step)
            self.current_step = step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        bar = self.training_bar
        if bar is None or not logs:
            return
        self._time.read(logs)
        if isinstance(logs.get("loss"), (int, float)):
            self._loss = f"loss {logs['loss']:.4g}"
            self._losses = [*self._losses[-MOST_LOSSES:], float(logs["loss"])]
        if self.write_logs:
            row = readable_row(logs, state.global_step, self.max_str_len)
            text = str(row) if self._rows is None else self._rows.format(row, columns_of(bar))
            write_above(bar, text)
        self._show(bar, args, state)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self.prediction_bar is None:
            is_alone = self.training_bar is None
            self.prediction_bar = make_bar(
                length_of(eval_dataloader),
                "evaluate",
                "batch",
                leave=is_alone,
                seconds_between_lines=self.seconds_between_lines,
                draws_itself=is_alone,
            )
            self._guard(self.prediction_bar)
            self._next_refresh = 0.0
        self.prediction_bar.update(1)
        if self._details is not None and time.perf_counter() >= self._next_refresh:
            self._show(self.training_bar, args, state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()
        self._speed.restart(state)
        self._time.pause("eval", state.global_step, self._step_ended, time.perf_counter())

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._speed.restart(state)
        self._time.pause("save", state.global_step, self._step_ended, time.perf_counter())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self._show(self.training_bar, args, state, has_ended=True)
        self._close_bars()
        self._optimizer = None

    def on_run_closed(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Closes the bars after an error."""
        self._close_bars()
        self._optimizer = None

    # ---- the display

    def _show(self, bar: Any, args: TrainingArguments, state: TrainerState, has_ended: bool = False) -> None:
        """Updates the text after the bar, at most every half second, so that its cost is negligible."""
        now = time.perf_counter()
        self._next_refresh = now + REFRESH_SECONDS
        if now >= self._next_memory:
            self._memory, self._next_memory = describe_memory(), now + 4 * REFRESH_SECONDS
        self._speed.mark(state)
        self._time.mark(state.global_step, self._step_ended)
        bar.total = state.max_steps  # live: a callback may have changed it
        if state.global_step < state.max_steps:  # after the last step the optimizer has the rate of a step never run
            self._rate = _learning_rate(self._optimizer)
        speed = self._speed.describe()
        # also of a run that a callback has stopped before its last step
        left = 0.0 if has_ended else self._time.left(args, state, self._speed.samples_per_step, now)
        if isinstance(bar, LineBar):
            bar.seconds_left = left
        parts = [state.phase, self._loss, self._rate, speed, self._memory]
        bar.set_postfix_str(", ".join(part for part in parts if part), refresh=False)
        bar.update(state.global_step - self.current_step)
        self.current_step = state.global_step
        if _is_terminal_bar(bar):
            self._draw(bar, state, speed, left)
        elif not isinstance(bar, LineBar):
            bar.refresh()

    def _draw(self, bar: Any, state: TrainerState, speed: str, left: float | None) -> None:
        """Draws the bars of a terminal from the first line down, because it may have wrapped the lines anew."""
        epoch = "" if state.epoch is None else f"epoch {state.epoch:.3g}"
        position = {"phase": state.phase or "", "epoch": epoch, "pace": self._speed.describe_pace()}
        values = {"loss": self._loss, "rate": self._rate, "speed": speed, "memory": self._memory}
        times = f"{format_seconds(bar.format_dict['elapsed'])}<{'?' if left is None else format_seconds(left)}"
        columns = columns_of(bar)
        line = bar_text.position_line(f"{bar.desc}: {bar.n}/{bar.total}", times, position, columns)
        bar.bar_format = f"{{desc}}: {{n_fmt}}/{{total_fmt}}{line}"
        bar.refresh()
        self._details.show(bar_text.value_line(values, self._losses, columns, terminal.shows_unicode(bar.fp)))
        if self.prediction_bar is not None:
            self.prediction_bar.refresh()

    def _guard(self, bar: Bar) -> None:
        """Starts to write what the program prints above the bar."""
        if self._lines is None and _is_terminal_bar(bar):
            self._lines = terminal_bar.LinesAboveBars()
            self._lines.begin()

    def _release(self) -> None:
        if self._lines is not None:
            self._lines.end()
            self._lines = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            if self.training_bar is None:
                self._release()
            self.prediction_bar.close()
            self.prediction_bar = None

    def _close_bars(self) -> None:
        self._release()
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None
        if self._details is not None:
            self._details.close()
            self._details = None


@dataclass(eq=False)
class LineBar:
    """A progress display for outputs without cursor control: one line per `seconds`, and one at the end.

    Args:
        total: number of steps; None if unknown.
        title: the title of the display.
        unit: the unit of `total`.
        initial: steps done before.
        leave: True lets `close` write a last line.
        seconds: interval between two lines.
        stream: the output stream; standard error by default.
    """

    total: int | None
    title: str
    unit: str
    initial: int = 0
    leave: bool = True
    seconds: float = 30.0
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        self.n = self.initial
        self.stream = sys.stderr if self.stream is None else self.stream
        self.postfix = ""
        self.seconds_left: float | None = None  # if a better estimate than the mean pace is known
        self._start = time.perf_counter()
        self._next_line = self._start + self.seconds

    def update(self, n: int = 1) -> None:
        """Adds `n` to the count and writes a line if due."""
        self.n += n
        if time.perf_counter() >= self._next_line:
            self.refresh()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Sets the text after the count of the next lines."""
        self.postfix = s
        if refresh:
            self.refresh()

    def write(self, s: str) -> None:
        """Writes another line to the standard output, as tqdm does."""
        with suppress(OSError):  # a closed pipe or a full disk behind the output does not end the training
            terminal.show(s)

    def refresh(self) -> None:
        """Writes a line now."""
        now = time.perf_counter()
        self._next_line = now + self.seconds
        elapsed = now - self._start
        done = f"{self.n}/{self.total}" if self.total else f"{self.n}"
        times = format_seconds(elapsed)
        if self.total and self.n > self.initial:
            left = self.seconds_left
            if left is None:
                left = elapsed / (self.n - self.initial) * max(self.total - self.n, 0)
            times += f"<{format_seconds(left)}"
        line = f"{self.title}: {self.unit} {done} [{times}] {self.postfix}"
        with suppress(OSError):
            terminal.show(line.rstrip(), self.stream)

    def close(self) -> None:
        """Writes the last line."""
        if self.leave and self.n > self.initial:
            self.refresh()


def write_above(bar: Bar, text: str) -> None:
    """Writes lines to the standard output, above a bar. A closed pipe or a full disk behind it ends no training."""
    with suppress(OSError):
        bar.write(terminal.encodable(text, sys.stdout))


def columns_of(bar: Any) -> int:
    """Returns the columns that a bar of tqdm may fill."""
    measure = getattr(bar, "dynamic_ncols", None)  # a function of tqdm's, if the width may change
    return (measure(bar.fp)[0] if callable(measure) else None) or 79


def _is_terminal_bar(bar: Any) -> bool:
    return hasattr(bar, "bar_format") and not is_notebook()


def is_notebook() -> bool:
    """True if this code runs in a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def is_interactive(stream: Any) -> bool:
    """True if `stream` can show a moving bar: a terminal with a size (containers may report 0), or a notebook."""
    if is_notebook():
        return True
    try:
        return bool(stream.isatty()) and min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError, ValueError):
        return False


def _learning_rate(optimizer: Any) -> str:
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    return f"lr {rate:.3g}" if isinstance(rate, float) else ""  # reading a tensor would synchronize
