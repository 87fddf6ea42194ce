"""Where a run stands (`TrainerState`) and what it was asked to do next (`TrainerControl`).

`TrainerState` is written as `trainer_state.json`. Field names and format are those of transformers, both ways: either
library resumes from the other's file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.metrics import jsonable

logger = logging.getLogger(__name__)


class ExportableState:
    """Something whose state goes into `trainer_state.json` as two dicts.

    Implement `state()` to return `{"args": {constructor keywords}, "attributes": {set afterwards}}`, all of it
    JSON-able. New code can offer `state_dict()` and `load_state_dict(state)` instead: any JSON-able dict will do.
    """

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to build an equal object."""
        raise NotImplementedError(f"{type(self).__name__} must define state() to be saved with a checkpoint.")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build an object from what `state()` returned."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerControl(ExportableState):
    """Flags that callbacks raise and the loop acts upon.

    Attributes:
        should_training_stop: make no further update. Stays up until the next training starts.
        should_epoch_stop: make no further update in this epoch. Lowered when the next one starts.
        should_save: write a checkpoint after this update. This one and those below are lowered at the next update.
        should_evaluate: evaluate after this update.
        should_log: log after this update.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def begin_training(self) -> None:
        """Lower what must not outlive a run."""
        self.should_training_stop = False

    def begin_epoch(self) -> None:
        """Lower what must not outlive an epoch."""
        self.should_epoch_stop = False

    def begin_step(self) -> None:
        """Lower what must not outlive an update."""
        self.should_save = False
        self.should_evaluate = False
        self.should_log = False

    # The names that subclasses written for transformers call.
    _new_training = begin_training
    _new_epoch = begin_epoch
    _new_step = begin_step

    def state(self) -> dict[str, Any]:
        """The five flags, as constructor keywords."""
        return {"args": {flag.name: getattr(self, flag.name) for flag in dataclasses.fields(self)}, "attributes": {}}


@dataclass
class TrainerState:
    """Where a training run stands. A step is one update of the weights, however many micro-batches it took.

    Attributes:
        epoch: epochs done, with the fraction of the current one.
        global_step: updates done.
        max_steps: updates at which training ends. Live: read at each step.
        logging_steps: updates between two logs. Live, as are the two below.
        eval_steps: updates between two evaluations.
        save_steps: updates between two checkpoints.
        train_batch_size: samples per process and micro-batch.
        num_train_epochs: epochs that the run makes at most.
        num_input_tokens_seen: input tokens trained on, where they are counted; else 0.
        total_flos: floating-point operations so far (a float, as it passes 2**63 on long runs).
        log_history: every row logged so far, each with its "step".
        best_metric: the best value so far of `metric_for_best_model`, or None.
        best_global_step: the update at which it was reached.
        best_model_checkpoint: the folder of that checkpoint.
        is_local_process_zero: whether this process speaks for its machine.
        is_world_process_zero: whether this process speaks for the whole run.
        is_hyper_param_search: whether this run is one trial of a search.
        trial_name: the trial's name.
        trial_params: what the search chose for the trial.
        stateful_callbacks: states of callbacks by name; a list of `ExportableState` objects is turned into that.
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

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = export_states(self.stateful_callbacks)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state; a reader sees the old file or the new one, never half of one."""
        write_values(self.plain_values(), json_path)

    def plain_values(self) -> dict[str, Any]:
        """What `save_to_json` writes, as it is now: numbers, text, lists and dicts that nobody else holds.

        Takes some 2 ms for each 1000 rows of the log; turning them into text would take three times as long.
        """
        values: dict[str, Any] = jsonable({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return values

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> Self:
        """Read a state written by `save_to_json`, or by transformers. Keys unknown here are left out, with a log line.

        Raises:
            ValueError: the file is not the JSON of a state; the message names it.
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
            logger.info("%s: left out what this version does not know: %s.", path, ", ".join(unknown))
        for name, accepted in _ACCEPTED.items():
            value = values.get(name)
            if value is not None and not isinstance(value, accepted):
                raise ValueError(f"{path}: {name} cannot be {str(value)[:80]!r}.")
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Set `logging_steps`, `eval_steps` and `save_steps` from the arguments; below 1 they are shares of max_steps.

        `eval_steps` left open follows `logging_steps` where evaluation goes by steps.
        """
        eval_steps = args.eval_steps
        if eval_steps is None and args.eval_strategy == "steps":
            eval_steps = args.logging_steps
        for name, steps in (("logging", args.logging_steps), ("eval", eval_steps), ("save", args.save_steps)):
            if steps is not None:
                setattr(self, f"{name}_steps", math.ceil(max_steps * steps) if steps < 1 else int(steps))

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Note what a run is about to do: its length, the process it runs in, the trial of a search it belongs to."""
        current_trial = getattr(trainer, "_trial", None)
        if getattr(trainer, "hp_name", None) is not None and current_trial is not None:
            self.trial_name = trainer.hp_name(current_trial)
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def write_values(values: Mapping[str, Any], json_path: str | os.PathLike[str]) -> None:
    """Write what `plain_values` returned, in one step."""
    path = Path(json_path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


# What a file may hold, beside null, where a wrong type would only surface hours later.
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "epoch": (int, float),
    "global_step": (int,),
    "max_steps": (int,),
    "logging_steps": (int, float),
    "eval_steps": (int, float),
    "save_steps": (int, float),
    "train_batch_size": (int,),
    "num_input_tokens_seen": (int, float),
    "total_flos": (int, float),
    "log_history": (list,),
    "best_metric": (int, float),
    "best_global_step": (int,),
    "best_model_checkpoint": (str,),
    "stateful_callbacks": (dict,),
}


def export_states(exportables: Sequence[Any]) -> dict[str, Any]:
    """The states of `ExportableState` objects by class name, in transformers' format: a list where a class repeats.

    Raises:
        TypeError: one of them cannot be exported.
    """
    states: dict[str, list[dict[str, Any]]] = {}
    for exportable in exportables:
        if not callable(getattr(exportable, "state", None)):
            raise TypeError(f"{type(exportable).__name__} has no state() to save: derive it from ExportableState.")
        states.setdefault(type(exportable).__name__, []).append(exportable.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}
