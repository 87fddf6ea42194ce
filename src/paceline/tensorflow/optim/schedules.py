"""Learning-rate schedules for Keras: every closed-form schedule of `paceline.core.schedules`, and linear warm-up.

A schedule is computed on the host for all optimizer steps of the run, with the same numbers as on the torch side, and
looked up in the graph. For a run of more than a million optimizer steps the host computes each rate when it is read,
which takes some microseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.schedules import multiplier
from paceline.tensorflow.framework import keras, tf

MAX_TABLE = 2**20  # optimizer steps whose rates are held in memory, 4 bytes each

LearningRateSchedule: Any = keras.optimizers.schedules.LearningRateSchedule


class StepSchedule(LearningRateSchedule):  # type: ignore[misc]
    """A closed-form schedule by its name.

    Its rates can be scaled during a run, and steps that are skipped count as steps (`count_skipped`). Both are held in
    variables, which a compiled optimizer step reads each time.

    Args:
        name: as in `lr_scheduler_type`.
        learning_rate: the rate that the schedule multiplies.
        num_training_steps: optimizer steps of the run; later steps keep the last rate.
        num_warmup_steps: optimizer steps of the warm-up.
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
        self.name = str(name)
        self.learning_rate = float(learning_rate)
        self.num_training_steps = int(num_training_steps)
        self.num_warmup_steps = int(num_warmup_steps)
        self.options = dict(options or {})
        self.factor = multiplier(
            self.name,
            num_warmup_steps=self.num_warmup_steps,
            num_training_steps=self.num_training_steps,
            lr_init=self.learning_rate,
            **self.options,
        )
        size = self.num_training_steps + 1
        self.rates = np.fromiter(map(self.rate, range(size)), np.float32, size) if size <= MAX_TABLE else None
        self.scale = tf.Variable(1.0, trainable=False, dtype=tf.float32)  # of all rates, changed during a run
        # steps that the optimizer did not apply, and did not count
        once = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.skipped = tf.Variable(0, trainable=False, dtype=tf.int64, aggregation=once)

    def rate(self, step: int) -> float:
        """Returns the rate of an optimizer step, 0-based."""
        return self.learning_rate * self.factor(int(step))

    def __call__(self, step: object) -> Any:
        """Returns the rate of an optimizer step, 0-based: a float32 scalar."""
        place = tf.minimum(tf.cast(step, tf.int64) + self.skipped, self.num_training_steps)
        if self.rates is not None:
            return tf.gather(tf.constant(self.rates), place) * self.scale
        rate = tf.numpy_function(lambda step: np.float32(self.rate(step)), [place], tf.float32, stateful=False)
        return tf.ensure_shape(rate, []) * self.scale

    def scale_rates(self, factor: float) -> None:
        """Multiplies the rates from the next optimizer step on."""
        self.scale.assign(float(self.scale.numpy()) * factor)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale of the rates, and the number of skipped steps."""
        return {"scale": float(self.scale.numpy()), "skipped": int(self.skipped.numpy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the scale of the rates, and the number of skipped steps, which earlier versions did not save."""
        self.scale.assign(state["scale"])
        self.skipped.assign(state.get("skipped", 0))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal schedule."""
        return config_of(self)


def count_skipped(optimizer: object, number: Any) -> None:
    """Lets the schedule of an optimizer go on by steps that were not applied, which the optimizer does not count.

    A schedule that is no `StepSchedule` follows the optimizer's count alone.

    Args:
        optimizer: a Keras optimizer, which may be inside a LossScaleOptimizer.
        number: the steps, a whole number or an int64 scalar.
    """
    schedule = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    if isinstance(schedule, StepSchedule):
        schedule.skipped.assign_add(number)


class WarmUp(LearningRateSchedule):  # type: ignore[misc]
    """A warm-up from 0 to the initial rate, followed by another schedule that counts from the end of the warm-up.

    Args:
        initial_learning_rate: the rate at the end of the warm-up.
        decay_schedule_fn: step -> rate, for the optimizer steps after the warm-up.
        warmup_steps: optimizer steps of the warm-up.
        power: the warm-up follows `(step / warmup_steps) ** power`.
        name: name scope of the operations.
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
        self.initial_learning_rate = initial_learning_rate
        self.decay_schedule_fn = decay_schedule_fn
        self.warmup_steps = warmup_steps
        self.power = power
        self.name = name

    def __call__(self, step: Any) -> Any:
        """Returns the rate of an optimizer step, 0-based: a float32 scalar."""
        with tf.name_scope(self.name or "WarmUp"):
            done, length = tf.cast(step, tf.float32), tf.cast(self.warmup_steps, tf.float32)
            rising = self.initial_learning_rate * tf.pow(done / tf.maximum(length, 1.0), self.power)
            after = tf.cast(self.decay_schedule_fn(step - self.warmup_steps), tf.float32)
            return tf.where(done < length, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal schedule."""
        return config_of(self)


def config_of(schedule: object) -> dict[str, Any]:
    """Returns the constructor arguments of an equal schedule, from the attributes of the same names."""
    return {name: getattr(schedule, name) for name in inspect.signature(type(schedule)).parameters}
