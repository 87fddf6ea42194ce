"""The names of a Trainer that know no framework: rows of logs, metrics on paper, callbacks, whose process this is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.metrics import format_metrics, speed_metrics
from paceline.core.results import print_metrics, save_metrics
from paceline.core.resuming import STATE_FILE
from paceline.core.state import TrainerControl, TrainerState


class TrainerNames:
    """What the Trainers of all frameworks say in the same words.

    Attributes:
        args: the arguments.
        state, control: the loop's, live.
        callback_handler: the callbacks.
        world: where this process stands.
        run: of a run in progress; None outside of one.
    """

    args: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    world: Any
    run: Any = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.args.output_dir)

    # ---- rows of logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Stamp a row of numbers with epoch and tokens, add it to `state.log_history`, tell the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if str(self.args.include_num_input_tokens_seen) != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                first = self.run.first_tokens if self.run is not None else 0
                seen = self.state.num_input_tokens_seen - first
                logs.update(speed_metrics("train", start_time, num_tokens=seen))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)
        self._share_control()

    def _share_control(self) -> None:
        """A callback may have returned another control: the loop goes on with it."""
        if self.run is not None and self.run.loop is not None:
            self.run.loop.control = self.control

    # ---- metrics on paper

    def save_state(self) -> None:
        """Write `trainer_state.json` into the output folder."""
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(self._get_output_dir(None), STATE_FILE))

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics as a person reads them."""
        return format_metrics(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split, one per line."""
        if self.is_world_process_zero():
            print_metrics(split, self.metrics_format(metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `{split}_results.json` into the output folder, and add to `all_results.json` if `combined`."""
        if self.is_world_process_zero():
            save_metrics(Path(self._get_output_dir(None)), split, metrics, combined)

    # ---- callbacks and processes

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback: an instance, or a class that is called without arguments."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove a callback and return it; None where there is none of that class."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process on its machine."""
        return bool(self.world.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all, the one that writes files."""
        return bool(self.world.process_index == 0)
