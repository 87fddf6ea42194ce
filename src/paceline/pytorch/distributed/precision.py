"""Precision of a run: the dtype of the forward pass, and loss scaling."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from paceline.core.apex import require_apex
from paceline.pytorch.data.batches import rebuild_mapping, rebuild_sequence, recast

logger = logging.getLogger(__name__)


class Precision:
    """No mixed precision: the model computes in the dtype of its own parameters.

    Attributes:
        scales: True if losses are scaled; otherwise `scale` and `unscale` need not be called.
        autocasts: True if outputs are in 16 bits and must be widened to float32.
        has_rescaled: True if the last optimizer step was skipped only to adapt the loss scale.
        has_masters: True if the optimizer steps master copies of the weights in another dtype.
        backward: (loss, learning rate) -> None, if the precision runs the backward pass itself; else None.
    """

    scales = False
    autocasts = False
    has_rescaled = False
    has_masters = False
    backward: Any = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Returns the model to call and the optimizer to step in place of the given ones."""
        return model, optimizer

    def context(self) -> AbstractContextManager[Any]:
        """Returns the context of a forward pass; each call returns a new one, so that a user may nest them."""
        return nullcontext()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to call `backward` on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscales the gradients; call it before they are clipped or read."""

    def share_overflow(self, optimizer: Optimizer) -> None:
        """Makes an overflow that one process has found in its gradients known to all. A collective if losses are
        scaled.
        """

    def step(self, optimizer: Optimizer, is_bad: torch.Tensor | None = None) -> bool:
        """Steps the optimizer unless `is_bad` (0-dim, on the device) is true. Returns True if the step was applied.

        A fused optimizer takes the flag on the accelerator, and the result is always True. For other optimizers, and on
        the CPU, where it costs less than the optimizer's own check, the host reads the flag.
        """
        if is_bad is None:
            optimizer.step()
            return True
        if is_bad.is_cpu or not getattr(optimizer, "_step_supports_amp_scaling", False):
            if bool(is_bad):
                optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns of the schedule's step
                return False
            optimizer.step()
            return True
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, is_bad.to(torch.float32)
        try:
            optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: there is no state."""


class CastWeights(Precision):
    """The strategy computes with 16-bit copies of the weights, and steps float32 master weights."""

    autocasts = True  # outputs are in 16 bits, and are widened before the loss


class BFloat16(Precision):
    """Mixed precision in bfloat16: matrix products in 16 bits, parameters and gradients in their own dtype."""

    autocasts = True

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Float16(Precision):
    """Mixed precision in float16 with dynamic loss scaling (Micikevicius et al., 2018, arXiv:1710.03740).

    An optimizer step whose gradients overflowed is skipped and the scale is lowered. This costs a read from the device
    at each step, which bfloat16 does not need.
    """

    scales = True
    autocasts = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scaler = torch.amp.GradScaler(device.type)
        self._scale: float | None = None  # the scale as read after the last optimizer step

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.float16)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def share_overflow(self, optimizer: Optimizer) -> None:
        for found in self.scaler._found_inf_per_device(optimizer).values():
            distributed.all_reduce(found, distributed.ReduceOp.MAX)

    def step(self, optimizer: Optimizer, is_bad: torch.Tensor | None = None) -> bool:
        # the scaler checks every gradient itself, and lowers the scale if one overflowed. A call of optimizer.step
        # does not show that the step was applied: a fused optimizer is always called, and decides on the device.
        before = self.scaler.get_scale() if self._scale is None else self._scale
        self.scaler.step(optimizer)
        self.scaler.update()
        self._scale = self.scaler.get_scale()
        # with a scale of 1 or less, the scale did not cause the overflow
        self.has_rescaled = self._scale < before and before > 1
        return self._scale >= before

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.scaler.load_state_dict(state)
            self._scale = None


class ApexPrecision(Precision):
    """NVIDIA's `apex.amp`, for scripts that were written for it.

    Its levels are O0 (float32), O1 (casts around functions), O2 (float16 weights) and O3 (all float16).

    amp patches the model and the optimizer, scales the loss inside `backward`, and makes the optimizer skip a step
    whose gradients overflowed.

    Args:
        level: "O0" to "O3".

    Raises:
        ImportError: NVIDIA's Apex is not installed, or is a release without amp.
    """

    def __init__(self, device: torch.device, level: str) -> None:
        super().__init__(device)
        try:
            self.amp: Any = require_apex("amp")
        except ImportError as error:
            raise ImportError(
                f"half_precision_backend='apex': {error}; or leave the option out: fp16=True runs by torch's autocast"
            ) from error
        self.level = level
        # in O2 the optimizer steps float32 master weights, whose gradients are the ones to clip
        self.has_masters = level == "O2"
        self._optimizer: Optimizer | None = None
        self._saved: dict[str, Any] | None = None
        self._has_overflowed = False  # a gradient of the current optimizer step overflowed

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Lets amp patch the model and the optimizer, once for each optimizer."""
        if optimizer is None:
            return model, None
        if not hasattr(optimizer, "_amp_stash"):
            model, optimizer = self.amp.initialize(model, optimizer, opt_level=self.level, verbosity=0)
        self._optimizer = optimizer
        if self._saved is not None:
            self.amp.load_state_dict(self._saved)
        return model, optimizer

    def backward(self, loss: torch.Tensor, lr: object) -> None:
        """Runs the backward pass of the scaled loss; afterwards the gradients are unscaled."""
        before = self._scale()
        with self.amp.scale_loss(loss, self._optimizer) as scaled:
            scaled.backward()
        self._has_overflowed = self._has_overflowed or self._scale() < before

    def step(self, optimizer: Optimizer, is_bad: torch.Tensor | None = None) -> bool:
        # if a gradient overflowed, amp has replaced optimizer.step for this one call
        self.has_rescaled, self._has_overflowed = self._has_overflowed, False
        return super().step(optimizer, is_bad) and not self.has_rescaled

    def _scale(self) -> float:
        scalers = self.amp.state_dict()
        return float(scalers["loss_scaler0"]["loss_scale"]) if "loss_scaler0" in scalers else 1.0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.amp.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state or None
        if self._optimizer is not None and state:
            self.amp.load_state_dict(state)


def make_precision(name: str, device: torch.device) -> Precision:
    """Returns the precision for `full`, `bf16`, `fp16` or `apex-O1` and the like, as in `Plan.precision`."""
    if name.startswith("apex-"):
        return ApexPrecision(device, name.removeprefix("apex-"))
    kinds: dict[str, type[Precision]] = {"full": Precision, "bf16": BFloat16, "fp16": Float16}
    return kinds[name](device)


def warn_of_emulation(fp16: bool, device: torch.device) -> None:
    """Logs a warning if a run computes in float16 on a CPU."""
    if fp16 and device.type == "cpu":
        logger.warning(
            "fp16=True on a CPU: most CPUs emulate float16, which is slower than float32. Use bf16=True, or leave "
            "fp16 out."
        )


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Returns a context in which 16-bit outputs of `model` are converted to float32, within their containers.

    A loss of an autocast model's outputs is then not computed in 16 bits.
    """
    handle = model.register_forward_hook(widen_outputs)
    try:
        yield
    finally:
        handle.remove()


def widen_outputs(module: nn.Module, args: Any, outputs: object) -> Any:
    """Returns the outputs of a forward pass, widened."""
    return widen(outputs)


def widen(value: object) -> Any:
    """Returns the nest with 16-bit tensors converted to float32; the same object if there are none."""
    return recast(value, widen_tensor)


def widen_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 16-bit tensor in float32, any other unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def narrow(value: object, dtype: torch.dtype, kept: Container[str]) -> Any:
    """Returns a model's inputs with floating-point tensors in `dtype`; those named in `kept` (labels) are unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):  # a model's own outputs have its dtype
        parts = {name: item if name in kept else narrow(item, dtype, kept) for name, item in value.items()}
        return rebuild_mapping(value, parts)
    if isinstance(value, list | tuple):
        return rebuild_sequence(value, [narrow(item, dtype, kept) for item in value])
    return value


@contextmanager
def cast_in_place(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Returns a context in which a model's parameters and buffers are in `dtype`; restored bit for bit afterwards."""
    with cast_tensors([*model.parameters(), *model.buffers()], dtype):
        yield


@contextmanager
def cast_tensors(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Returns a context in which the floating-point tensors hold copies in `dtype`."""
    changed = [tensor for tensor in tensors if tensor.is_floating_point()]
    originals = [tensor.data for tensor in changed]
    try:
        for tensor in changed:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, original in zip(changed, originals, strict=True):
            tensor.data = original
