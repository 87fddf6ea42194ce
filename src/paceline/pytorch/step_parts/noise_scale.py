"""The gradient noise scale, estimated from the gradients that an optimizer step computes anyway.

The squared norm of the mean gradient of B samples is |G|^2 + tr(S) / B in expectation, where G is the true gradient and
S the covariance of the gradients of single samples. The first micro-batch of an accumulation window and the window as a
whole give two such equations, hence estimates of |G|^2 and tr(S). Their ratio tr(S) / |G|^2 is the noise scale in
samples (McCandlish et al., 2018, arXiv:1812.06162, appendix A.1): up to about this batch size, twice the samples per
step need about half the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.packing import JOINING, order_of
from paceline.args.plan import Plan
from paceline.args.sections import Options
from paceline.pytorch.distributed.strategy import SingleDevice, total_norm
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.engine import Engine, to_floats
from paceline.pytorch.model.reductions import LossReduction
from paceline.pytorch.optim.layerwise import steps_in_backward

DECAY = 0.99  # of the moving averages, per optimizer step: single estimates vary by their own size
BY_LENGTH = ("tokens", "group_by_length")  # orders whose micro-batches are no random samples of their window
MOST_PENDING = 1000  # optimizer steps whose norms wait on the device


AVERAGES = ("variance", "signal", "weight", "samples")


@dataclass(frozen=True)
class First:
    """The measurements of the first pass of an accumulation window.

    Attributes:
        norm: the norm of the accumulated gradient, a 0-dim tensor on the device.
        weight: the weight of the micro-batch in the loss.
        share: the factor of its mean gradient in the accumulated one.
        samples: number of samples of the micro-batch.
    """

    norm: Tensor
    weight: float
    share: float
    samples: int


def averaged(average: float, value: float) -> float:
    """Returns a moving average with a further value."""
    return DECAY * average + (1 - DECAY) * value


class NoiseScale:
    """Measures the gradient of the first micro-batch and of the whole window, and adds their noise scale to log rows.

    Each process measures its own first micro-batch; the log has the estimate of the first process.

    Args:
        training_step: the Trainer's, bound: forward and backward of one micro-batch.
        strategy: its parameters' `grad` holds the accumulated gradient.
        global_batch_size: samples of an optimizer step, over all processes.

    Attributes:
        variance: moving average of the estimates of tr(S), per unit of the loss's weight (a target, or a sample).
        signal: moving average of the estimates of |G|^2.
        weight, samples: moving averages of the weight and the samples of a first micro-batch.
    """

    def __init__(
        self,
        training_step: Callable[[nn.Module, Any, Any], Tensor],
        strategy: SingleDevice,
        global_batch_size: int,
    ) -> None:
        self._training_step = training_step
        self._strategy = strategy
        self._global_batch_size = global_batch_size
        self._num_shares = strategy.mesh.data_size
        self._engine: Engine | None = None
        self._first: First | None = None  # of the window in progress
        self._step = -1  # the engine's number of the window in progress
        self._pending: list[tuple[First, Tensor]] = []  # each with the norm of the whole window
        self.variance = self.signal = self.weight = self.samples = 0.0

    def follow(self, engine: Engine) -> None:
        """Sets the engine whose windows are measured."""
        self._engine = engine

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the Trainer's `training_step`, and measures the gradients after the first and the last pass."""
        loss = self._training_step(model, inputs, num_items_in_batch)
        engine = self._engine
        current = engine.current if engine is not None else None
        if engine is None or current is None:  # called by user code, outside of a run
            return loss
        if engine.num_steps != self._step:
            self._step = engine.num_steps
            has_gradient = not current.is_dummy and current.counts.weight > 0 and not current.syncs_gradients
            self._first = self._measure(engine, current, num_items_in_batch) if has_gradient else None
        elif current.syncs_gradients:
            self._close()
        return loss

    def _measure(self, engine: Engine, current: Pass, num_items: Any) -> First:
        """Returns the measurements of the first pass of a window."""
        counts = current.counts
        normalizer = engine.normalizer
        weight = float(counts.weight)
        share = counts.weight / engine.sync.total
        if normalizer.is_scaled and num_items is not None:  # the model has divided by the number of all targets
            targets = LossReduction("tokens", shifted=normalizer.shifts)
            weight = float(targets.weigh(counts.labels, counts.samples, counts.is_shifted))
            share = weight * normalizer.scaled_factor / float(num_items)
        return First(self._norm(), weight, share, counts.samples)

    def _norm(self) -> Tensor:
        """Returns the norm of the accumulated gradients, a 0-dim tensor on the device."""
        return total_norm([each.grad for each in self._strategy.parameters if each.grad is not None])

    def _close(self) -> None:
        """Ends a window, whose gradients are complete."""
        first, self._first = self._first, None
        if first is None:
            return
        self._pending.append((first, self._norm()))
        if len(self._pending) >= MOST_PENDING:
            self.update()

    def update(self) -> None:
        """Reads the measured norms and updates the averages. Synchronizes with the device."""
        pending, self._pending = self._pending, []
        norms = iter(to_floats([norm for first, whole in pending for norm in (first.norm, whole)]))
        for (first, _), small, whole in zip(pending, norms, norms, strict=False):
            if not 0 < first.share < self._num_shares:
                continue
            few = first.weight
            many = few * self._num_shares / first.share  # gradients are averaged over the processes
            small_square = (small / first.share) * (small / first.share)
            whole_square = whole * whole
            if not math.isfinite(small_square + whole_square):
                continue
            self.variance = averaged(self.variance, (small_square - whole_square) / (1 / few - 1 / many))
            self.signal = averaged(self.signal, (many * whole_square - few * small_square) / (many - few))
            self.weight = averaged(self.weight, few)
            self.samples = averaged(self.samples, first.samples)

    @property
    def value(self) -> float | None:
        """Returns the noise scale in samples; None while the averages allow no estimate."""
        if not (self.variance > 0 and self.signal > 0 and self.weight > 0):
            return None
        return self.variance / self.signal * self.samples / self.weight

    # ---- a meter of the run

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entry of a log row.

        Args:
            times: seconds by activity since the last row.
        """
        self.update()
        return {} if self.value is None else {"gradient_noise_scale": round(self.value, 1)}

    def describe(self) -> str:
        """Returns the noise scale as a sentence; empty if there is no estimate."""
        self.update()
        if self.value is None:
            return ""
        return (
            f"Gradient noise scale {self.value:,.0f} samples, with {self._global_batch_size:,} per optimizer step: up "
            "to about that batch size, twice the samples per step need about half the steps"
        )

    # ---- a checkpoint item

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        self.update()
        return {name: getattr(self, name) for name in AVERAGES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the averages, and drops what was measured since."""
        self._pending = []
        self.variance, self.signal, self.weight, self.samples = (float(state[name]) for name in AVERAGES)


def make_noise_scale(
    strategy: SingleDevice, plan: Plan, optimizer: object, options: Options, training_step: Callable[..., Tensor]
) -> NoiseScale:
    """Returns the noise scale of a run.

    Raises:
        UnsupportedOption: the gradient of a number of random samples is not known.
    """
    reason = find_obstacle(strategy, plan, optimizer, packing=options.packing, order=order_of(options))
    if reason is not None:
        raise UnsupportedOption(f"gradient_noise_scale=True {reason}")
    return NoiseScale(training_step, strategy, plan.global_batch_size)


def find_obstacle(
    strategy: SingleDevice, plan: Plan, optimizer: object, *, packing: str | None, order: str
) -> str | None:
    """Returns the reason why the noise scale cannot be measured, with the remedy; None if it can.

    Args:
        strategy: that of the run.
        plan: that of the run.
        optimizer: that of the run.
        packing: the option `packing`.
        order: the order of the training samples, a name in `ORDERS`.
    """
    if strategy.is_sharded or strategy.runs_windows or strategy.is_lazy or not strategy.mesh.is_data_only:
        return "needs whole gradients on each process: run it on one process, or with parallel='ddp'."
    if packing in JOINING:
        return f"counts samples, and packing={packing!r} joins them into rows: leave one of them out."
    if order in BY_LENGTH:
        option = "per_device_train_tokens" if order == "tokens" else "train_sampling_strategy='group_by_length'"
        if packing == "group":
            option = "packing='group'"
        return (
            f"compares random samples, and {option} makes micro-batches of samples of similar length: leave one of "
            "them out."
        )
    if plan.accumulation_steps < 2:
        return (
            "compares the gradient of a micro-batch with that of the optimizer step, and there is one micro-batch: set "
            "gradient_accumulation_steps=2 or more, and a smaller per_device_train_batch_size for the same global one."
        )
    if steps_in_backward(optimizer):
        return "is not supported with an optimizer that steps in the backward pass: choose another optim."
    if strategy.precision.scales:
        return "is not supported with fp16, whose gradients are scaled: use bf16=True."
    if plan.auto_find_batch_size:
        return "is not supported with auto_find_batch_size, which repeats passes: leave one of them out."
    return None
