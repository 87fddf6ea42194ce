"""TensorFlow checkpoints: variables in the format of `tf.train.Checkpoint`, the rest as JSON, published atomically.

A checkpoint is a folder `checkpoint-STEP` with

    variables.index, variables.data-*   model, optimizer, generators: `tf.train.Checkpoint(model=...)` reads them
    trainer_state.json, log_history/    as on the torch side
    progress.json                       position in the data, callbacks, random state, arguments
    manifest.json                       size and SHA-256 of each file

and the files that the model's `save_pretrained` writes, if it has that method.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint import folders
from paceline.checkpoint.log_blocks import StateFile, is_last_checkpoint
from paceline.checkpoint.manifest import KnownFile
from paceline.checkpoint.retention import Retention, rotate
from paceline.checkpoint.space import Place
from paceline.core.callback_states import callback_states, restore_callback_states
from paceline.core.events import CallbackHandler
from paceline.core.lineage import PROGRESS_FILE, RunMark, is_part, mark_of
from paceline.core.log_text import LogText
from paceline.core.state import TrainerControl, TrainerState, export_states
from paceline.tensorflow.checkpoint.resume_state import RunInProgress, describe_progress
from paceline.tensorflow.checkpoint.variables import num_bytes, optimizer_variables, restore_variables, write_variables
from paceline.tensorflow.framework import tf
from paceline.tensorflow.optim.following import FollowingSchedule
from paceline.tensorflow.optim.schedules import StepSchedule
from paceline.tensorflow.randomness import restore_random

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, and values of the state in it.

    Attributes:
        folder: the checkpoint's folder.
        best_model_checkpoint: the run's best checkpoint, possibly this one.
        stateful_callbacks: the exported states of the callbacks.
    """

    folder: Path
    best_model_checkpoint: str | None
    stateful_callbacks: dict[str, Any]


class SavedBeside(Protocol):
    """Writes further files into a checkpoint."""

    def num_bytes(self) -> int:
        """Returns the approximate size of the files in bytes."""
        ...

    def write(self, folder: Path) -> None:
        """Writes the files."""
        ...


@dataclass(eq=False, kw_only=True)
class Checkpointer:
    """Writes the checkpoints of a run, and restores them.

    Args:
        folder: the output folder.
        name_checkpoint: returns the text of a checkpoint's folder in the state: relative if `output_dir` is.
        model: its variables are saved, and also the files of its `save_pretrained` if it has that method.
        optimizer: its variables are saved too.
        schedule: the learning-rate schedule; saved if it depends on evaluations.
        processing_class: saved with the model, if it has `save_pretrained`.
        callback_handler: holds the callbacks whose states are saved.
        arguments: options by name, as plain values; recorded in the checkpoint.
        retention: decides which checkpoints are kept.
        all_rows: `save_full_log_history`.
        is_model_only: the optimizer is not saved.
        with_arguments: callbacks are restored with the arguments of their constructors.
        is_writer: this process writes the files; the others only take part in reading the variables.
        process_index: rank of this process.
        averages: the averages of the weights, which the model holds while it is saved; None without them.
    """

    folder: Path
    name_checkpoint: Callable[[Path], str] = str
    model: Any
    optimizer: Any
    schedule: Any
    processing_class: Any
    callback_handler: CallbackHandler
    arguments: Mapping[str, Any]
    retention: Retention
    all_rows: bool = False
    is_model_only: bool = False
    with_arguments: bool = False
    is_writer: bool = True
    process_index: int = 0
    averages: SavedBeside | None = None

    # ---- writing

    def save(
        self, state: TrainerState, control: TrainerControl, mark: RunMark | None, run: RunInProgress | None
    ) -> Saved | None:
        """Writes and publishes a checkpoint of the current state; deletes checkpoints that no policy keeps.

        Args:
            state, control: the current ones.
            mark: mark of the run whose checkpoints the folder holds.
            run: the parts of the run; None outside of `train`.

        Returns: None if the disk refused, which is logged.

        Raises:
            TypeError: a callback's state is not made of plain values.
        """
        folder = self.folder / folders.checkpoint_name(state.global_step)
        best = self._best(state, folder, mark)
        if not self.is_writer:
            self._write_beside(folder)
            return Saved(folder, best, state.stateful_callbacks)
        exporting = [*self.callback_handler.callbacks, control]
        exported = export_states([item for item in exporting if callable(getattr(item, "state", None))])
        try:
            Place(self.folder).check(self.num_bytes())
            known: dict[str, KnownFile] = {}
            with folders.staged(folder, known) as temporary:
                self._fill(temporary)
                written = dataclasses.replace(state, best_model_checkpoint=best, stateful_callbacks=exported)
                log = run.log_text if run is not None else LogText()
                is_whole = self.all_rows or run is None or is_last_checkpoint(state, control)
                StateFile(written.text(log), log, folder, is_whole=is_whole).write(temporary, known)
                progress = self._describe_progress(state, run)
                (temporary / PROGRESS_FILE).write_text(progress, encoding="utf-8")
            rotate(self.folder, self.retention, list(state.log_history), best, run=mark)
        except (OSError, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.OpError) and not is_refusal(error):
                raise
            logger.warning(
                "%s could not be written: %s. Training continues; earlier checkpoints are intact. The next save is "
                "tried when it is due.",
                folder,
                told_of(error),
            )
            return None
        return Saved(folder, best, exported)

    def num_bytes(self) -> int:
        """Returns the bytes of all variables that a checkpoint holds."""
        beside = 0 if self.averages is None else self.averages.num_bytes()
        return num_bytes([*self.model.variables, *optimizer_variables(self._saved_optimizer())]) + beside

    def _saved_optimizer(self) -> Any:
        return None if self.is_model_only else self.optimizer

    def _best(self, state: TrainerState, folder: Path, mark: RunMark | None) -> str | None:
        """Returns the run's best checkpoint: the one of the best step if it exists or is being written."""
        if state.best_global_step:
            best = folder.with_name(folders.checkpoint_name(state.best_global_step))
            if best == folder or (best.is_dir() and is_part(mark, best.name, mark_of(best))):
                return self.name_checkpoint(best)
        return state.best_model_checkpoint

    def _write_beside(self, folder: Path) -> None:
        """Takes part in reading the variables, which is collective, on a worker that writes no checkpoint.

        The files that this writes are deleted.
        """
        aside = folder.parent / f".{folder.name}.incomplete-{self.process_index}"
        try:
            write_variables(aside, self.model, self._saved_optimizer())
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _fill(self, folder: Path) -> None:
        """Writes the variables, and the files of `save_pretrained` of model and processing class."""
        write_variables(folder, self.model, self._saved_optimizer())
        if self.averages is not None and not self.is_model_only:
            self.averages.write(folder)
        for item in (self.model, self.processing_class):
            if callable(getattr(item, "save_pretrained", None)):
                item.save_pretrained(str(folder))

    def _describe_progress(self, state: TrainerState, run: RunInProgress | None) -> str:
        return describe_progress(
            run,
            max_steps=state.max_steps,
            callbacks=callback_states(self.callback_handler),
            schedule=self.schedule,
            arguments=self.arguments,
        )

    # ---- reading

    def restore(self, checkpoint: Path, progress: Mapping[str, Any]) -> None:
        """Restores variables, callbacks, random state, and a schedule that depends on evaluations.

        Args:
            checkpoint: the checkpoint's folder.
            progress: contents of its `progress.json`.

        Raises:
            CheckpointError: the variables are damaged, or belong to another model or optimizer.
        """
        is_whole = not (progress.get("arguments") or {}).get("save_only_model", False)
        restore_variables(checkpoint, self.model, self.optimizer if is_whole else None)
        if not is_whole:
            logger.warning("%s holds the model only: the optimizer starts anew.", checkpoint)
        states = progress.get("callbacks") or {}
        restore_callback_states(self.callback_handler, states, with_arguments=self.with_arguments)
        if "random" in progress:
            restore_random(progress["random"])
        saved = progress.get("schedule")
        kind = StepSchedule if saved and "scale" in saved else FollowingSchedule  # the run had, whatever this one has
        if is_whole and saved and isinstance(self.schedule, kind):
            self.schedule.load_state_dict(saved)


def requested_actions(state: TrainerState) -> dict[str, bool]:
    """Returns the control flags of a restored state whose actions were requested before the save and are still due."""
    control = (state.stateful_callbacks or {}).get("TrainerControl", {}).get("args", {})
    return {name: bool(control.get(name, False)) for name in ("should_evaluate", "should_epoch_stop")}


def told_of(error: BaseException) -> str:
    """Returns at most 300 characters of an error's message, without TensorFlow's graph nodes and temporary files."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", text).rpartition(";")[2].strip() or text
    return text[:300]


def is_refusal(error: object) -> bool:
    """True if a TensorFlow error means that the disk refused."""
    errors = tf.errors
    kinds = (
        errors.ResourceExhaustedError,
        errors.PermissionDeniedError,
        errors.UnavailableError,
        errors.NotFoundError,
        errors.FailedPreconditionError,
        errors.OutOfRangeError,  # the file is too large
        errors.UnknownError,  # the disk fails
    )
    return isinstance(error, kinds)
