"""Progress bars, a chart of the loss and a table of metrics in a notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.args.secrets import mask_text
from paceline.args.training import TrainingArguments
from paceline.callbacks.speed import TimeLeft, format_seconds, global_batch_size, length_of
from paceline.core.events import TrainerCallback, ignores_keywords
from paceline.core.optional import LateModule, is_installed, require
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    import html

    from paceline.callbacks import notebook_curve
else:
    html = LateModule("html")
    notebook_curve = LateModule("paceline.callbacks.notebook_curve")

NO_VALUE = "No log"
_UNSHOWN = re.compile(r"(^total_flos|^epoch|_runtime|_per_second|_preparation_time|_mem_.*)$")


@dataclass(eq=False)
class NotebookProgressBar:
    """One HTML progress bar.

    Args:
        total: number of steps; None if unknown.
        prefix: text before the bar.
        leave: True keeps the bar when it is full.
        parent: the tracker that shows this bar in its own display.
        width: width of the bar, in pixels.
        update_every: seconds between two drawings.
    """

    total: int | None
    prefix: str | None = None
    leave: bool = True
    parent: NotebookTrainingTracker | None = None
    width: int = 300
    update_every: float = 0.5

    def __post_init__(self) -> None:
        self.prefix = self.prefix or ""
        self.value: int | None = None
        self.comment: str | None = None
        self.seconds_left: float | None = None  # if a better estimate than the mean pace is known
        self.output: Any = None
        self._start_time = self._next_draw = time.perf_counter()
        self._start_value = 0

    @property
    def is_due(self) -> bool:
        """True if an update draws the bar."""
        return time.perf_counter() >= self._next_draw

    def update(self, value: int, force_update: bool = False, comment: str | None = None) -> None:
        """Sets the bar to `value`; draws it if due or forced."""
        if self.value is None:
            self._start_value = value
        self.value = value
        if comment is not None:
            self.comment = comment
        now = time.perf_counter()
        if force_update or now >= self._next_draw or (self.total is not None and value >= self.total):
            self._next_draw = now + self.update_every
            self.display()
            if not self.leave and self.total is not None and value >= self.total:
                self.close()

    def label(self) -> str:
        """Returns count, time, remaining time and speed, in brackets."""
        value = self.value or 0
        elapsed = time.perf_counter() - self._start_time
        done = value - self._start_value
        text = f"{value}/{self.total}" if self.total is not None else str(value)
        text += f" {format_seconds(elapsed)}"
        if done > 0 and elapsed > 0:
            if self.total is not None:
                left = self.seconds_left
                if left is None:
                    left = elapsed / done * max(self.total - value, 0)
                text += f" < {format_seconds(left)}"
            text += f", {done / elapsed:.2f} it/s"
        return f"[{text}, {self.comment}]" if self.comment else f"[{text}]"

    def render(self) -> str:
        """Returns the bar as HTML."""
        limits = "" if self.total is None else f" value='{self.value or 0}' max='{self.total}'"
        style = f"width:{self.width}px; height:20px; vertical-align:middle;"
        return (
            f"<div>{html.escape(self.prefix or '')} <progress{limits} style='{style}'></progress> {self.label()}</div>"
        )

    def display(self) -> None:
        """Draws the bar or its parent."""
        if self.parent is not None:
            self.parent.display()
        else:
            self.output = show_html(self.render(), self.output)

    def close(self) -> None:
        """Removes the bar."""
        if self.parent is None and self.output is not None:
            show_html("", self.output)


class NotebookTrainingTracker(NotebookProgressBar):
    """A progress bar with a chart of the loss and a table of metrics, and a second bar during an evaluation.

    Args:
        num_steps: number of training steps.
        column_names: first columns of the table; new metrics add more.
    """

    def __init__(self, num_steps: int, column_names: Sequence[str] | None = None) -> None:
        super().__init__(num_steps)
        self.columns: list[str] = list(column_names or ())
        self.rows: list[dict[str, Any]] = []
        self.curve = notebook_curve.LossCurve()
        self.child_bar: NotebookProgressBar | None = None

    @property
    def inner_table(self) -> list[list[Any]] | None:
        """The table as lists, column names first; None while it has no columns."""
        if not self.columns:
            return None
        return [self.columns, *([row.get(name, NO_VALUE) for name in self.columns] for row in self.rows)]

    def write_line(self, values: Mapping[str, Any]) -> None:
        """Adds a row; a row with the same first column as the last one is merged into it."""
        self.columns += [name for name in values if name not in self.columns]
        key = self.columns[0]
        if self.rows and key in values and self.rows[-1].get(key) == values[key]:
            self.rows[-1].update(values)
        else:
            self.rows.append(dict(values))

    def add_child(self, total: int | None, prefix: str | None = None, width: int = 300) -> NotebookProgressBar:
        """Adds a bar for an evaluation under the table."""
        self.child_bar = NotebookProgressBar(total, prefix=prefix, parent=self, width=width)
        return self.child_bar

    def remove_child(self) -> None:
        """Removes the bar of the evaluation."""
        self.child_bar = None
        self.display()

    def render(self) -> str:
        table = self.inner_table
        child = "" if self.child_bar is None else self.child_bar.render()
        return super().render() + self.curve.render() + ("" if table is None else html_table(table)) + child


class NotebookProgressCallback(TrainerCallback):
    """Shows training in a notebook: a bar, a chart of the loss that grows with each log, and a table with a row per
    evaluation (per log without evaluations).

    Without IPython the rows of the table are printed as text.

    Attributes:
        training_tracker: the display of the current training, or None.
        prediction_bar: the bar of the current evaluation or prediction, or None.
    """

    def __init__(self) -> None:
        self.training_tracker: NotebookTrainingTracker | None = None
        self.prediction_bar: NotebookProgressBar | None = None
        self._step_ended = 0.0
        self._time = TimeLeft(0, 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        columns = [_first_column(args), "Training Loss"]
        if args.eval_strategy != "no":
            columns.append("Validation Loss")
        self._step_ended = time.perf_counter()
        self._time = TimeLeft(state.global_step, self._step_ended)
        self.training_tracker = NotebookTrainingTracker(state.max_steps, columns)
        self.training_tracker.update(state.global_step, force_update=True)

    @ignores_keywords
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        tracker = self.training_tracker
        if tracker is not None:
            self._step_ended = time.perf_counter()
            tracker.total = state.max_steps
            tracker.comment = f"Epoch {state.epoch:.2f}/{state.num_train_epochs}"
            if tracker.is_due:
                self._time.mark(state.global_step, self._step_ended)
                self._expect(args, state)
            tracker.update(state.global_step)

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
            total = length_of(eval_dataloader)
            tracker = self.training_tracker
            self.prediction_bar = NotebookProgressBar(total) if tracker is None else tracker.add_child(total)
        if self.training_tracker is not None and self.prediction_bar.is_due:
            self._expect(args, state)
        self.prediction_bar.update((self.prediction_bar.value or 0) + 1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        tracker = self.training_tracker
        self._time.read(logs or {})
        if tracker is None or not logs or "loss" not in logs:
            return
        tracker.curve.add(state.global_step, logs["loss"])
        if args.eval_strategy == "no":
            self._add_row({tracker.columns[0]: state.global_step, "Training Loss": logs["loss"]})

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._close_prediction_bar()
        self._time.pause("eval", state.global_step, self._step_ended, time.perf_counter())
        self._expect(args, state)
        column = _first_column(args)
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        line: dict[str, Any] = {
            column: round(state.epoch, 2) if column == "Epoch" else state.global_step,
            "Training Loss": losses[-1] if losses else NO_VALUE,
        }
        for name, value in (metrics or {}).items():
            if not _UNSHOWN.search(name):
                line[_column_name(name)] = value
        if self.training_tracker is not None:
            self.training_tracker.curve.add(state.global_step, line.get("Validation Loss"), is_validation=True)
        self._add_row(line)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._time.pause("save", state.global_step, self._step_ended, time.perf_counter())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_tracker is not None:
            self.training_tracker.seconds_left = 0.0  # also of a run that a callback has stopped before its last step
            self.training_tracker.update(state.global_step, force_update=True)
            self.training_tracker = None

    def on_run_closed(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the display after an error, so that a later cell does not draw in this one."""
        self.on_train_end(args, state, control)
        self.prediction_bar = None

    def _expect(self, args: TrainingArguments, state: TrainerState) -> None:
        """Estimates the time that is left."""
        if self.training_tracker is not None:
            left = self._time.left(args, state, global_batch_size(args, state), time.perf_counter())
            self.training_tracker.seconds_left = left

    def _add_row(self, row: dict[str, Any]) -> None:
        if not is_installed("IPython"):
            print(", ".join(f"{name}: {_cell(value)}" for name, value in row.items()), flush=True)
        if self.training_tracker is not None:
            self.training_tracker.write_line(row)
            self.training_tracker.remove_child()
        else:
            show_html(html_table([list(row), list(row.values())]))

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


def html_table(table: Sequence[Sequence[Any]]) -> str:
    """Returns rows as an HTML table with the first row as its head; floats have 6 decimals."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table[0])
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in table[1:])
    return f"<table border='1' class='dataframe'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def show_html(code: str, handle: Any = None) -> Any:
    """Shows HTML in the notebook, replacing the display of `handle`. Returns its handle; None without IPython."""
    if not is_installed("IPython"):
        return None
    display = require("IPython.display", "notebook")
    if handle is None:
        return display.display(display.HTML(code), display_id=True)
    handle.update(display.HTML(code))
    return handle


def _first_column(args: TrainingArguments) -> str:
    return "Epoch" if args.eval_strategy == "epoch" else "Step"


def _column_name(metric: str) -> str:
    name = metric.removeprefix("eval_")
    return "Validation Loss" if name == "loss" else " ".join(part.capitalize() for part in name.split("_"))


def _cell(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else html.escape(mask_text(str(value)))
