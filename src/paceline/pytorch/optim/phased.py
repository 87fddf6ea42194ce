"""Parameters, optimizer groups and schedules of training phases.

The optimizer holds every parameter that some phase trains, in the same groups in every phase, so that a checkpoint of
any phase fits. A parameter that a phase freezes has no gradient, and its state is dropped when the phase begins; torch
makes the state of a parameter at its first step with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.phases import Phase
from paceline.core.phases.patterns import check_patterns, check_trained, matches, trained_in
from paceline.pytorch.model.blocks import repeated_blocks
from paceline.pytorch.optim.layerwise import steps_in_backward
from paceline.pytorch.optim.steered import put

DECAYED = "has_decay"
"""Key of a parameter group: True if the weight decay of a phase applies to it."""


@dataclass(frozen=True)
class Member:
    """A parameter of the model, and what each phase does with it.

    Attributes:
        names: its names, several if it is tied.
        parameter: the parameter.
        is_trained: for each phase, True if it is trained.
        rates: for each phase, (learning rate, factor); a rate of None is that of the optimizer's group.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    is_trained: tuple[bool, ...]
    rates: tuple[tuple[float | None, float], ...]


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns the names of each parameter of a model; tied parameters have several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def find_members(model: nn.Module, phases: Sequence[Phase]) -> list[Member]:
    """Returns the parameters that the user left trainable, with what each phase does with them.

    Raises:
        ValueError: a pattern matches no parameter, or a phase trains nothing.
    """
    names = names_of(model)
    every = [name for several in names.values() for name in several]
    check_patterns(phases, every, type(model).__name__)
    depths = [depth_factors(model, phase, names) for phase in phases]
    members = []
    for parameter, own in names.items():
        if not parameter.requires_grad:
            continue
        rates = tuple((rate_of(phase, own), depth[parameter]) for phase, depth in zip(phases, depths, strict=True))
        members.append(Member(tuple(own), parameter, trained_in(phases, own), rates))
    check_trained(phases, [member.is_trained for member in members])
    return members


def rate_of(phase: Phase, names: Sequence[str]) -> float | None:
    """Returns the learning rate of a phase for a parameter; None: that of the optimizer."""
    rate = phase.learning_rate
    if not isinstance(rate, Mapping):
        return rate
    return next((value for pattern, value in rate.items() if matches(names, (pattern,))), None)


def depth_factors(
    model: nn.Module, phase: Phase, names: Mapping[nn.Parameter, Sequence[str]]
) -> dict[nn.Parameter, float]:
    """Returns the factor of each parameter's rate by the depth of its block.

    The parameters of the last block and those registered after it have 1, each block before it once more the phase's
    `layer_decay`, and what is registered before the first block (embeddings) once more than that block.

    Raises:
        ValueError: the model has no sequence of blocks.
    """
    factor = phase.layer_decay
    if factor is None:
        return dict.fromkeys(names, 1.0)
    blocks = repeated_blocks(model)
    if len(blocks) < 2:
        raise ValueError(
            f"phases[{phase.name!r}].layer_decay={factor}: {type(model).__name__} has no sequence of blocks (an "
            "nn.ModuleList, or an nn.Sequential of modules of one class): set learning_rate={pattern: rate} instead."
        )
    depth_of = {parameter: index for index, (_, block) in enumerate(blocks) for parameter in block.parameters()}
    found: dict[nn.Parameter, float] = {}
    reached = False
    for parameter in names:
        reached = reached or parameter in depth_of
        depth = depth_of.get(parameter, len(blocks) - 1 if reached else -1)
        found[parameter] = factor ** (len(blocks) - 1 - depth)
    return found


def split_groups(optimizer: Optimizer, members: Sequence[Member], decayed: Collection[str], is_own: bool) -> None:
    """Splits the groups of an optimizer so that the parameters of each are treated alike in every phase.

    Args:
        optimizer: its groups are replaced.
        members: the parameters.
        decayed: names of the parameters with weight decay.
        is_own: the optimizer was made here; one of the user's keeps the decision which groups have weight decay.
    """
    known = {id(member.parameter): member for member in members}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[Any, dict[str, Any]] = {}
        for parameter in group["params"]:
            member = known.get(id(parameter))
            if member is None:
                parts.setdefault(None, {**group, "params": [], DECAYED: False})["params"].append(parameter)
                continue
            own = any(name in decayed for name in member.names) if is_own else group.get("weight_decay", 0) > 0
            has_decay = bool(group.get(DECAYED, own))
            key = (member.is_trained, member.rates, has_decay)
            parts.setdefault(key, {**group, "params": [], DECAYED: has_decay})["params"].append(parameter)
        groups += parts.values()
    optimizer.param_groups[:] = groups


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses optimizers whose state cannot be dropped for single parameters.

    Raises:
        UnsupportedOption: the optimizer steps in the backward pass, keeps two sets of weights, or sets its own rates.
    """
    name = type(optimizer).__name__
    remedy = "choose another optim, such as 'adamw_torch'."
    if steps_in_backward(optimizer):
        raise UnsupportedOption(f"phases with {name}, which steps inside the backward pass: {remedy}")
    if callable(getattr(optimizer, "eval", None)):
        raise UnsupportedOption(f"phases with {name}, which keeps two sets of weights: {remedy}")
    if any(group.get("lr") is None or group.get("relative_step") for group in optimizer.param_groups):
        raise UnsupportedOption(f"phases with {name}, which sets its learning rates itself: {remedy}")


class PhasedOptimizer:
    """Sets the groups of an optimizer for each phase.

    Args:
        optimizer: with the groups of `split_groups`.
        members: the parameters.
        phases: the phases.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], phases: Sequence[Phase]) -> None:
        self.optimizer, self.phases = optimizer, phases
        known = {id(member.parameter): member for member in members}
        self.members = [known.get(id(group["params"][0])) if group["params"] else None for group in self.groups]
        self.bases = [float(group.get("initial_lr", group["lr"])) for group in self.groups]
        self.decays = [float(group.get("weight_decay", 0.0)) for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        found: list[dict[str, Any]] = self.optimizer.param_groups
        return found

    def live(self, index: int) -> list[int]:
        """Returns the indices of the groups that a phase trains."""
        return [number for number, member in enumerate(self.members) if member is not None and member.is_trained[index]]

    def begin(self, index: int) -> None:
        """Sets the base rates and decays of a phase, and drops the state of the parameters that it freezes."""
        phase, rates = self.phases[index], []
        for group, member, base, decay in zip(self.groups, self.members, self.bases, self.decays, strict=True):
            own, factor = member.rates[index] if member is not None else (None, 1.0)
            rate = (base if own is None else own) * factor
            put(group, "lr", rate)
            group["initial_lr"] = float(rate)
            rates.append(float(rate))
            if group[DECAYED]:
                put(group, "weight_decay", decay if phase.weight_decay is None else phase.weight_decay)
            if member is not None and not member.is_trained[index]:
                for parameter in group["params"]:
                    self.optimizer.state.pop(parameter, None)
        # schedules with an absolute last rate read it there
        self.optimizer.defaults["lr"] = max(rates[number] for number in self.live(index))

    def end(self) -> None:
        """Restores the rates and decays that the optimizer had before the run."""
        for group, base, decay in zip(self.groups, self.bases, self.decays, strict=True):
            put(group, "lr", base)
            group["initial_lr"] = float(base)
            if group[DECAYED]:
                put(group, "weight_decay", decay)


class PhasedSchedule:
    """The schedule of the phase in progress, under one name for the whole run.

    Args:
        optimizer: its parameter groups are the schedule's.
        make: makes the schedule of a phase.
        live: `(phase) -> groups that it trains`.
    """

    shows_rates = True  # the first group of the optimizer may be frozen: the log asks for `get_last_lr`

    def __init__(self, optimizer: Optimizer, make: Callable[[int], Any], live: Callable[[int], list[int]]) -> None:
        self.optimizer, self._make, self._live = optimizer, make, live
        self.index = 0
        self.schedule: Any = None
        self._shown = 0

    def begin(self, index: int) -> None:
        """Starts the schedule of a phase; the groups have its base rates."""
        self.index, self.schedule = index, self._make(index)
        live = self._live(index)
        self._shown = max(live, key=lambda number: self.schedule.base_lrs[number])

    def step(self) -> None:
        """Sets the rates of the next optimizer step."""
        self.schedule.step()

    def get_last_lr(self) -> list[Any]:
        """Returns the rates of all groups, after the largest one that is trained."""
        rates = self.schedule.get_last_lr()
        return [rates[self._shown], *rates]

    def state_dict(self) -> dict[str, Any]:
        """Returns the phase and the state of its schedule."""
        return {"phase": self.index, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the schedule of the phase in progress.

        Raises:
            ValueError: the state is of another phase, or of a run without phases.
        """
        if state.get("phase") != self.index:
            raise ValueError(f"the saved schedule is of phase {state.get('phase')}, and the run is in {self.index}")
        self.schedule.load_state_dict(state["schedule"])
