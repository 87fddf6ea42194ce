"""What the command shows: its own lines, log lines above the bar, and one short line per evaluation."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from paceline.callbacks.progress import ProgressCallback
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.tf.trainer import TFTrainer
    from paceline.trainer import Trainer


def say(text: str) -> None:
    """Print at once; characters that the output cannot show become question marks."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


class AboveBars(logging.StreamHandler[Any]):
    """Writes log lines so that they do not tear a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm.std")  # not loaded: there is no bar
        if bars is None:
            super().emit(record)
        else:
            bars.tqdm.write(self.format(record), file=sys.stderr)


class EvaluationLines(TrainerCallback):
    """One line per evaluation, instead of every row of numbers (which log.jsonl keeps).

    Args:
        columns: name of a metric -> how it is called here.
        display: the progress display, whose bars the lines go above.
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
        cells = [f"{title} {value:.4g}" for title, value in values.items() if value is not None]
        if self.display.training_bar is not None:
            self.display.training_bar.write(f"step {state.global_step:>6,}   " + "   ".join(cells))


def show_evaluations(trainer: Trainer | TFTrainer, columns: dict[str, str]) -> None:
    """Show one line per evaluation of this Trainer, in place of each row of logs. Without a bar nothing is changed."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback):
            callback.write_logs = False
            trainer.add_callback(EvaluationLines(columns, callback))
            return
