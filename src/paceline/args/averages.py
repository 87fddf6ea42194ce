"""Averages of the weights: validation of `ema_decay`, `swa_start` and their settings, and their values for a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.args.sharding import is_xla_asked, wants_shards

EMA, SWA = "ema", "swa"
EMA_OPTION, SWA_OPTION = "ema_decay", "swa_start"


@dataclass(frozen=True)
class AverageSettings:
    """The settings of the average of one run.

    Attributes:
        kind: "ema" for an exponential moving average, "swa" for the plain mean.
        decay: share of the average that each optimizer step keeps (ema).
        has_warmup: the decay rises to its value with the number of steps (ema).
        start: first optimizer step that enters the average.
        every: optimizer steps from one update of the average to the next.
        on_host: the average is in host memory.
        rate: learning rate from the start on, as a multiple of `learning_rate`; None: that of the schedule (swa).
        anneal_steps: optimizer steps in which the learning rate moves to `rate` (swa).
    """

    kind: str
    decay: float = 0.0
    has_warmup: bool = False
    start: int = 0
    every: int = 1
    on_host: bool = False
    rate: float | None = None
    anneal_steps: int = 0

    @property
    def option(self) -> str:
        """Returns the option that requests the average, for messages."""
        return EMA_OPTION if self.kind == EMA else SWA_OPTION

    def is_due(self, step: int) -> bool:
        """True if the weights after an optimizer step (1-based) enter the average."""
        return step >= self.start and (step - self.start) % self.every == 0

    def weight(self, num_updates: int) -> float:
        """Returns the weight of the next weights in the average.

        Args:
            num_updates: updates of the average so far.
        """
        if self.kind == SWA:
            return 1.0 / (num_updates + 1)
        decay = self.decay
        if self.has_warmup:
            steps = num_updates * self.every
            decay = min(decay, (1 + steps) / (10 + steps))
        return 1.0 - decay**self.every


def averaging_of(options: Options, max_steps: int, updates_per_epoch: int | None) -> AverageSettings:
    """Returns the settings of a run's average.

    Args:
        options: the arguments.
        max_steps: optimizer steps of the run.
        updates_per_epoch: optimizer steps of an epoch; None if unknown.

    Raises:
        ValueError: no step of the run enters the average.
    """
    on_host = options.average_device == "cpu"
    if options.ema_decay is not None:
        every = options.average_steps or 1
        if every > max_steps:
            raise ValueError(
                f"average_steps={every} is more than the {max_steps} steps of the run, whose average would be the "
                "initial weights: set a smaller one."
            )
        # steps count from 1: with `every` 4 the updates follow steps 4, 8, 12 ...
        return AverageSettings(EMA, options.ema_decay, options.ema_warmup, every, every, on_host)
    assert options.swa_start is not None
    fraction = options.swa_start
    start = math.ceil(fraction * max_steps) if fraction < 1 else int(fraction)
    if start > max_steps:
        raise ValueError(
            f"swa_start={fraction} is after the last of the run's {max_steps} steps: set an earlier step, or a "
            "fraction of the run, such as 0.75."
        )
    rate = None if options.swa_lr is None else options.swa_lr / options.learning_rate
    return AverageSettings(
        SWA,
        start=max(start, 1),
        every=options.average_steps or updates_per_epoch or 1,
        on_host=on_host,
        rate=rate,
        anneal_steps=options.swa_anneal_steps,
    )


def check_averages(options: Options) -> None:
    """Checks the options of weight averages, alone and in combination.

    Raises:
        ValueError: a value is out of range, or an option is set without the one that it belongs to.
        UnsupportedOption: the average is not supported together with another option.
    """
    decay, start = options.ema_decay, options.swa_start
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"ema_decay={decay} is invalid: expected a number from 0 to below 1, such as 0.999.")
    if start is not None and (not 0 <= start < math.inf or (start >= 1 and start != int(start))):
        raise ValueError(
            f"swa_start={start} is invalid: expected a number of optimizer steps, or a fraction of the run below 1."
        )
    if decay is not None and start is not None:
        raise ValueError(
            f"ema_decay={decay} and swa_start={start} are two averages of the same weights: a model is evaluated and "
            "saved with one; leave one of them out."
        )
    check_companions(options)
    if decay is None and start is None:
        return
    asked = f"ema_decay={decay}" if decay is not None else f"swa_start={start}"
    if options.deepspeed:
        raise UnsupportedOption(
            f"{asked} with deepspeed is not supported, which holds parts of the weights: set parallel='fsdp'."
        )
    if is_xla_asked(options.parallel, options.fsdp, options.fsdp_config):
        raise UnsupportedOption(f"{asked} is not supported on XLA devices: leave it out.")
    if wants_shards(options):
        raise UnsupportedOption(
            f"{asked} with checkpoint_format='sharded' (or fsdp_config['state_dict_type']) is not supported: set "
            "checkpoint_format='full'."
        )


def check_companions(options: Options) -> None:
    """Checks that settings of an average come with the average."""
    is_averaged = options.ema_decay is not None or options.swa_start is not None
    companions = {
        "average_steps": (options.average_steps is None, is_averaged, "ema_decay or swa_start"),
        "average_device": (options.average_device == "model", is_averaged, "ema_decay or swa_start"),
        "ema_warmup": (options.ema_warmup, options.ema_decay is not None, "ema_decay"),
        "swa_lr": (options.swa_lr is None, options.swa_start is not None, "swa_start"),
        "swa_anneal_steps": (not options.swa_anneal_steps, options.swa_lr is not None, "swa_lr"),
    }
    for name, (is_unset, is_used, other) in companions.items():
        if not is_unset and not is_used:
            raise ValueError(f"{name}={getattr(options, name)!r} requires {other}: set that too, or leave it out.")
    if options.swa_lr is not None and options.learning_rate <= 0:
        raise ValueError(
            f"swa_lr={options.swa_lr} scales the schedule's rates, and learning_rate={options.learning_rate}: set a "
            "learning_rate above 0, or leave swa_lr out."
        )
