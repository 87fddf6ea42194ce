"""Learning-rate schedules for Keras: every closed-form schedule of `paceline.core.schedules`, and linear warm-up.

A schedule is computed on the host once, for all updates of the run, and looked up in the graph: the same numbers as on
the torch side, whatever the schedule. It takes 4 bytes per update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.schedules import multiplier
from paceline.tf.framework import keras, tf

LearningRateSchedule: Any = keras.optimizers.schedules.LearningRateSchedule


class StepSchedule(LearningRateSchedule):  # type: ignore[misc]
    """A closed-form schedule by its name.

    Args:
        name: as in `lr_scheduler_type`.
        learning_rate: the rate that the schedule multiplies.
        num_training_steps: updates of the run; beyond them the last rate stays.
        num_warmup_steps: updates of warm-up.
        options: the schedule's other settings, as in `lr_scheduler_kwargs`.

    Raises:
        ValueError, TypeError: as `paceline.core.schedules.multiplier`.
    """

    def __init__(
        self,
        name: str,
        learning_rate: float,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.learning_rate = str(name), float(learning_rate)
        self.num_training_steps, self.num_warmup_steps = int(num_training_steps), int(num_warmup_steps)
        self.options = dict(options or {})
        factor = multiplier(
            self.name,
            num_warmup_steps=self.num_warmup_steps,
            num_training_steps=self.num_training_steps,
            lr_init=self.learning_rate,
            **self.options,
        )
        self.rates = np.array(
            [self.learning_rate * factor(step) for step in range(self.num_training_steps + 1)], dtype=np.float32
        )

    def __call__(self, step: Any) -> Any:
        """The rate of an update, 0-based: a float32 scalar."""
        place = tf.minimum(tf.cast(step, tf.int64), self.num_training_steps)
        return tf.gather(tf.constant(self.rates), place)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal schedule."""
        return {
            "name": self.name,
            "learning_rate": self.learning_rate,
            "num_training_steps": self.num_training_steps,
            "num_warmup_steps": self.num_warmup_steps,
            "options": self.options,
        }


class WarmUp(LearningRateSchedule):  # type: ignore[misc]
    """A rise from 0 to the rate, then another schedule, which counts from the end of the rise.

    Args:
        initial_learning_rate: what the rise ends at.
        decay_schedule_fn: step -> rate, for the updates after it.
        warmup_steps: updates of the rise.
        power: the rise follows `(step / warmup_steps) ** power`.
        name: of the operations.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_schedule_fn: Any,
        warmup_steps: int,
        power: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.initial_learning_rate, self.decay_schedule_fn = initial_learning_rate, decay_schedule_fn
        self.warmup_steps, self.power, self.name = warmup_steps, power, name

    def __call__(self, step: Any) -> Any:
        """The rate of an update, 0-based: a float32 scalar."""
        with tf.name_scope(self.name or "WarmUp"):
            done, length = tf.cast(step, tf.float32), tf.cast(self.warmup_steps, tf.float32)
            rising = self.initial_learning_rate * tf.pow(done / tf.maximum(length, 1.0), self.power)
            after = tf.cast(self.decay_schedule_fn(step - self.warmup_steps), tf.float32)
            return tf.where(done < length, rising, after)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal schedule."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_schedule_fn": self.decay_schedule_fn,
            "warmup_steps": self.warmup_steps,
            "power": self.power,
            "name": self.name,
        }


def schedule_of(args: Any, num_training_steps: int) -> StepSchedule:
    """The schedule that the arguments name, for a run of so many updates."""
    name, options = str(args.lr_scheduler_type), dict(args.lr_scheduler_kwargs or {})
    if args.poly_power != 1.0:
        name, options = "polynomial", {"lr_end": 0.0, **options, "power": args.poly_power}
    warmup = args.get_warmup_steps(num_training_steps)
    return StepSchedule(name, args.learning_rate, num_training_steps, warmup, options)
