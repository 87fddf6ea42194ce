"""Learning-rate schedulers for torch optimizers: thin wrappers of `paceline.core.schedules`, plateau and greedy.

`get_scheduler` creates any of them by name; each `get_*_schedule*` function creates one from its own arguments.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.optional import LateModule
from paceline.core.spelling import nearest
from paceline.pytorch.optim.adafactor import AdafactorSchedule
from paceline.pytorch.optim.greedy import GreedyLR

if TYPE_CHECKING:
    from paceline.core import schedules
else:
    schedules = LateModule("paceline.core.schedules")

logger = logging.getLogger(__name__)


class MultiplierLR(LambdaLR):
    """Multiplies every group's initial learning rate by one function of the step.

    It has the type, attributes and saved state of `torch.optim.lr_scheduler.LambdaLR`, but is about five times as fast:
    the factor is computed once for all groups, and `optimizer.step` is not wrapped (torch's schedulers wrap it to warn
    about calls in the wrong order, which costs time at each step). A group added to the optimizer later joins at the
    next `step`; the learning rate with which it was added is its initial one.

    Args:
        optimizer: the optimizer whose groups' "lr" (float or 1-element tensor, filled in place) is set.
        factor: `(step, 0-based) -> factor`. The scheduler can be pickled only if this function can.
        last_epoch: number of steps already taken, minus one; -1 starts a run, other values need "initial_lr" in each
            group.

    Raises:
        TypeError: `optimizer` is not a torch optimizer.
        KeyError: `last_epoch` is not -1 and a group lacks "initial_lr".
    """

    def __init__(self, optimizer: Optimizer, factor: schedules.Multiplier, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"a learning-rate scheduler needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.base_lrs: list[Any] = []
        for index, group in enumerate(optimizer.param_groups):
            if last_epoch != -1 and "initial_lr" not in group:
                raise KeyError(f"last_epoch={last_epoch} continues a run: param_groups[{index}] needs its 'initial_lr'")
            self._adopt(group)
        self.lr_lambdas = [factor] * len(optimizer.param_groups)
        self._factor = factor
        self.last_epoch = last_epoch
        self._initial_step()

    def _adopt(self, group: dict[str, Any]) -> None:
        if group["lr"] is None:
            raise ValueError(
                f"{type(self.optimizer).__name__} sets its learning rates itself (lr=None), so no schedule can scale "
                "them. Pass Trainer(optimizers=(optimizer, AdafactorSchedule(optimizer))), or an optimizer with lr=..."
            )
        self.base_lrs.append(_detached(group.setdefault("initial_lr", _detached(group["lr"]))))

    def step(self, epoch: int | None = None) -> None:
        """Sets each group's rate for the next optimizer step, or for the step `epoch` if given."""
        self._step_count += 1
        self.last_epoch = step = self.last_epoch + 1 if epoch is None else epoch
        factor = self._factor(step)
        groups = self.optimizer.param_groups
        rates: list[Any] = []
        for base, group in zip(self.base_lrs, groups, strict=False):
            rate = base * factor
            if type(group["lr"]) is float:
                group["lr"] = rate
            else:
                _set_rate(group, rate)
            rates.append(rate)
        self._last_lr = rates
        if len(rates) != len(groups):
            self._join(groups[len(rates) :], factor)

    def compose(self, change: Callable[[schedules.Multiplier], schedules.Multiplier]) -> None:
        """Replaces the factor by a function of it, from the next step on."""
        self._factor = change(self._factor)
        self.lr_lambdas = [self._factor] * len(self.lr_lambdas)

    def _join(self, groups: list[dict[str, Any]], factor: float) -> None:
        for group in groups:
            self._adopt(group)
            self.lr_lambdas.append(self._factor)
            rate = self.base_lrs[-1] * factor
            _set_rate(group, rate)
            self._last_lr.append(rate)

    def get_lr(self) -> list[Any]:
        """Computes the rate of each group at the current step; `get_last_lr` returns them without computing."""
        factor = self._factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the rates as plain values; the functions are rebuilt from the arguments."""
        return {
            "base_lrs": [_detached(rate) for rate in self.base_lrs],
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [_detached(rate) for rate in self._last_lr],
            "lr_lambdas": [None] * len(self.base_lrs),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the position of a saved `LambdaLR` or `MultiplierLR`; the optimizer's own state contains its rates.

        Raises:
            ValueError: a key is missing, or the numbers of parameter groups differ.
        """
        missing = [key for key in ("base_lrs", "last_epoch") if key not in state_dict]
        if missing:
            raise ValueError(f"the saved scheduler has no {' and no '.join(missing)}: it is not from a step schedule")
        saved, present = len(state_dict["base_lrs"]), len(self.base_lrs)
        if saved != present:
            raise ValueError(f"the saved scheduler has {saved} parameter groups, this optimizer {present}")
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("_step_count", self.last_epoch + 1))
        self._last_lr = list(state_dict.get("_last_lr") or self.get_lr())


def _detached(rate: object) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Sets a group's rate; a tensor rate (capturable or compiled optimizers) is filled in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def follows_metrics(scheduler: Any) -> bool:
    """Returns True if `scheduler.step` takes a metric, so that evaluations step it instead of optimizer steps."""
    if isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)):
        return True
    if isinstance(scheduler, LambdaLR):
        return False
    try:
        parameters = list(inspect.signature(scheduler.step).parameters.values())
    except (AttributeError, TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0].name == "metrics" and parameters[0].default is inspect.Parameter.empty


# the callers pass all of their parameters by locals(), which contains nothing else at their start
def _scheduled(name: str, optimizer: Optimizer, last_epoch: int = -1, **options: Any) -> MultiplierLR:
    rate = optimizer.defaults.get("lr") if isinstance(optimizer, Optimizer) else None
    lr_init = None if rate is None else float(rate)
    return MultiplierLR(optimizer, schedules.multiplier(name, lr_init=lr_init, **options), last_epoch)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> MultiplierLR:
    """Returns a schedule that keeps the optimizer's learning rate."""
    return _scheduled("constant", **locals())


def get_constant_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.ConstantWithWarmup`."""
    return _scheduled("constant_with_warmup", **locals())


def get_linear_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.Linear`."""
    return _scheduled("linear", **locals())


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.Cosine`."""
    return _scheduled("cosine", **locals())


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: int = 1,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.CosineWithRestarts`."""
    return _scheduled("cosine_with_restarts", **locals())


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.Polynomial`.

    `lr_end` is relative to the optimizer's default learning rate.
    """
    return _scheduled("polynomial", **locals())


def get_inverse_sqrt_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    timescale: int | None = None,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.InverseSqrt`."""
    return _scheduled("inverse_sqrt", **locals())


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.CosineWithMinimum`.

    Exactly one of `min_lr` and `min_lr_rate` is required.
    """
    return _scheduled("cosine_with_min_lr", **locals())


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.CosineWithMinimumAndWarmupRate`.

    Exactly one of `min_lr` and `min_lr_rate` is required.
    """
    return _scheduled("cosine_warmup_with_min_lr", **locals())


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> MultiplierLR:
    """Returns the schedule of `paceline.core.schedules.WarmupStableDecay`."""
    return _scheduled("warmup_stable_decay", **locals())


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """Returns torch's `ReduceLROnPlateau` with these arguments; it is stepped with a metric."""
    return ReduceLROnPlateau(optimizer, **kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> GreedyLR:
    """Returns `GreedyLR` with these arguments; it is stepped with a metric."""
    return GreedyLR(optimizer, **kwargs)


def get_adafactor_schedule(optimizer: Optimizer, initial_lr: float = 0.0) -> AdafactorSchedule:
    """Returns an `AdafactorSchedule`, which reports the rates of an `Adafactor` that sets them itself."""
    return AdafactorSchedule(optimizer, initial_lr)


METRIC_SCHEDULES: dict[str, Callable[..., LRScheduler]] = {
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "greedy": GreedyLR,
}
"""Name in `lr_scheduler_type` -> scheduler that is stepped with a metric."""


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Returns a scheduler by its name in `lr_scheduler_type`.

    Args:
        name: a key of `paceline.core.schedules.SCHEDULES` or `METRIC_SCHEDULES`, or an enum member with that value.
        optimizer: the optimizer whose rates it sets.
        num_warmup_steps, num_training_steps: in optimizer steps; not all schedules require them.
        scheduler_specific_kwargs: `lr_scheduler_kwargs`.

    Raises:
        ValueError: the name is unknown, a required number of steps is missing, or a value is invalid.
        TypeError: the schedule does not have an option; the message suggests the nearest one.
    """
    name = str(getattr(name, "value", name))
    options = dict(scheduler_specific_kwargs or {})
    if name not in schedules.SCHEDULES and name not in METRIC_SCHEDULES:
        known = nearest(name, [*schedules.SCHEDULES, *METRIC_SCHEDULES])
        raise ValueError(f"lr_scheduler_type={name!r} is no known schedule; {known}")
    # schedule-free optimizers warm up themselves
    warms_up = any("warmup_steps" in group for group in optimizer.param_groups)
    if num_warmup_steps and not warms_up and (name in METRIC_SCHEDULES or name == "constant"):
        logger.warning(
            "The %s schedule has no warm-up: warmup_steps (%s) has no effect.%s",
            name,
            num_warmup_steps,
            ' lr_scheduler_type="constant_with_warmup" has one.' if name == "constant" else "",
        )
    if name in METRIC_SCHEDULES:
        return _metric_driven(name, optimizer, options)
    return _scheduled(
        name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps, **options
    )


def _metric_driven(name: str, optimizer: Optimizer, options: dict[str, Any]) -> LRScheduler:
    scheduler = METRIC_SCHEDULES[name]
    known = [parameter for parameter in inspect.signature(scheduler).parameters if parameter != "optimizer"]
    for option in options:
        if option not in known:
            hint = nearest(option, known)
            raise TypeError(f"lr_scheduler_kwargs: the {name} schedule has no option {option!r}; {hint}")
    return scheduler(optimizer, **options)
