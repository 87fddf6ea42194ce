"""Framework-independent members of a Trainer: logs, metrics files, callbacks, process ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.args.places import fix_base, placed
from paceline.args.redeclared import own_options
from paceline.callbacks.memory_stages import MemoryStages
from paceline.checkpoint import layout
from paceline.checkpoint.resuming import STATE_FILE
from paceline.core.events import CallbackHandler, TrainerCallback, call_own_event
from paceline.core.lineage import RunMark
from paceline.core.metrics import format_metrics, speed_metrics
from paceline.core.optional import LateModule
from paceline.core.results import print_metrics, save_metrics
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.core import media
else:
    media = LateModule("paceline.core.media")


class TrainerNames:
    """The members that the Trainers of all frameworks share.

    Attributes:
        args: the arguments.
        state, control: the loop's state and control, live; replaced by each `train`.
        callback_handler: the callbacks and their dispatch table.
        memory_stages: measures the memory of each stage, with `skip_memory_metrics=False`.
        run: the run in progress, or None.
        run_mark: the mark of the run that was last started or resumed.
        is_in_train: True while a run is in progress.
        time_spent: seconds of the last run by activity: data, forward, backward, optimizer, evaluate, save, ...; they
            add up to its wall time.
        was_stopped: True if a signal has stopped the last run before its end: a resumed run does the rest.
        step_parts: the optional parts of the optimizer steps of the last run.
        remote_sync: mirrors the output folder in a store, or None.
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
    was_stopped: bool = False
    world: Any
    step_parts: Any = None
    remote_sync: Any = None

    @property
    def _own_options(self) -> Any:
        """The arguments as paceline reads them: see `paceline.args.redeclared`."""
        return own_options(self.args)

    def _step_part(self, name: str) -> Any:
        return None if self.step_parts is None else self.step_parts.find(name)

    @property
    def noise_scale(self) -> Any:
        """Returns the gradient noise scale of the last run with `gradient_noise_scale=True`."""
        return self._step_part(layout.NOISE_SCALE)

    @property
    def data_map(self) -> Any:
        """Returns the recorder of the last run with `data_map=True`; its `result` is the map."""
        return self._step_part(layout.DATA_MAP)

    @property
    def regularizers(self) -> Any:
        """Returns the passes of the last run with `regularizers`."""
        return self._step_part(layout.REGULARIZERS)

    def _get_output_dir(self, trial: object) -> str:
        return str(self.args.output_dir)

    def _output_folder(self, trial: object = None) -> Path:
        """Returns the absolute path of the output folder, wherever the process is now."""
        return placed(self.args, self._get_output_dir(trial))

    def _folder_of_run(self, trial: object = None) -> Path:
        """Returns the output folder of a run that begins now, in the current directory if it is relative."""
        if not self.is_in_train and self.remote_sync is None:  # a store mirrors the folder that the constructor made
            fix_base(self.args)
        return self._output_folder(trial)

    # ---- log rows

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds epoch and token count to a row of metrics, appends it to `state.log_history`, and calls `on_log`."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if str(self.args.include_num_input_tokens_seen) != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                first = self.run.first_tokens if self.run is not None else 0
                seen = self.state.num_input_tokens_seen - first
                logs.update(speed_metrics("train", start_time, num_tokens=seen))
        # times go to the callbacks only, so that a resumed run has the same history as an uninterrupted one
        recorded, entries = self.run.row_entries() if self.run is not None else ({}, {})
        logs.update(recorded)
        shown: dict[str, Any] = logs if self.state.phase is None else {**logs, "phase": self.state.phase}
        self.state.log_history.append({**shown, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, {**shown, **entries})
        self._share_control()

    def log_figure(self, name: str, figure: Any) -> None:
        """Records a figure at this step: a file in `media/` of the output folder, in the report and the trackers.

        Args:
            name: its name, such as "eval/attention".
            figure: a figure of matplotlib, an image of Pillow, an array or tensor, or the path of a PNG file; see
                `paceline.core.media.make_figure`. Only the main process's is used.

        Raises:
            TypeError, ValueError: the figure or the name is invalid.
        """
        if self.is_world_process_zero():
            folder = self._output_folder()
            self._tell_media(media.make_figure(folder, name, self.state.global_step, figure))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Records a table at this step, such as samples of an evaluation: as `log_figure` does with figures.

        Args:
            name: its name, such as "eval/samples".
            columns: the names of the columns.
            rows: one sequence of cells for each row: texts, numbers. Only the main process's are used.

        Raises:
            ValueError: the name is invalid, or a row has not one cell for each column.
        """
        if self.is_world_process_zero():
            folder = self._output_folder()
            self._tell_media(media.make_table(folder, name, self.state.global_step, columns, rows))

    def _tell_media(self, made: media.Media) -> None:
        call_own_event(self.callback_handler, "on_media", self.args, self.state, self.control, media=made)

    def _share_control(self) -> None:
        """Passes a control that a callback may have returned on to the loop."""
        if self.run is not None and self.run.loop is not None:
            self.run.loop.control = self.control

    # ---- metrics files

    def save_state(self) -> None:
        """Writes `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(self._output_folder() / STATE_FILE))

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics formatted for people."""
        return format_metrics(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Prints the metrics of a split, one per line."""
        if self.is_world_process_zero():
            print_metrics(split, self.metrics_format(metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Writes `{split}_results.json` to the output folder, and merges into `all_results.json` if `combined`."""
        if self.is_world_process_zero():
            save_metrics(self._output_folder(), split, metrics, combined)

    # ---- callbacks and processes

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Adds a callback: an instance, or a class that is called without arguments."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Removes a callback and returns it; returns None if there is no such callback."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """True on local rank 0."""
        return bool(self.world.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """True on rank 0, which writes files."""
        return bool(self.world.process_index == 0)
