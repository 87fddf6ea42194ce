"""Snapshot ensembles: the model at the end of each cycle of a cyclic schedule, for one training's cost.

Source: Huang et al., 2017 (arXiv:1704.00109).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paceline.args.errors import UnsupportedOption, wrong_value
from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.checkpoint.files import save_model
from paceline.pytorch.model.tensor_parts import is_dtensor

logger = logging.getLogger(__name__)

SCHEDULE = "cosine_with_restarts"
FOLDER = "snapshots"


class SnapshotEnsemble(TrainerCallback):
    """Saves the model at the end of each cosine cycle of `lr_scheduler_type="cosine_with_restarts"`.

    The number of cycles is `num_cycles` in `lr_scheduler_kwargs`. The folders `snapshots/snapshot-1`, `snapshot-2` ...
    in the output folder are written by the main process, are not deleted with checkpoints, and are members for
    `ensemble_predict`. A run that is resumed writes the same ones again from its step on.

    Args:
        last: keep the snapshots of the last so many cycles; None: of all. Late cycles are usually better.

    Attributes:
        folders: the snapshots of the run, in order.

    Raises:
        ValueError: `last` is not positive.
    """

    def __init__(self, last: int | None = None) -> None:
        if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
            raise wrong_value("SnapshotEnsemble(last)", last, "expected a whole number of at least 1, or None")
        self.last = last
        self.folders: list[Path] = []
        self._num_cycles = 0
        self._num_warmup_steps = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks that the run has whole cycles, and finds the snapshots of a resumed run.

        Raises:
            UnsupportedOption: the schedule has no cycles, the model is sharded, or the optimizer keeps two sets
                of weights.
            ValueError: there are fewer than two cycles, a part of one, or more cycles than steps.
        """
        name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if name != SCHEDULE:
            raise UnsupportedOption(
                f"SnapshotEnsemble with lr_scheduler_type={name!r}, which has no cycles: set "
                f"lr_scheduler_type={SCHEDULE!r} and lr_scheduler_kwargs={{'num_cycles': 5}}."
            )
        options = args.lr_scheduler_kwargs
        cycles = options.get("num_cycles", 1) if isinstance(options, Mapping) else 1
        warmup = args.get_warmup_steps(state.max_steps)
        if cycles != int(cycles) or not 2 <= cycles <= state.max_steps - warmup:
            raise ValueError(
                f"SnapshotEnsemble: lr_scheduler_kwargs={{'num_cycles': {cycles}}} is invalid: expected a whole number "
                f"from 2 to the {state.max_steps - warmup} steps after the warm-up."
            )
        for option in ("output_store", "ema_decay", "swa_start", "phases"):  # a phase has a schedule of its own
            if getattr(args, option) not in (None, []):
                raise UnsupportedOption(
                    f"SnapshotEnsemble with {option}={getattr(args, option)!r} is not supported: leave one of them out."
                )
        sharded = args.deepspeed or any(is_dtensor(each) for each in (model.parameters() if model is not None else ()))
        optimizer = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))
        if sharded or callable(getattr(optimizer, "eval", None)):
            raise UnsupportedOption(
                "SnapshotEnsemble needs the whole model on each device and an optimizer with one set of weights: use "
                "one device or DDP, and no schedule-free optimizer."
            )
        self._num_cycles, self._num_warmup_steps = int(cycles), warmup
        self.folders = [
            folder
            for number in range(1, self.cycle_at(state.global_step, state.max_steps) + 1)
            if (folder := self._folder(args, number)).is_dir()
        ]

    def cycle_at(self, step: int, max_steps: int) -> int:
        """Returns the number of cycles that are complete after an optimizer step."""
        if step >= max_steps:
            return self._num_cycles
        done = max(0, step - self._num_warmup_steps) / max(1, max_steps - self._num_warmup_steps)
        return int(self._num_cycles * done)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the model if this step was the last of a cycle."""
        number = self.cycle_at(state.global_step, state.max_steps)
        if number == self.cycle_at(state.global_step - 1, state.max_steps) or model is None:
            return
        folder = self._folder(args, number)
        if state.is_world_process_zero:
            write(model, folder)
            logger.info("Snapshot %d of %d at step %d: %s", number, self._num_cycles, state.global_step, folder)
        self.folders = [*(each for each in self.folders if each != folder), folder]
        if self.last is not None:
            for old in self.folders[: -self.last]:
                if state.is_world_process_zero:
                    shutil.rmtree(old, ignore_errors=True)
            self.folders = self.folders[-self.last :]

    def _folder(self, args: TrainingArguments, number: int) -> Path:
        return output_folder(args) / FOLDER / f"snapshot-{number}"


def write(model: nn.Module, folder: Path) -> None:
    """Writes a model into a folder that has either all of its files or, after a crash, none."""
    hidden = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    save_model(model, hidden)
    if folder.is_dir():  # of a run that is repeated, or resumed from before this step
        shutil.rmtree(folder)
    os.replace(hidden, folder)


def snapshots_of(value: bool | int) -> SnapshotEnsemble:
    """Returns the callback of the option `snapshot_ensemble`: True, or the number of snapshots that are kept."""
    return SnapshotEnsemble(None if value is True else value)
