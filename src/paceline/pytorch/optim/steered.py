"""Changes of learning rate, weight decay and clipping while a run trains, for optimizers and schedules of torch.

A learning rate is changed where schedules store it: in the optimizer's groups and in the schedule's own rates. Every
later value of the schedule is then the former one times the factor, whether it is computed from the step or from the
current rate, and a checkpoint of optimizer and schedule holds the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from paceline.core.steering import rate_factor
from paceline.pytorch.optim.greedy import GreedyLR
from paceline.pytorch.optim.groups import INITIAL_DECAY
from paceline.pytorch.optim.layerwise import LayerwiseOptimizer, steps_in_backward
from paceline.pytorch.optim.schedulers import MultiplierLR

# the attributes of a schedule that are learning rates; those of metric-driven ones exclude the bounds, which are limits
RATES: dict[type, tuple[str, ...]] = {
    GreedyLR: ("_init_lrs",),
    LambdaLR: ("base_lrs",),
    MultiplierLR: ("base_lrs",),
    ReduceLROnPlateau: (),
    lr_scheduler.ConstantLR: ("base_lrs",),
    lr_scheduler.CosineAnnealingLR: ("base_lrs", "eta_min"),
    lr_scheduler.CosineAnnealingWarmRestarts: ("base_lrs", "eta_min"),
    lr_scheduler.CyclicLR: ("base_lrs", "max_lrs"),
    lr_scheduler.ExponentialLR: ("base_lrs",),
    lr_scheduler.LinearLR: ("base_lrs",),
    lr_scheduler.MultiStepLR: ("base_lrs",),
    lr_scheduler.MultiplicativeLR: ("base_lrs",),
    lr_scheduler.OneCycleLR: ("base_lrs",),
    lr_scheduler.PolynomialLR: ("base_lrs",),
    lr_scheduler.StepLR: ("base_lrs",),
}
CONTAINERS = (lr_scheduler.ChainedScheduler, lr_scheduler.SequentialLR)
RATES_OF_GROUPS: dict[type, tuple[str, ...]] = {
    lr_scheduler.OneCycleLR: ("initial_lr", "max_lr", "min_lr")
}  # which it stores in the optimizer


class TorchSettings:
    """The settings of a run with torch.

    Args:
        optimizer: the optimizer that is stepped.
        scheduler: its schedule, or None.
        read_norm, limit_norm: read and set the norm to which gradients are clipped; infinity disables clipping.
        clips_itself: the strategy's backend clips by its own configuration.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        *,
        read_norm: Callable[[], float],
        limit_norm: Callable[[float], None],
        clips_itself: bool,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.read_norm, self.limit_norm = read_norm, limit_norm
        self.clips_itself = clips_itself

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def obstacle(self, name: str) -> str | None:
        """Returns the reason why a setting cannot be changed, with the remedy; None if it can."""
        owner = type(self.optimizer).__name__
        if name == "learning_rate":
            if any(group.get("relative_step") or group.get("lr") is None for group in self.groups):
                return f"{owner} computes its learning rate itself: set relative_step=False and a learning_rate."
            return obstacle_of(self.scheduler)
        if name == "weight_decay":
            return self._obstacle_of_decay(owner)
        return self._obstacle_of_clipping(owner) if name == "max_grad_norm" else None

    def _obstacle_of_clipping(self, owner: str) -> str | None:
        if steps_in_backward(self.optimizer):
            return f"{owner} steps inside the backward pass and never holds all gradients: choose another optim."
        if self.clips_itself:
            return "DeepSpeed clips by its configuration, which is fixed: set max_grad_norm when the run starts."
        return None

    def _obstacle_of_decay(self, owner: str) -> str | None:
        if steps_in_backward(self.optimizer) and not isinstance(self.optimizer, LayerwiseOptimizer):
            return f"{owner} does not read it from its parameter groups: choose another optim."
        if not any(initial_decay(group) for group in self.groups):
            return (
                f"no parameter group of {owner} has weight decay, so it is not known which ones are to decay: start "
                "the run with a weight_decay above 0."
            )
        return None

    def read(self, name: str) -> float:
        """Returns the learning rate of the first group, the largest weight decay, or the clipping norm."""
        if name == "learning_rate":
            return float(self.groups[0]["lr"])
        if name == "weight_decay":
            return max(float(group.get("weight_decay", 0.0)) for group in self.groups)
        norm = self.read_norm()
        return 0.0 if math.isinf(norm) else norm

    def change(self, name: str, operation: str, value: float) -> None:
        """Sets or scales a setting from the next optimizer step on.

        Raises:
            ValueError: the learning rate is 0 and cannot be scaled to a value.
        """
        if name == "max_grad_norm":
            self.limit_norm(value or math.inf)  # the norm is logged even without clipping
        elif name == "weight_decay":
            self._change_decay(operation, value)
        else:
            self._change_rate(operation, value)

    def _change_rate(self, operation: str, value: float) -> None:
        before = self.read("learning_rate")
        factor = rate_factor(operation, value, before)
        for group in self.groups:
            is_first = operation == "set" and float(group["lr"]) == before
            put(group, "lr", value if is_first else group["lr"] * factor)  # exactly the requested value
        if self.scheduler is not None:
            rates = [group["lr"] for group in self.groups]
            for part in parts_of(self.scheduler):
                scale_schedule(part, factor)
                if hasattr(part, "_last_lr"):
                    part._last_lr = [copied(rate) for rate in rates]

    def _change_decay(self, operation: str, value: float) -> None:
        largest = max(initial_decay(group) for group in self.groups)
        for group in self.groups:
            initial = group.setdefault(INITIAL_DECAY, initial_decay(group))
            if operation == "scale":
                put(group, "weight_decay", group.get("weight_decay", 0.0) * value)
            elif initial:
                put(group, "weight_decay", value * (initial / largest))


def initial_decay(group: dict[str, Any]) -> float:
    """Returns a group's weight decay before the first change."""
    return float(group.get(INITIAL_DECAY, group.get("weight_decay", 0.0)))


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a number of a group; a tensor (of capturable or compiled optimizers) is filled in place."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = float(value)


def copied(rate: Any) -> Any:
    """Returns a rate that does not change with the group's."""
    return rate.clone() if isinstance(rate, Tensor) else rate


def parts_of(scheduler: Any) -> Iterator[Any]:
    """Yields a schedule, and the schedules that it consists of."""
    yield scheduler
    if type(scheduler) in CONTAINERS:
        for part in scheduler._schedulers:
            yield from parts_of(part)


def known_class(scheduler: Any) -> type | None:
    """Returns the class of `RATES` whose computation a schedule uses; None if there is none."""
    own = type(scheduler)
    known = next((each for each in own.__mro__ if each in RATES), None)
    methods = ("get_lr", "step", "_get_closed_form_lr")
    if known is None or any(getattr(own, name, None) is not getattr(known, name, None) for name in methods):
        return None
    return known


def obstacle_of(scheduler: Any) -> str | None:
    """Returns the reason why the rates of a schedule cannot be scaled; None if they can."""
    for part in parts_of(scheduler) if scheduler is not None else ():
        is_known = type(part) in CONTAINERS or callable(getattr(part, "scale_rates", None))
        if not is_known and known_class(part) is None:
            return (
                f"it is not known how {type(part).__name__} computes its rates: give the class a method "
                "scale_rates(factor) that scales the rates which it stores, or use a schedule of torch.optim or of "
                "lr_scheduler_type."
            )
    return None


def scale_schedule(scheduler: Any, factor: float) -> None:
    """Scales the rates that one schedule stores, other than those of the optimizer's groups."""
    scale = getattr(scheduler, "scale_rates", None)
    if callable(scale):
        scale(factor)
        return
    known = known_class(scheduler)
    if known is None:  # a container, whose parts are scaled
        return
    for name in RATES[known]:
        rates = getattr(scheduler, name)
        setattr(scheduler, name, [rate * factor for rate in rates] if isinstance(rates, list) else rates * factor)
    for key in RATES_OF_GROUPS.get(known, ()):
        for group in scheduler.optimizer.param_groups:
            put(group, key, group[key] * factor)
