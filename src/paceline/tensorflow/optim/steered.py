"""Changes of the learning rate while a run trains, for optimizers and schedules of Keras."""

from __future__ import annotations

from typing import Any

from paceline.core.steering import rate_factor
from paceline.tensorflow.optim.following import FollowingSchedule, GreedySchedule
from paceline.tensorflow.optim.schedules import LearningRateSchedule, StepSchedule

TRACED = "TensorFlow has compiled it into the optimizer step: set it in the arguments when the run starts."


class TFSettings:
    """The settings of a run with TensorFlow, of which the learning rate can be changed.

    Args:
        optimizer: the optimizer of the run.
        schedule: the schedule of the run, or None.
        num_workers: processes that train together.
    """

    def __init__(self, optimizer: Any, schedule: object, num_workers: int) -> None:
        self.optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        self.schedule = schedule
        self.follows = schedule if isinstance(schedule, FollowingSchedule) else None
        self.num_workers = num_workers

    def obstacle(self, name: str) -> str | None:
        """Returns the reason why a setting cannot be changed, or an action taken; None if it can."""
        if self.num_workers > 1:
            return f"the {self.num_workers} workers of TensorFlow do not exchange requests: stop and resume the run."
        if name in ("weight_decay", "max_grad_norm"):
            return TRACED
        rate = self.rate
        is_fixed = isinstance(rate, LearningRateSchedule) and not (
            isinstance(rate, StepSchedule) and rate is self.schedule
        )
        if name == "learning_rate" and is_fixed:
            return (
                f"the schedule {type(rate).__name__} is compiled into the optimizer step: name one in "
                "lr_scheduler_type, or give the optimizer a constant rate."
            )
        return None

    @property
    def rate(self) -> Any:
        """The schedule that the optimizer calls, or its variable."""
        rate = getattr(self.optimizer, "_learning_rate", self.optimizer.learning_rate)
        return rate if isinstance(rate, LearningRateSchedule) else self.optimizer.learning_rate

    @property
    def has_variable(self) -> bool:
        """True if the rate is a variable of the optimizer, which a checkpoint holds, and no schedule computes it."""
        return not isinstance(self.rate, LearningRateSchedule)

    def read(self, name: str) -> float:
        """Returns the learning rate of the next optimizer step."""
        rate = self.rate
        return float(rate(self.optimizer.iterations) if isinstance(rate, StepSchedule) else rate)

    def change(self, name: str, operation: str, value: float) -> None:
        """Sets or scales the learning rate from the next optimizer step on.

        Raises:
            ValueError: the rate is 0 and cannot be scaled to a value.
        """
        before, schedule = self.read(name), self.rate
        factor = rate_factor(operation, value, before)
        if isinstance(schedule, StepSchedule):
            schedule.scale_rates(factor)
            return
        self.optimizer.learning_rate = before * factor
        if self.follows is not None:
            self.follows.learning_rate *= factor
        if isinstance(self.follows, GreedySchedule):
            self.follows.scale_start(factor)
