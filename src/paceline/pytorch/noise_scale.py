"""The gradient noise scale, estimated from the gradients that an optimizer step computes anyway.

The squared norm of the mean gradient of B samples is |G|^2 + tr(S) / B in expectation, where G is the true gradient and
S the covariance of the gradients of single samples. The first micro-batch of an accumulation window and the window as a
whole give two such equations, hence estimates of |G|^2 and tr(S). Their ratio tr(S) / |G|^2 is the noise scale in
samples (McCandlish et al., 2018, arXiv:1812.06162, appendix A.1): up to about this batch size, twice the samples per
step need about half the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.distributed.strategy import SingleDevice, total_norm
from paceline.pytorch.engine import Engine, to_floats
from paceline.pytorch.optim.layerwise import steps_in_backward

DECAY = 0.99  # of the moving averages, per optimizer step: single estimates vary by their own size
MOST_PENDING = 1000  # optimizer steps whose norms wait on the device


class NoiseScale:
    """Measures the gradient of the first micro-batch and of the whole window, and adds their noise scale to log rows.

    Each process measures its own first micro-batch; the log has the estimate of the first process.

    Args:
        training_step: the Trainer's, bound: forward and backward of one micro-batch.
        parameters: of the model; their `grad` holds the accumulated gradient.
        num_shares: processes that read different data; gradients are averaged over them.

    Attributes:
        variance: moving average of the estimates of tr(S).
        signal: moving average of the estimates of |G|^2.
        batch_size: samples of the last measured optimizer step, over all processes.
    """

    def __init__(
        self,
        training_step: Callable[[nn.Module, Any, Any], Tensor],
        parameters: Sequence[nn.Parameter],
        num_shares: int = 1,
    ) -> None:
        self._training_step, self._parameters, self._num_shares = training_step, parameters, num_shares
        self._engine: Engine | None = None
        self._first: tuple[Tensor, float, int] | None = None  # norm, share and samples of a first pass
        self._step = -1  # the engine's number of the window in progress
        self._pending: list[tuple[Tensor, Tensor, float, int]] = []
        self.variance = self.signal = 0.0
        self.batch_size = 0.0

    def follow(self, engine: Engine) -> None:
        """Sets the engine whose windows are measured."""
        self._engine = engine

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the Trainer's `training_step`, and measures the gradients after the first and the last pass."""
        samples = batch_size_of(inputs)  # before user code takes anything out of the batch
        loss = self._training_step(model, inputs, num_items_in_batch)
        engine = self._engine
        current = engine.current if engine is not None else None
        if engine is None or current is None:  # called by user code, outside of a run
            return loss
        if engine.num_steps != self._step:
            self._step = engine.num_steps
            has_gradient = not current.is_dummy and current.counts.weight > 0
            share = current.counts.weight / engine.sync.total
            self._first = (self._norm(), share, samples) if has_gradient and not current.syncs_gradients else None
        elif current.syncs_gradients:
            self._close()
        return loss

    def _norm(self) -> Tensor:
        """Returns the norm of the accumulated gradients, a 0-dim tensor on the device."""
        return total_norm([each.grad for each in self._parameters if each.grad is not None])

    def _close(self) -> None:
        """Ends a window, whose gradients are complete."""
        first, self._first = self._first, None
        if first is None:
            return
        small, share, samples = first
        self._pending.append((small, self._norm(), share, samples))
        if len(self._pending) >= MOST_PENDING:
            self.update()

    def update(self) -> None:
        """Reads the measured norms and updates the averages. Synchronizes with the device."""
        pending, self._pending = self._pending, []
        norms = iter(to_floats([norm for small, whole, _, _ in pending for norm in (small, whole)]))
        for (_, _, share, samples), small, whole in zip(pending, norms, norms, strict=False):
            few = samples
            # the share is that of this process's part of the window, whose gradients are averaged over the processes
            many = samples * self._num_shares / share
            small_square, whole_square = (small / share) ** 2, whole**2
            if not few < many or not math.isfinite(small_square + whole_square):
                continue
            variance = (small_square - whole_square) / (1 / few - 1 / many)
            signal = (many * whole_square - few * small_square) / (many - few)
            self.variance = DECAY * self.variance + (1 - DECAY) * variance
            self.signal = DECAY * self.signal + (1 - DECAY) * signal
            self.batch_size = many

    @property
    def value(self) -> float | None:
        """Returns the noise scale in samples; None while the averages allow no estimate."""
        return self.variance / self.signal if self.variance > 0 and self.signal > 0 else None

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
            f"Gradient noise scale {self.value:,.0f} samples, with {self.batch_size:,.0f} per optimizer step: up to "
            "about that batch size, twice the samples per step need about half the steps"
        )

    # ---- a checkpoint item

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        self.update()
        return {"variance": self.variance, "signal": self.signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the averages, and drops what was measured since."""
        self._pending = []
        self.variance, self.signal = float(state["variance"]), float(state["signal"])


def make_noise_scale(
    strategy: SingleDevice, plan: Plan, optimizer: object, training_step: Callable[..., Tensor]
) -> NoiseScale:
    """Returns the noise scale of a run.

    Raises:
        UnsupportedOption: the run does not have the gradient of a micro-batch, or it does not equal that of the model.
    """
    reason = find_obstacle(strategy, plan, optimizer)
    if reason is not None:
        raise UnsupportedOption(f"gradient_noise_scale=True {reason}")
    return NoiseScale(training_step, strategy.parameters, strategy.mesh.data_size)


def find_obstacle(strategy: SingleDevice, plan: Plan, optimizer: object) -> str | None:
    """Returns the reason why the noise scale cannot be measured, with the remedy; None if it can."""
    if strategy.is_sharded or strategy.runs_windows or strategy.is_lazy or not strategy.mesh.is_data_only:
        return "needs whole gradients on each process: run it on one process, or with parallel='ddp'."
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
