"""Learning-rate schedules that depend on evaluation results: torch's plateau schedule, and GreedyLR."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.choices import SchedulerType
from paceline.core.greedy import GreedyRule, beats, check_rule
from paceline.core.spelling import nearest

logger = logging.getLogger(__name__)

COUNTERS = ("best", "num_bad", "cooldown_left")


class FollowingSchedule:
    """A learning rate that depends on evaluation results, stored outside the optimizer's own variable.

    Attributes:
        learning_rate: the rate of the next optimizer step.
    """

    learning_rate: float

    def step(self, value: float, optimizer: object) -> None:
        """Records one evaluation, and changes the optimizer's rate if due."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the rate and the recorded evaluations as plain values."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state; the optimizer stores its rate in its own variable."""
        raise NotImplementedError


@dataclass(eq=False)
class PlateauSchedule(FollowingSchedule):
    """Multiplies the rate by `factor` after more than `patience` consecutive evaluations without improvement.

    Args:
        learning_rate: the initial rate.
        mode: "min" if a smaller metric is better, "max" if a larger one is.
        factor: below 1.
        patience: number of evaluations without improvement that are tolerated.
        threshold: smallest improvement over the best value that counts, as a share of the best value
            (`threshold_mode="rel"`) or as a difference ("abs").
        threshold_mode: "rel" or "abs".
        cooldown: number of evaluations to ignore after a change.
        min_lr: lower bound of the rate.
        eps: changes of the rate that are not larger than this are skipped.

    Raises:
        ValueError: a value is out of range.
    """

    learning_rate: float
    mode: str = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_rule(self.factor, self.mode, self.threshold_mode, "lr_scheduler_kwargs: ")
        self.learning_rate = float(self.learning_rate)
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_bad = self.cooldown_left = 0

    def step(self, value: float, optimizer: Any) -> None:
        """Records one evaluation, and changes the optimizer's rate if due."""
        if beats(value, self.best, mode=self.mode, threshold=self.threshold, threshold_mode=self.threshold_mode):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        if self.cooldown_left > 0:
            self.cooldown_left, self.num_bad = self.cooldown_left - 1, 0
        if self.num_bad <= self.patience:
            return
        self.cooldown_left, self.num_bad = self.cooldown, 0
        lower = max(self.learning_rate * self.factor, self.min_lr)
        if self.learning_rate - lower > self.eps:
            self.learning_rate = lower
            optimizer.learning_rate = lower
            logger.info("The metric does not improve (best: %s): the learning rate is now %.4e.", self.best, lower)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rate and the counters as plain values."""
        return {name: getattr(self, name) for name in ("learning_rate", *COUNTERS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state; the optimizer stores its rate in its own variable."""
        for name in ("learning_rate", *COUNTERS):
            setattr(self, name, state[name])


class GreedySchedule(GreedyRule, FollowingSchedule):
    """Raises the rate while a metric improves, and lowers it while it does not; see `paceline.core.greedy`.

    Args:
        learning_rate: the initial rate.
        options: options of `GreedyRule`, as in `lr_scheduler_kwargs`; `min_lr` and `max_lr` are numbers.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, learning_rate: float, **options: Any) -> None:
        self.learning_rate = float(learning_rate)
        super().__init__(1, **options)

    def scale_start(self, factor: float) -> None:
        """Scales the rate at which the schedule starts again after `reset_start` decreases."""
        self._init_lrs = [rate * factor for rate in self._init_lrs]
        self._last_lr = [self.learning_rate]

    def _rates(self) -> list[float]:
        return [self.learning_rate]

    def _set(self, index: int, rate: float) -> None:
        self.learning_rate = rate

    def step(self, value: float, optimizer: Any) -> None:
        """Records one evaluation, and changes the optimizer's rate if due."""
        before = self.learning_rate
        self.observe(value)
        if self.learning_rate != before:
            optimizer.learning_rate = self.learning_rate

    def state_dict(self) -> dict[str, Any]:
        """Returns every option, the rate and the recorded evaluations as plain values."""
        return self.export()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state; the optimizer stores its rate in its own variable."""
        self.take_up(state)


FOLLOWING: dict[str, tuple[Callable[..., FollowingSchedule], type]] = {  # name -> schedule, class that has its options
    str(SchedulerType.REDUCE_ON_PLATEAU): (PlateauSchedule, PlateauSchedule),
    str(SchedulerType.GREEDY): (GreedySchedule, GreedyRule),
}


def following_schedule(
    name: str, learning_rate: float, options: Mapping[str, Any], *, has_warmup: bool
) -> FollowingSchedule:
    """Returns a schedule of `FOLLOWING`.

    Args:
        name: as in `lr_scheduler_type`.
        learning_rate: the initial rate.
        options: as in `lr_scheduler_kwargs`.
        has_warmup: a warm-up is requested.

    Raises:
        TypeError: the schedule does not have an option.
        ValueError: a value is out of range, or a warm-up is requested, which these schedules lack.
    """
    if has_warmup:
        raise ValueError(f"lr_scheduler_type='{name}' has no warm-up: leave warmup_steps and warmup_ratio out.")
    kind, described = FOLLOWING[name]
    known = set(inspect.signature(described).parameters) - {"learning_rate", "num_groups"}
    for option in options.keys() - known:
        raise TypeError(f"lr_scheduler_kwargs: {name} has no option {option!r}; {nearest(option, known)}")
    return kind(learning_rate, **options)
