"""Reporter for TensorBoard. It uses torch's writer, `EventWriter` without torch, or tensorboardX."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.args.places import output_folder, placed
from paceline.args.secrets import mask_text
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import CardReporter, MakeCard, grouped, run_name_of
from paceline.callbacks.reporters.event_files import EventWriter
from paceline.core.metrics import jsonable
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.core.media import Media


class TensorBoardCallback(CardReporter):
    """Writes scalars (and strings as text) under `train/`, `eval/` and `test/`, and the arguments as text.

    The folder is `args.logging_dir` if set, else the environment variable TENSORBOARD_LOGGING_DIR, else
    `<output_dir>/runs/<date>_<host>` (with the suffix `_<run_name>`). A run resumed into the same folder hides the
    entries after its checkpoint.

    Args:
        tb_writer: a writer to use, with `add_scalar`, `add_text`, `flush`, `close`; by default one is created.

    Raises:
        ImportError: neither tensorboard nor tensorboardX is installed.
    """

    requires = ("tensorboard", "tensorboardX")

    def __init__(self, tb_writer: Any = None) -> None:
        if tb_writer is None and not any(is_installed(module) for module in self.requires):
            require("tensorboard", "tensorboard")  # raises with the extra to install
        self.tb_writer = tb_writer
        self.logging_dir: str | None = None
        self._trial: str | None = None  # that `logging_dir` belongs to
        self._purge_step: int | None = None  # entries from this step on, after the checkpoint, are hidden

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self.tb_writer is not None and self.logging_dir is not None and self._trial != state.trial_name:
            self.on_train_end(args, state, control)  # of a trial that an error ended
        writer = self._open(args, state)
        writer.add_text("args", args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            writer.add_text("model_config", mask_text(config.to_json_string()))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        writer = self._open(args, state)
        for name, value in grouped(logs).items():
            plain = jsonable(value)
            if isinstance(plain, (bool, int, float)):
                writer.add_scalar(name, plain, state.global_step)
            else:
                writer.add_text(name, mask_text(str(plain)), state.global_step)
        writer.flush()

    def on_media(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, media: Media, **kwargs: Any
    ) -> None:
        """Writes a figure as an image, and a table as text."""
        if not state.is_world_process_zero:
            return
        writer = self._open(args, state)
        if media.is_figure:
            picture = require("PIL.Image", "plots").open(media.path).convert("RGB")
            writer.add_image(media.name, np.asarray(picture), media.step, dataformats="HWC")
        else:
            writer.add_text(media.name, media.as_markdown(), media.step)
        writer.flush()

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Writes the model card as text."""
        self._open(args, state).add_text("model_card", make_card(), state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None

    def _open(self, args: TrainingArguments, state: TrainerState) -> Any:
        if self.tb_writer is None:
            if self.logging_dir is None or self._trial != state.trial_name:  # each trial has its own folder
                self.logging_dir, self._trial = logging_folder(args, state), state.trial_name
            self._purge_step = state.global_step + 1 if state.global_step else None
            self._init_summary_writer(args)
        return self.tb_writer

    def _init_summary_writer(self, args: TrainingArguments, log_dir: str | None = None) -> None:
        """Creates the writer. Subclasses may create another writer or pass a folder."""
        folder = self.logging_dir if log_dir is None else log_dir
        self.tb_writer = self._SummaryWriter(log_dir=folder, purge_step=self._purge_step)

    @property
    def _SummaryWriter(self) -> Any:
        """The writer's class."""
        return _writer_class()


def logging_folder(args: TrainingArguments, state: TrainerState) -> str:
    """Returns the folder of the event files."""
    chosen = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if chosen and not state.is_hyper_param_search:
        return str(placed(args, Path(chosen).expanduser()))
    name = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
    run_name = re.sub(r"[^\w.-]+", "-", run_name_of(args) or "")
    folder = output_folder(args) / "runs" / (f"{name}_{run_name}" if run_name else name)
    if state.is_hyper_param_search and state.trial_name is not None:
        folder = folder / state.trial_name
    return str(folder)


def _writer_class() -> Any:
    if is_installed("tensorboard"):
        return require("torch.utils.tensorboard", "tensorboard").SummaryWriter if is_installed("torch") else EventWriter
    return require("tensorboardX", "tensorboard").SummaryWriter
