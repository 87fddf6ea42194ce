"""Learning-rate schedules as pure functions of the optimizer step.

Each closed-form schedule is a small frozen dataclass. Its fields are its options. Calling it with a step (int, 0-based)
returns the factor (float) that multiplies a parameter group's initial learning rate. Instances can be pickled, compare
by value and are framework-independent. To add a schedule: write a dataclass and add it to `SCHEDULES`.

Shared fields:
    num_warmup_steps: optimizer steps that rise from 0 to the full rate.
    num_training_steps: optimizer steps of the whole run, warm-up included.
    num_cycles: periods of the cosine after the warm-up; 0.5 is one decay from 1 to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from paceline.core.spelling import nearest

Multiplier = Callable[[int], float]

SHAPES = ("linear", "cosine", "1-sqrt")


def _rise(step: int, num_warmup_steps: int) -> float:
    return step / max(1, num_warmup_steps)


def _run_fraction(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _wave(num_cycles: float, fraction: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * fraction))


@dataclass(frozen=True)
class Constant:
    """The constant factor 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class ConstantWithWarmup:
    """Linear warm-up, then 1."""

    num_warmup_steps: int

    def __call__(self, step: int) -> float:
        return _rise(step, self.num_warmup_steps) if step < self.num_warmup_steps else 1.0


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then a linear decay to 0 at `num_training_steps`; 0 beyond."""

    num_warmup_steps: int
    num_training_steps: int

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        left = (self.num_training_steps - step) / max(1, self.num_training_steps - self.num_warmup_steps)
        return left if left > 0.0 else 0.0


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then a cosine decay."""

    num_warmup_steps: int
    num_training_steps: int
    num_cycles: float = 0.5

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return _rise(step, self.num_warmup_steps)
        return max(0.0, _wave(self.num_cycles, _run_fraction(step, self.num_warmup_steps, self.num_training_steps)))


@dataclass(frozen=True)
class CosineWithRestarts:
    """Linear warm-up, then `num_cycles` cosine decays from 1 to 0, each restarting at 1 (SGDR, arXiv:1608.03983)."""

    num_warmup_steps: int
    num_training_steps: int
    num_cycles: float = 1

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return _rise(step, self.num_warmup_steps)
        fraction = _run_fraction(step, self.num_warmup_steps, self.num_training_steps)
        if fraction >= 1.0:
            return 0.0
        return max(0.0, _wave(0.5, (self.num_cycles * fraction) % 1.0))


@dataclass(frozen=True)
class Polynomial:
    """Linear warm-up, then a decay to the learning rate `lr_end` along `(1 - fraction) ** power`.

    Fields:
        lr_init: the initial learning rate, required because `lr_end` is absolute.
    """

    num_warmup_steps: int
    num_training_steps: int
    lr_init: float
    lr_end: float = 1e-7
    power: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr_init > self.lr_end:
            raise ValueError(f"lr_end={self.lr_end} must be below the learning rate, {self.lr_init}")

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return _rise(step, self.num_warmup_steps)
        if step > self.num_training_steps:
            return self.lr_end / self.lr_init
        left = 1.0 - _run_fraction(step, self.num_warmup_steps, self.num_training_steps)
        return float(((self.lr_init - self.lr_end) * left**self.power + self.lr_end) / self.lr_init)


@dataclass(frozen=True)
class InverseSqrt:
    """Linear warm-up, then `1 / sqrt(1 + steps since the warm-up / timescale)`.

    Fields:
        timescale: in steps; None takes the warm-up's length, or 10,000 without warm-up.
    """

    num_warmup_steps: int
    timescale: int | None = None

    def __post_init__(self) -> None:
        if self.timescale is not None and self.timescale <= 0:
            raise ValueError(f"timescale={self.timescale} must be a positive number of steps, or None")

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return _rise(step, self.num_warmup_steps)
        timescale = self.timescale or self.num_warmup_steps or 10_000
        return 1.0 / math.sqrt((step - self.num_warmup_steps + timescale) / timescale)


@dataclass(frozen=True)
class CosineWithMinimum:
    """Linear warm-up from 0, then a cosine between 1 and `min_lr_rate`, a fraction of the initial learning rate."""

    num_warmup_steps: int
    num_training_steps: int
    min_lr_rate: float
    num_cycles: float = 0.5

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return _rise(step, self.num_warmup_steps)
        wave = _wave(self.num_cycles, _run_fraction(step, self.num_warmup_steps, self.num_training_steps))
        return max(0.0, wave * (1.0 - self.min_lr_rate) + self.min_lr_rate)


@dataclass(frozen=True)
class CosineWithMinimumAndWarmupRate:
    """Linear warm-up from `warmup_lr_rate`, then a cosine between 1 and `min_lr_rate`; the rate is never 0.

    Fields:
        warmup_lr_rate: factor at step 0. None starts at `1 / num_warmup_steps`.
    """

    num_warmup_steps: int
    num_training_steps: int
    min_lr_rate: float
    num_cycles: float = 0.5
    warmup_lr_rate: float | None = None

    def __call__(self, step: int) -> float:
        warmup, start = self.num_warmup_steps, self.warmup_lr_rate
        if step < warmup:
            if start is None:
                return (step + 1) / max(1, warmup)
            return start + (1.0 - start) * step / max(1, warmup - 1)
        # One step ahead of CosineWithMinimum: the last step of the run is at the minimum.
        wave = _wave(self.num_cycles, _run_fraction(step + 1, warmup, self.num_training_steps))
        return max(0.0, wave * (1.0 - self.min_lr_rate) + self.min_lr_rate)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Warm-up from `min_lr_ratio` to 1, a plateau at 1, a decay back to `min_lr_ratio` (arXiv:2404.06395).

    Fields:
        num_stable_steps: the plateau's length; None takes `num_training_steps` less warm-up and decay.
        warmup_type, decay_type: "linear", "cosine" or "1-sqrt".
        num_cycles: periods of a cosine decay.
    """

    num_warmup_steps: int
    num_decay_steps: int
    num_training_steps: int | None = None
    num_stable_steps: int | None = None
    warmup_type: str = "linear"
    decay_type: str = "cosine"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5

    def __post_init__(self) -> None:
        for option, shape in (("warmup_type", self.warmup_type), ("decay_type", self.decay_type)):
            if shape not in SHAPES:
                raise ValueError(f"{option}={shape!r} is not one of {', '.join(map(repr, SHAPES))}")
        if self.num_stable_steps is not None:
            return
        if self.num_training_steps is None:
            raise ValueError("the plateau has no length: give num_stable_steps, or num_training_steps")
        stable = self.num_training_steps - self.num_warmup_steps - self.num_decay_steps
        if stable < 0:
            raise ValueError(
                f"num_warmup_steps={self.num_warmup_steps} and num_decay_steps={self.num_decay_steps} "
                f"are more than num_training_steps={self.num_training_steps}: shorten one of them"
            )
        object.__setattr__(self, "num_stable_steps", stable)

    def __call__(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return self._above_minimum(self._risen(_rise(step, self.num_warmup_steps)))
        since_plateau = step - self.num_warmup_steps - (self.num_stable_steps or 0)
        if since_plateau < 0:
            return 1.0
        if since_plateau >= self.num_decay_steps:
            return self.min_lr_ratio
        return self._above_minimum(self._fallen(since_plateau / max(1, self.num_decay_steps)))

    def _above_minimum(self, factor: float) -> float:
        return max(0.0, factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio)

    def _risen(self, fraction: float) -> float:
        if self.warmup_type == "linear":
            return fraction
        if self.warmup_type == "cosine":
            return 1.0 - _wave(0.5, fraction)
        return 1.0 - math.sqrt(1.0 - fraction)

    def _fallen(self, fraction: float) -> float:
        if self.decay_type == "linear":
            return 1.0 - fraction
        if self.decay_type == "cosine":
            return _wave(self.num_cycles, fraction)
        return 1.0 - math.sqrt(fraction)


SCHEDULES: dict[str, Callable[..., Multiplier]] = {
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "constant": Constant,
    "constant_with_warmup": ConstantWithWarmup,
    "inverse_sqrt": InverseSqrt,
    "cosine_with_min_lr": CosineWithMinimum,
    "cosine_warmup_with_min_lr": CosineWithMinimumAndWarmupRate,
    "warmup_stable_decay": WarmupStableDecay,
}
"""Maps names in `lr_scheduler_type` to dataclasses of closed-form schedules."""


@dataclass(frozen=True)
class Settled:
    """Another schedule until a step, then a line to a constant factor.

    Attributes:
        before: the schedule until `start`.
        start: the first step after it.
        anneal_steps: steps of the line; 0 changes the factor at once.
        level: the constant factor.
    """

    before: Multiplier
    start: int
    anneal_steps: int
    level: float

    def __call__(self, step: int) -> float:
        if step < self.start:
            return self.before(step)
        if step >= self.start + self.anneal_steps:
            return self.level
        first = self.before(self.start)
        return first + (self.level - first) * (step - self.start) / self.anneal_steps


def multiplier(
    name: str, *, num_warmup_steps: int | None = None, num_training_steps: int | None = None, **options: Any
) -> Multiplier:
    """Returns the closed-form schedule `name` as a function step -> factor of the initial learning rate.

    Args:
        name: a key of `SCHEDULES`.
        num_warmup_steps, num_training_steps: optimizer steps; ignored by schedules without these fields.
        options: the schedule's other fields. Every schedule accepts `lr_init`, the initial learning rate; an absolute
            `lr_end` or `min_lr` requires it. `min_lr` is an alternative to `min_lr_rate`.

    Raises:
        ValueError: unknown name, a missing number of steps, or an invalid value.
        TypeError: an unknown option of this schedule; the message names the closest one.
    """
    name = str(getattr(name, "value", name))  # an enum member means its value
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise ValueError(f"lr_scheduler_type={name!r} is no closed-form schedule; {nearest(name, SCHEDULES)}")
    known = {field.name: field for field in fields(schedule)}  # type: ignore[arg-type]
    if "min_lr_rate" in known:
        options = _with_minimum_rate(name, options)
    if "lr_init" not in known:
        options.pop("lr_init", None)
    unknown = sorted(set(options) - set(known))
    if unknown:
        hint = nearest(unknown[0], set(known) - {"num_warmup_steps", "num_training_steps", "lr_init"})
        raise TypeError(f"lr_scheduler_kwargs: the {name} schedule has no option {unknown[0]!r}; {hint}")
    for steps, value in (("num_warmup_steps", num_warmup_steps), ("num_training_steps", num_training_steps)):
        if steps in known and value is not None:
            options[steps] = value
    missing = [key for key, field in known.items() if field.default is MISSING and key not in options]
    if missing:
        raise ValueError(f"the {name} schedule needs {' and '.join(missing)}")
    return schedule(**options)


def _with_minimum_rate(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` with an absolute `min_lr` converted to `min_lr_rate`; exactly one of the two is required."""
    options = dict(options)
    min_lr, min_lr_rate, lr_init = (options.pop(key, None) for key in ("min_lr", "min_lr_rate", "lr_init"))
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError(f"the {name} schedule needs exactly one of min_lr and min_lr_rate in lr_scheduler_kwargs")
    if min_lr is not None:
        if not lr_init:
            raise ValueError(f"min_lr={min_lr} needs the initial learning rate: give lr_init, or min_lr_rate instead")
        min_lr_rate = min_lr / lr_init
    options["min_lr_rate"] = float(min_lr_rate)
    return options
