"""Terminal output of the commands: printed lines, log lines above the bar, and one short line per evaluation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

from paceline.args.secrets import mask_text
from paceline.callbacks.progress import ProgressCallback, write_above
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.terminal import show, to_show, without_controls

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer
    from paceline.tensorflow.trainer import TFTrainer

NUMBER = 9  # columns of most numbers with four digits


def say(text: str) -> None:
    """Prints a text for people, wrapped at spaces on a terminal. Secrets are masked, control characters spaces."""
    show(without_controls(mask_text(text)))


def silent(text: str) -> None:
    """Prints nothing: the first of several processes prints for all."""


def output_for(is_json: bool) -> AbstractContextManager[Any]:
    """Returns the context in which a job is built and run: with JSON, what its code prints goes to the error output."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


class AboveBars(logging.StreamHandler[Any]):
    """Writes log lines above progress bars.

    Attributes:
        around: returns the context in which a line is written, for another display than a bar; None without one.
    """

    around: Callable[[], AbstractContextManager[None]] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if _is_shown_by_library(record.name):
            return
        with nullcontext() if self.around is None else self.around():
            self._write(record)

    def format(self, record: logging.LogRecord) -> str:
        return to_show(super().format(record), sys.stderr)

    def _write(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm.std")  # if tqdm is not imported, there is no bar
        if bars is None:
            super().emit(record)
        else:
            bars.tqdm.write(self.format(record), file=sys.stderr)


def _is_shown_by_library(name: str) -> bool:
    """True if a logger below the root writes its records to the terminal itself, as huggingface_hub's does."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.parent is not None:
        if any(getattr(handler, "stream", None) in (sys.stderr, sys.stdout) for handler in logger.handlers):
            return True
        logger = logger.parent
    return False


class EvaluationLines(TrainerCallback):
    """Prints one line per evaluation instead of every row of metrics (which log.jsonl keeps).

    Args:
        columns: maps metrics to displayed names.
        display: the progress display whose bars the lines are printed above.
    """

    def __init__(self, columns: dict[str, str], display: ProgressCallback) -> None:
        self.columns = columns
        self.display = display
        self._loss: float | None = None

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._loss = logs["loss"]

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        values = {"training loss": self._loss} | {title: metrics.get(key) for key, title in self.columns.items()}
        cells = [f"{title} {value:<{NUMBER}.4g}" for title, value in values.items() if value is not None]
        if self.display.training_bar is not None:
            write_above(self.display.training_bar, f"step {state.global_step:>6,}   {'  '.join(cells)}".rstrip())


def show_evaluations(trainer: Trainer | TFTrainer, columns: dict[str, str]) -> None:
    """Shows one line per evaluation of a Trainer instead of each row of logs. Has no effect without a bar."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback):
            callback.write_logs = False
            trainer.add_callback(EvaluationLines(columns, callback))
            return
