"""Variables, optimizer and schedule of training phases in TensorFlow.

The optimizer holds slots for every variable that some phase trains, from the first step on: Keras makes them at once. A
variable that a phase freezes has no gradient, and its slots stay as they are. Keras' optimizers have one count of
steps, by which Adam corrects the bias of its moments; here each variable has its own, of the steps that trained it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.args.phases import Phase
from paceline.core.phases.patterns import check_patterns, check_trained, trained_in
from paceline.tensorflow.framework import keras, plain, tf
from paceline.tensorflow.optim.optimizers import name_of
from paceline.tensorflow.optim.schedules import StepSchedule

RATE_SETTINGS = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
# optimizers with a state that is one for all variables, besides the count of steps
SHARED_STATE = ("Nadam", "MultiOptimizer")


@dataclass(frozen=True)
class Member:
    """A trainable variable of the model.

    Attributes:
        variable: the variable.
        is_trained: for each phase, True if it is trained.
    """

    variable: Any
    is_trained: tuple[bool, ...]


def names_of(model: Any) -> dict[int, list[str]]:
    """Returns the names of each trainable variable, by its id.

    They are its path, the ends of the path from each layer on (`dense/kernel` of `model/block/dense/kernel`), and the
    names of the layers that contain it.
    """
    found: dict[int, list[str]] = {}
    for variable in model.trainable_variables:
        parts = name_of(variable).partition(":")[0].split("/")
        found[id(plain(variable))] = ["/".join(parts[first:]) for first in range(max(len(parts) - 1, 1))]
    flatten = getattr(model, "_flatten_layers", None)
    for layer in flatten(include_self=False) if callable(flatten) else getattr(model, "submodules", ()):
        for variable in getattr(layer, "trainable_variables", ()):
            names = found.get(id(plain(variable)))
            if names is not None and layer.name not in names:
                names.append(layer.name)
    return found


def find_members(model: Any, phases: Sequence[Phase]) -> list[Member]:
    """Returns the trainable variables of a model, with what each phase does with them.

    Raises:
        ValueError: a pattern matches no variable, a phase trains nothing, or the model has no variables yet.
    """
    names = names_of(model)
    if not names:
        raise ValueError("The model has no trainable variables: call it on a batch once, or build it, before.")
    every = [name for several in names.values() for name in several]
    check_patterns(phases, every, type(model).__name__, "variable or layer")
    members = [Member(each, trained_in(phases, names[id(plain(each))])) for each in model.trainable_variables]
    check_trained(phases, [member.is_trained for member in members], "variable")
    return members


def is_thawed(member: Member) -> bool:
    """True if a phase trains the variable after one that does not."""
    return any(later and not earlier for earlier, later in itertools.pairwise(member.is_trained))


class PhasedSchedule(StepSchedule):
    """The schedule of the phase in progress.

    Args:
        schedule: the schedule of the first phase of the run.
    """

    def __init__(self, schedule: StepSchedule) -> None:
        self.schedule, self.start = schedule, 0  # before the table of rates is made
        super().__init__(**schedule.get_config())

    def begin(self, schedule: StepSchedule, start: int) -> None:
        """Begins the schedule of a phase; compiled functions follow it when they are traced again.

        Args:
            schedule: counts from the start of the phase.
            start: the optimizer's count of steps at the start of the phase.
        """
        self.schedule, self.start = schedule, start
        self.scale.assign(1.0)
        self.skipped.assign(0)

    def rate(self, step: int) -> float:
        """Returns the rate of an optimizer step of the run, 0-based."""
        return self.schedule.rate(int(step) - self.start)

    def __call__(self, step: object) -> Any:
        """Returns the rate of an optimizer step of the run, 0-based: a float32 scalar."""
        return self.schedule(tf.cast(step, tf.int64) + self.skipped - self.start) * self.scale

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make a schedule equal to that of the phase."""
        return self.schedule.get_config()


class PhasedOptimizer:
    """Sets weight decay and step counts of a Keras optimizer for each phase.

    Args:
        optimizer: a Keras 3 optimizer, which may be inside a LossScaleOptimizer.
        members: the variables.
        phases: the phases.
        weight_decay: the weight decay of phases that set none.

    Raises:
        UnsupportedOption: the optimizer does not support the phases.
    """

    def __init__(
        self, optimizer: Any, members: Sequence[Member], phases: Sequence[Phase], weight_decay: float | None
    ) -> None:
        self.optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self.members, self.phases, self.weight_decay = members, phases, weight_decay
        self._check()
        self._lags: dict[Any, int] = {}  # steps of the optimizer that did not train a variable
        if any(map(is_thawed, members)):
            vars(self.optimizer)["update_step"] = self._counting(self.optimizer.update_step)

    @property
    def num_steps(self) -> int:
        """The optimizer's count of its steps, a read from the device."""
        return int(plain(self.optimizer.iterations).numpy())

    def _check(self) -> None:
        optimizer, name = self.optimizer, type(self.optimizer).__name__
        is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        obstacles = {
            f"{name}, which is no optimizer of Keras 3: name one in optim": not is_keras,
            f"{name}, which keeps two sets of weights: choose another optim, such as 'adamw_torch'": (
                "ScheduleFree" in name
            ),
            f"{name}, which has one state for all variables, if a variable is frozen and trained later: choose another "
            "optim, such as 'adamw_torch'": name in SHARED_STATE and any(map(is_thawed, self.members)),
            f"gradient_accumulation_steps of {name}: set that of the arguments": bool(
                getattr(optimizer, "gradient_accumulation_steps", None)
            ),
        }
        for told, is_there in obstacles.items():
            if is_there:
                raise UnsupportedOption(f"phases with TensorFlow are not supported with {told}.")

    def _counting(self, update_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an `update_step` in which the optimizer's count of steps is the variable's own."""
        attributes, key = vars(self.optimizer), self.optimizer._var_key

        def step(gradient: Any, variable: Any, learning_rate: Any) -> Any:
            lag, shared = self._lags.get(key(variable), 0), attributes["_iterations"]
            if not lag:
                return update_step(gradient, variable, learning_rate)
            attributes["_iterations"] = shared - lag
            try:
                return update_step(gradient, variable, learning_rate)
            finally:
                attributes["_iterations"] = shared

        return step

    def begin(self, index: int, starts: Sequence[int]) -> None:
        """Sets the weight decay of a phase, and the variables' counts of steps.

        Args:
            index: the phase.
            starts: the optimizer's count of steps at the start of each phase up to this one.
        """
        decay = self.phases[index].weight_decay
        self._set_decay(self.weight_decay if decay is None else decay)
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        self._lags = {
            self.optimizer._var_key(member.variable): sum(
                length for length, is_trained in zip(lengths, member.is_trained, strict=False) if not is_trained
            )
            for member in self.members
        }

    def _set_decay(self, value: float | None) -> None:
        if value != self.optimizer.weight_decay and (value or self.optimizer.weight_decay):
            self.optimizer.weight_decay = value

    def end(self) -> None:
        """Restores the optimizer's weight decay and its single count of steps."""
        self._set_decay(self.weight_decay)
        vars(self.optimizer).pop("update_step", None)
