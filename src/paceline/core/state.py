"""The progress of a run (`TrainerState`) and the actions requested next (`TrainerControl`).

`TrainerState` is written as `trainer_state.json`. Field names and format are those of transformers: either library
resumes from the other's file.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from paceline.args.sections import Options
from paceline.core.counts import is_amount, is_count, shown
from paceline.core.log_text import HISTORY, LogText, StateText, earlier_rows
from paceline.core.metrics import jsonable

logger = logging.getLogger(__name__)


class ExportableState:
    """Base class of objects whose state is saved in `trainer_state.json` as two dicts.

    Implement `state()` to return `{"args": {constructor keywords}, "attributes": {set afterwards}}`, JSON-serialisable.
    New code can define `state_dict()` and `load_state_dict(state)` instead, with any JSON-serialisable dict.
    """

    def state(self) -> dict[str, Any]:
        """Returns the state that `from_state` builds an equal object from."""
        raise NotImplementedError(f"{type(self).__name__} must define state() to be saved with a checkpoint.")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Builds an object from the result of `state()`."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


STEERING_KEY = "paceline.steering"  # the key of changed settings among the callback states of a checkpoint
Request = dict[str, Any]
"""A requested change: "name", "operation", "value", "source" and "id"; see `paceline.core.steering`."""


class Steering(Protocol):
    """Makes the requested changes of a run's settings."""

    def value(self, name: str) -> float:
        """Returns a setting as it will be after the pending requests."""
        ...

    def ask(self, name: str, operation: str, value: object) -> None:
        """Requests a change."""
        ...

    def follow(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Makes the recorded changes of another run, and ignores requests."""
        ...

    def receive(self) -> None:
        """Reads the command that has arrived."""
        ...

    def end(self) -> None:
        """Ends with the run."""
        ...


class Requests:
    """The requested changes of one run that are not made yet. Costs nothing until the first request.

    Args:
        is_shared: there are several processes, which exchange their requests before they make them.

    Attributes:
        pending: the requests of this process, oldest first.
        agreed: with several processes, the exchanged requests, which are made before the next optimizer step.
        is_noticed: a command has arrived; set by another thread.
        wake: called after that by the same thread.
    """

    def __init__(self, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.is_noticed = False
        self.wake: Callable[[], None] = nothing
        self.pending: list[Request] = []
        self.agreed: list[Request] = []
        self._begin: Callable[[], Steering] | None = None
        self._steering: Steering | None = None

    def open(self, begin: Callable[[], Steering]) -> None:
        """Accepts requests from now on; at the first one, `begin` returns the object that makes the changes."""
        self._begin = begin

    def end(self) -> None:
        """Accepts no further requests."""
        ended, self._begin, self._steering = self._steering, None, None
        if ended is not None:
            ended.end()

    def notice(self) -> None:
        """Notes that a command has arrived; may be called by any thread."""
        self.is_noticed = True
        self.wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called when a command has arrived, by any thread."""
        self.wake = wake

    def steering(self) -> Steering:
        """Returns the object that makes the changes.

        Raises:
            RuntimeError: no run is in progress.
        """
        if self._steering is None:
            if self._begin is None:
                raise RuntimeError(NO_RUN)
            self._steering = self._begin()
        return self._steering

    def agree(self, gathered: Sequence[list[Request]]) -> None:
        """Takes the requests of the first process that has any, given those of all processes.

        The requests of the other processes are dropped, with a warning if they differ: a callback usually makes the
        same request on each process.
        """
        chosen = next((requests for requests in gathered if requests), [])
        if any(requests and changes_in(requests) != changes_in(chosen) for requests in gathered):
            logger.warning("The processes requested different changes; those of the first are made: %s.", chosen)
        self.agreed += chosen
        self.pending.clear()
        self.steering()


def nothing() -> None:
    """Does nothing."""


def changes_in(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """Returns requests without their ids."""
    return [(request["name"], request["operation"], request["value"]) for request in requests]


NO_RUN = (
    "control: settings are changed while a run is in progress, on the control that its callbacks are given; set the "
    "training arguments before it."
)


class SettingControl:
    """The settings that a callback can change through its control, from the next optimizer step on.

    A request is made before the next optimizer step starts; one made within an optimizer step, from `on_step_begin` to
    `on_optimizer_step`, is made before the step after it. Changes are recorded in `control.jsonl`.
    """

    requests: Requests | None = None

    @contextmanager
    def accepting(self, is_shared: bool) -> Iterator[Requests]:
        """Returns a context in which requests are collected for one run."""
        self.requests = requests = Requests(is_shared)
        try:
            yield requests
        finally:
            self.requests = None

    @property
    def steering(self) -> Steering:
        """Returns the object that makes the changes of the run in progress.

        Raises:
            RuntimeError: no run is in progress.
        """
        if self.requests is None:
            raise RuntimeError(NO_RUN)
        return self.requests.steering()

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the first parameter group, with the changes requested so far.

        Assigning a value scales the rates of all groups, and the rest of the schedule, by the same factor.

        Raises:
            ValueError: the assigned value is not a positive number, or the current rate is 0.
            UnsupportedOption: the optimizer or the schedule cannot be scaled.
        """
        return self.steering.value("learning_rate")

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.steering.ask("learning_rate", "set", value)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all groups, and the rest of the schedule, by a positive factor."""
        self.steering.ask("learning_rate", "scale", factor)

    @property
    def weight_decay(self) -> float:
        """Returns the largest weight decay of a parameter group, with the changes requested so far.

        Assigning a value, 0 included, keeps the ratios between the groups; groups without weight decay stay without.
        """
        return self.steering.value("weight_decay")

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self.steering.ask("weight_decay", "set", value)

    def scale_weight_decay(self, factor: float) -> None:
        """Multiplies the weight decay of all groups by a positive factor."""
        self.steering.ask("weight_decay", "scale", factor)

    @property
    def max_grad_norm(self) -> float:
        """Returns the norm to which gradients are clipped, with the changes requested so far; 0 disables clipping."""
        return self.steering.value("max_grad_norm")

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.steering.ask("max_grad_norm", "set", value)


@dataclass
class TrainerControl(SettingControl, ExportableState):
    """Flags that callbacks set and the loop obeys, and settings that they change.

    Attributes:
        should_training_stop: run no further optimizer step. Reset when the next training starts.
        should_epoch_stop: run no further optimizer step in this epoch. Reset when the next epoch starts.
        should_save: write a checkpoint after this step. This flag and those below are reset at the next step.
        should_evaluate: evaluate after this step.
        should_log: log after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerControl:
        """Returns a copy with its own flags; the settings that it changes are those of the same run."""
        return copy.copy(self)

    def adopt(self, other: TrainerControl) -> None:
        """Takes over the flags of another control, which a callback has returned to replace this one."""
        for flag in dataclasses.fields(self):
            setattr(self, flag.name, getattr(other, flag.name))

    def begin_training(self) -> None:
        """Resets the flag that lasts one run."""
        self.should_training_stop = False

    def begin_epoch(self) -> None:
        """Resets the flag that lasts one epoch."""
        self.should_epoch_stop = False

    def begin_step(self) -> None:
        """Resets the flags that last one optimizer step."""
        self.should_save = False
        self.should_evaluate = False
        self.should_log = False

    def request(self, action: str) -> None:
        """Sets the flag of an action: "save", "evaluate" or "log"."""
        setattr(self, f"should_{action}", True)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restores the saved flags that were set and not acted on yet."""
        self.should_evaluate = bool(saved.get("should_evaluate", False))
        self.should_epoch_stop = bool(saved.get("should_epoch_stop", False))

    # Names that subclasses written for transformers call.
    _new_training = begin_training
    _new_epoch = begin_epoch
    _new_step = begin_step

    def state(self) -> dict[str, Any]:
        """Returns the five flags as constructor keywords."""
        return {"args": {flag.name: getattr(self, flag.name) for flag in dataclasses.fields(self)}, "attributes": {}}


@dataclass
class TrainerState:
    """The progress of a training run. A step is one optimizer step, whatever its number of micro-batches.

    Attributes:
        epoch: epochs done, with the fraction of the current one.
        global_step: optimizer steps done.
        max_steps: optimizer steps at which training ends. Live: read at each step.
        logging_steps: steps between two logs. Live, as are the two below.
        eval_steps: steps between two evaluations.
        save_steps: steps between two checkpoints.
        train_batch_size: samples per process and micro-batch.
        num_train_epochs: the maximum number of epochs.
        num_input_tokens_seen: input tokens trained on if they are counted, else 0.
        total_flos: floating-point operations so far (a float, as it exceeds 2**63 on long runs).
        log_history: every row logged so far, each with its "step".
        best_metric: the best value so far of `metric_for_best_model`, or None.
        best_global_step: the step at which it was reached.
        best_model_checkpoint: the folder of that checkpoint.
        is_local_process_zero: True for the process of local rank 0.
        is_world_process_zero: True for the process of rank 0.
        is_hyper_param_search: True if this run is a trial of a hyperparameter search.
        trial_name: the trial's name.
        trial_params: the trial's hyperparameters.
        stateful_callbacks: states of callbacks by name; a list of `ExportableState` objects is converted to this form.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = None  # type: ignore[assignment]  # None in old files; a list from here on
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = None  # type: ignore[assignment]  # as above

    # not annotated, hence no fields: other libraries read the file of the fields
    phase = None  # type: str | None  # name of the training phase in progress
    num_eval_samples = None  # type: int | None  # samples of one evaluation during training, if known

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = export_states(self.stateful_callbacks)

    def record_best(self, checkpoint: str | None) -> None:
        """Sets the folder of the best checkpoint."""
        self.best_model_checkpoint = checkpoint

    def forget_best(self) -> None:
        """Resets the best metric, its step and its checkpoint."""
        self.best_metric = self.best_global_step = self.best_model_checkpoint = None

    def forget_tokens(self) -> None:
        """Resets the count of input tokens."""
        self.num_input_tokens_seen = 0

    def set_intervals(self, logging_steps: int, eval_steps: int, save_steps: int) -> None:
        """Sets the optimizer steps between two logs, evaluations and checkpoints."""
        self.logging_steps, self.eval_steps, self.save_steps = logging_steps, eval_steps, save_steps

    def record_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Sets the states of the callbacks that have a `state()`."""
        stateful = [callback for callback in callbacks if callable(getattr(callback, "state", None))]
        self.stateful_callbacks = export_states(stateful)

    def copied(self) -> Self:
        """Returns a copy of all fields; the rows of the log are shared, because rows are only ever added."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = list(fields.pop("log_history"))
        made = copy.copy(self)
        for name, value in fields.items():
            setattr(made, name, copy.deepcopy(value))
        made.log_history = rows
        return made

    def take_back(self, saved: TrainerState) -> None:
        """Restores all fields from an earlier copy of this state. The copy stays independent."""
        again = saved.copied()
        for field in dataclasses.fields(saved):
            setattr(self, field.name, getattr(again, field.name))

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Writes the state atomically."""
        self.text().write(json_path)

    def text(self, log_text: LogText | None = None) -> StateText:
        """Returns a snapshot of the state, which any thread can write by its `write`.

        Args:
            log_text: the run's encoded log, so that each row is encoded once, in 7 us; None encodes all rows.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != HISTORY]
        rows = list(self.log_history)
        chunks = log_text.chunks_of(rows) if log_text is not None else ()
        return StateText(jsonable({name: getattr(self, name) for name in names}), rows, chunks)

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> Self:
        """Reads a state of a checkpoint, with all rows of its log, or one written by `save_to_json` or transformers.

        Unknown keys are ignored and logged.

        Raises:
            ValueError: the file is not the JSON of a state, or rows of its log are missing; the message names the file.
            OSError: a file cannot be read.
        """
        path = Path(json_path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} should hold a JSON object, it holds {type(values).__name__}.")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            logger.info("%s: ignored unknown fields: %s.", path, ", ".join(unknown))
        for name, is_possible in _POSSIBLE.items():
            value = values.get(name, 0 if name in _NEVER_NULL else None)
            if (value is not None or name in _NEVER_NULL) and not is_possible(value):
                raise ValueError(f"{path}: {name} cannot be {shown(value)}.")
        rows = values.get(HISTORY) or []
        values[HISTORY] = [*earlier_rows(path, rows), *rows]
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: Options, max_steps: int) -> None:
        """Sets `logging_steps`, `eval_steps` and `save_steps` from the arguments; below 1 they are ratios of max_steps.

        `eval_steps=None` means `logging_steps` if `eval_strategy` is "steps".
        """
        eval_steps = args.eval_steps
        if eval_steps is None and args.eval_strategy == "steps":
            eval_steps = args.logging_steps
        for name, steps in (("logging", args.logging_steps), ("eval", eval_steps), ("save", args.save_steps)):
            if steps is not None:
                setattr(self, f"{name}_steps", math.ceil(max_steps * steps) if steps < 1 else int(steps))

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Sets the run's length, its process flags and its trial of a hyperparameter search."""
        current_trial = getattr(trainer, "_trial", None)
        if getattr(trainer, "hp_name", None) is not None and current_trial is not None:
            self.trial_name = trainer.hp_name(current_trial)
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() <= 1024)


_NEVER_NULL = frozenset({"global_step"})
# Checks of the values read from a file; null is valid too, except for `_NEVER_NULL`. An invalid value would otherwise
# fail only hours later.
_POSSIBLE: dict[str, Callable[[Any], bool]] = {
    "epoch": is_amount,
    "global_step": is_count,
    "max_steps": is_count,
    "logging_steps": is_amount,
    "eval_steps": is_amount,
    "save_steps": is_amount,
    "train_batch_size": is_count,
    "num_train_epochs": is_amount,
    "num_input_tokens_seen": is_amount,
    "total_flos": is_amount,
    "log_history": lambda value: isinstance(value, list) and all(isinstance(row, dict) for row in value),
    "best_metric": _is_number,
    "best_global_step": is_count,
    "best_model_checkpoint": lambda value: isinstance(value, str),
    "stateful_callbacks": lambda value: isinstance(value, dict),
}


def export_states(exportables: Sequence[Any]) -> dict[str, Any]:
    """Returns the states of `ExportableState` objects by class name, as transformers does: a list if a class repeats.

    Raises:
        TypeError: one of them cannot be exported.
    """
    states: dict[str, list[dict[str, Any]]] = {}
    for exportable in exportables:
        if not callable(getattr(exportable, "state", None)):
            raise TypeError(f"{type(exportable).__name__} has no state() to save: derive it from ExportableState.")
        states.setdefault(type(exportable).__name__, []).append(exportable.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}
