"""The choice of optimizer and schedule: those given, the compiled optimizer, or those that the arguments describe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.tensorflow.framework import keras
from paceline.tensorflow.optim.following import FOLLOWING, FollowingSchedule, following_schedule
from paceline.tensorflow.optim.schedules import StepSchedule

logger = logging.getLogger(__name__)

# optimizer options that conflict with a compiled optimizer, which has its own settings
SETTINGS = (
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "poly_power",
)


def optimizer_pair(given: object, has_init: bool) -> tuple[Any, Any]:
    """Checks and returns the (optimizer, schedule) that the Trainer was given.

    Args:
        given: the pair; each of the two may be None.
        has_init: `model_init` makes a new model in each `train`.

    Raises:
        TypeError: the value is not a pair, or its items are no Keras optimizer and schedule.
        RuntimeError: there is an optimizer, which would hold the variables of another model than the new one.
    """
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(
            f"optimizers is a {type(given).__name__}: expected a pair (optimizer, schedule), such as "
            "optimizers=(keras.optimizers.Adam(1e-3), None)."
        )
    optimizer, schedule = given
    if optimizer is not None and not all(hasattr(optimizer, name) for name in ("apply_gradients", "learning_rate")):
        raise TypeError(
            f"optimizers: {type(optimizer).__module__}.{type(optimizer).__name__} is no optimizer of Keras; give one, "
            "such as optimizers=(keras.optimizers.Adam(1e-3), None), or name one in optim."
        )
    if optimizer is not None and has_init:
        raise RuntimeError(
            "Passing a `model_init` is incompatible with providing the `optimizers` argument: an optimizer holds the "
            "variables of one model, and `model_init` makes a new one at each train: name it in `optim`, compile the "
            "model with it in `model_init`, or override `create_optimizer_and_scheduler`. A schedule alone is taken."
        )
    if schedule is not None and not callable(schedule) and not hasattr(schedule, "learning_rate"):
        raise TypeError(
            f"optimizers: the schedule {schedule!r:.80} cannot be called; give a "
            "keras.optimizers.schedules.LearningRateSchedule, or None for that of the arguments."
        )
    return optimizer, schedule


def compiled_optimizer(model: object) -> Any:
    """Returns the optimizer that a Keras 3 model was compiled with; None if it equals compile()'s default."""
    if not isinstance(model, keras.Model) or not model.compiled or model.optimizer is None:
        return None
    chosen = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # unwraps a LossScaleOptimizer
    return None if settings_of(chosen) == settings_of(keras.optimizers.RMSprop()) else model.optimizer


def settings_of(optimizer: Any) -> tuple[type, dict[str, Any]]:
    """Returns an optimizer's type and settings without its name; a learning rate that was changed later counts."""
    return type(optimizer), {**optimizer.get_config(), "name": None}


def choose_optimizer(model: object, *, optim: object, max_grad_norm: float | None, given: Mapping[str, Any]) -> Any:
    """Returns the compiled optimizer; None to use the one that the arguments describe.

    Args:
        model: any model.
        optim: the optimizer that the arguments name.
        max_grad_norm: gradients are clipped to this norm; 0 or None disables it.
        given: the options of `SETTINGS` whose value is not the default.

    Raises:
        UnsupportedOption: the model has a compiled optimizer, and the arguments describe one too.
    """
    found = compiled_optimizer(model)
    if found is None:
        if isinstance(model, keras.Model) and model.compiled and model.optimizer is not None:
            logger.warning(
                "The optimizer of compile() is RMSprop as it is by default: taken is %s, as the arguments say. "
                "optimizers=(keras.optimizers.RMSprop(), None) takes that one.",
                optim,
            )
        return None
    if given:
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UnsupportedOption(
            f"The model was compiled with optimizer={type(found).__name__}, which has its own settings, and the "
            f"arguments request {named}: leave these out, or compile(optimizer=None) to have what they describe."
        )
    if max_grad_norm:
        logger.warning(
            "The optimizer is the compiled %s. Its gradients are clipped to a norm of %s, as fit does not: "
            "max_grad_norm=0 leaves them as they are.",
            type(found).__name__,
            max_grad_norm,
        )
    return found


def described_schedule(
    name: str,
    learning_rate: float,
    options: Mapping[str, Any],
    *,
    num_training_steps: int,
    warmup_steps: Callable[[int], int],
    power: float,
) -> FollowingSchedule | StepSchedule:
    """Returns the schedule that the arguments describe.

    Args:
        name: as in `lr_scheduler_type`.
        learning_rate: the rate that the schedule multiplies, or the initial one.
        options: as in `lr_scheduler_kwargs`.
        num_training_steps: optimizer steps of the run.
        warmup_steps: `(optimizer steps of a run) -> warmup steps`.
        power: exponent of the decay, if not 1.
    """
    if name in FOLLOWING:
        return following_schedule(name, learning_rate, options, has_warmup=warmup_steps(1000) > 0)
    if power != 1.0:
        name, options = "polynomial", {"lr_end": 0.0, **options, "power": power}
    return StepSchedule(name, learning_rate, num_training_steps, warmup_steps(num_training_steps), options)
