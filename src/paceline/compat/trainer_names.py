"""Framework-independent members of a Trainer: rows of logs, written metrics, callbacks, process ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.callbacks.memory_stages import MemoryStages
from paceline.checkpoint.resuming import STATE_FILE
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.lineage import RunMark
from paceline.core.metrics import format_metrics, speed_metrics
from paceline.core.results import print_metrics, save_metrics
from paceline.core.state import TrainerControl, TrainerState


class TrainerNames:
    """The members that the Trainers of all frameworks share.

    Attributes:
        args: the arguments.
        state, control: the loop's, live; replaced by each `train`.
        callback_handler: the callbacks and whom each event calls.
        memory_stages: memory of each stage, with `skip_memory_metrics=False`.
        run: the run in progress; None outside of one.
        run_mark: of the run that was last begun or resumed.
        is_in_train: True while a run is in progress.
        time_spent: seconds of the last run by activity: data, forward, backward, optimizer, evaluate, save, ...; they
            add up to its wall time.
        world: rank, world size and device of this process.
    """

    args: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    memory_stages: MemoryStages
    run: Any = None
    run_mark: RunMark | None = None
    is_in_train: bool = False
    time_spent: Mapping[str, float] = MappingProxyType({})
    world: Any

    def _get_output_dir(self, trial: object) -> str:
        return str(self.args.output_dir)

    # ---- rows of logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Stamps a row of numbers with epoch and tokens, adds it to `state.log_history`, and notifies the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if str(self.args.include_num_input_tokens_seen) != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                first = self.run.first_tokens if self.run is not None else 0
                seen = self.state.num_input_tokens_seen - first
                logs.update(speed_metrics("train", start_time, num_tokens=seen))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        # times go to the callbacks alone: the history of a resumed run stays equal to that of one that was not stopped
        entries = self.run.row_entries() if self.run is not None else {}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, {**logs, **entries})
        self._share_control()

    def _share_control(self) -> None:
        """Sets the control that a callback may have returned; the loop continues with it."""
        if self.run is not None and self.run.loop is not None:
            self.run.loop.control = self.control

    # ---- written metrics

    def save_state(self) -> None:
        """Writes `trainer_state.json` into the output folder."""
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(self._get_output_dir(None), STATE_FILE))

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics formatted for people."""
        return format_metrics(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Prints the metrics of a split, one per line."""
        if self.is_world_process_zero():
            print_metrics(split, self.metrics_format(metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Writes `{split}_results.json` into the output folder, and adds to `all_results.json` if `combined`."""
        if self.is_world_process_zero():
            save_metrics(Path(self._get_output_dir(None)), split, metrics, combined)

    # ---- callbacks and processes

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Adds a callback: an instance, or a class that is called without arguments."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Removes a callback and returns it; None if there is none of that class."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """True if this is the first process on its machine."""
        return bool(self.world.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """True if this is the first process of all, the one that writes files."""
        return bool(self.world.process_index == 0)
