"""The learning rate range test (arXiv:1506.01186): a short run with a rising rate, whose effects are undone.

The rate rises by the same factor at each optimizer step, from far too low to far too high. The rate at which the loss
falls fastest is a good peak rate for a schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan
from paceline.core.events import TrainerCallback
from paceline.core.optional import require
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.distributed.collectives import sum_floats
from paceline.pytorch.distributed.world import World

Array = np.ndarray[Any, np.dtype[np.float64]]

logger = logging.getLogger(__name__)

SMOOTHING = 0.9  # decay of the moving average of the losses
LEAST_STEPS = 10
CLEAR = 3.0  # a clear fall of the loss, in standard deviations of the moving average


@dataclass(frozen=True)
class RangeTest:
    """The result of a learning rate range test.

    Attributes:
        rates: the learning rate of each optimizer step.
        losses: the loss of each step, before the weights change.
        smoothed: the moving average of the losses.
        suggestion: the rate at which the average falls fastest; None if it never falls clearly.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float] = field(default_factory=list)
    suggestion: float | None = None

    def plot(self, path: str | Path) -> Path:
        """Plots the losses over the learning rates.

        Args:
            path: the file to write; its suffix names the format (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is missing.
        """
        figure = require("matplotlib.figure", "plots").Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="0.8", label="loss")
        axes.plot(self.rates, self.smoothed, label="moving average")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.set_ylim(*limits(self.smoothed))
        axes.legend()
        figure.savefig(path)
        return Path(path)


class RisingRate(TrainerCallback):
    """Sets the learning rate of each optimizer step, and ends the run when the loss diverges.

    Parameter groups keep the ratios of their rates.

    Args:
        rates: the highest rate of all parameter groups, for each step.
        divergence: the run ends when the moving average exceeds `divergence` times its minimum.
        world: the processes; losses are means over them, so that all end at the same step.
    """

    wants = frozenset({"loss"})

    def __init__(self, rates: Sequence[float], divergence: float, world: World) -> None:
        self.rates = rates
        self.world = world
        self.divergence = divergence
        self.losses: list[float] = []
        self._ratios: list[float] = []

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        highest = max(rates)
        self._ratios = [rate / highest if highest else 1.0 for rate in rates]
        self._set(optimizer, self.rates[0])

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        loss: Any = None,
        **kwargs: Any,
    ) -> None:
        self.losses.append(self._mean(loss))
        averages = moving_average(self.losses)
        least = min(averages)
        # for a positive loss, the threshold is `divergence * least`; a negative loss gets the same margin above `least`
        is_diverged = not math.isfinite(averages[-1]) or averages[-1] - least > (self.divergence - 1) * abs(least)
        if is_diverged or len(self.losses) == len(self.rates):
            control.should_training_stop = True
        else:
            self._set(optimizer, self.rates[len(self.losses)])

    def result(self) -> RangeTest:
        """Returns the result of the run."""
        return evaluate(self.rates[: len(self.losses)], self.losses)

    def _mean(self, loss: Any) -> float:
        """Returns the loss of a step over all processes; NaN if none has a target. A collective."""
        total, num_known = sum_floats(self.world, [0.0 if loss is None else float(loss), float(loss is not None)])
        return total / self.world.world_size if num_known else math.nan

    def _set(self, optimizer: Any, rate: float) -> None:
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio


def make_search(lowest: float, highest: float, num_steps: int, divergence: float, world: World) -> RisingRate:
    """Returns the callback of a range test.

    Args:
        lowest, highest: learning rates of the first and the last step.
        num_steps: maximum number of optimizer steps.
        divergence: the run ends when the moving average of the loss exceeds `divergence` times its minimum.
        world: the processes.

    Raises:
        ValueError: the rates do not rise, there are fewer than 10 steps, or the divergence is not above 1.
    """
    if not 0 < lowest < highest or num_steps < LEAST_STEPS or not divergence > 1:
        raise ValueError(
            f"find_lr: lowest={lowest}, highest={highest}, num_steps={num_steps}, divergence={divergence}: give "
            f"0 < lowest < highest, num_steps of {LEAST_STEPS} or more, and a divergence above 1."
        )
    return RisingRate(np.geomspace(lowest, highest, num_steps).tolist(), divergence, world)


def check_support(plan: Plan, optimizer: Any) -> None:
    """Checks that the model can be restored and the learning rate can be set.

    Args:
        plan: the plan of the Trainer.
        optimizer: the optimizer of the Trainer, or None.

    Raises:
        UnsupportedOption: the strategy cuts the model or its samples into parts, or is another library's; or the
            optimizer computes its learning rate itself.
    """
    is_whole = plan.parallel in ("ddp", "fsdp") or (plan.parallel == "mesh" and plan.mesh.num_parts == 1)
    if plan.world_size > 1 and not is_whole:
        name = plan.mesh.describe() if plan.parallel == "mesh" else repr(plan.parallel)
        raise UnsupportedOption(
            f"find_lr with parallel={name} on {plan.world_size} processes is not supported: the model could not be "
            "restored afterwards. Run it with ddp, fsdp or tensor parallel, or on one process, with "
            "gradient_accumulation_steps for the same global batch size."
        )
    if any(group["lr"] is None for group in getattr(optimizer, "param_groups", ())):
        raise UnsupportedOption(f"find_lr: {type(optimizer).__name__} computes its learning rate by itself.")


def moving_average(losses: Sequence[float]) -> list[float]:
    """Returns the bias-corrected exponential moving average of the losses."""
    averages, total = [], 0.0
    for number, loss in enumerate(losses, 1):
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        averages.append(total / (1 - SMOOTHING**number))
    return averages


def evaluate(rates: Sequence[float], losses: Sequence[float]) -> RangeTest:
    """Returns the result of a range test; it has no suggestion if the loss does not fall by more than its noise."""
    smoothed = moving_average(losses)
    finite = np.isfinite(smoothed)
    suggestion = steepest(np.asarray(rates)[finite], np.asarray(losses)[finite], np.asarray(smoothed)[finite])
    if suggestion is None:
        logger.warning(
            "find_lr: the loss does not fall clearly at any rate from %g to %g. Give more steps, larger batches or "
            "another range.",
            rates[0],
            rates[-1],
        )
    return RangeTest(list(rates), list(losses), smoothed, suggestion)


def steepest(rates: Array, losses: Array, smoothed: Array) -> float | None:
    """Returns the rate at which the average falls fastest before its minimum; None if it does not fall clearly.

    The first tenth of the steps is ignored, because the average covers few losses there. Slopes are measured over a
    tenth of the steps.
    """
    first = max(len(rates) // 10, LEAST_STEPS // 2)
    half = max(len(rates) // 20, 1)
    if len(rates) <= first + 2 * half:
        return None
    lowest = first + int(smoothed[first:].argmin())
    noise = float(np.std(losses[: lowest + 1] - smoothed[: lowest + 1])) * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))
    if smoothed[first] - smoothed[lowest] <= CLEAR * noise:
        return None
    places = range(first + half, min(lowest, len(rates) - 1 - half) + 1)
    falls = [
        (smoothed[at + half] - smoothed[at - half]) / math.log(rates[at + half] / rates[at - half]) for at in places
    ]
    return float(rates[places[int(np.argmin(falls))]]) if falls else None


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the y-axis limits: from the lowest average to the first one, with a margin; divergence is cut off."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), known[0]
    margin = 0.1 * (high - low) or 0.1
    return low - margin, high + 3 * margin
