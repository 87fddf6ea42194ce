"""Kernels of other packages that compute the cross-entropy of a linear head: Liger's fused one.

Liger's function multiplies a chunk of rows by the weight, as `linear_cross_entropy` does, and computes the losses and
the gradients of the logits of a chunk in one Triton kernel, in single precision.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import require
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, check_classes
from paceline.pytorch.model.linear_head import Cast, Head, Scale, Squash, Step

INSTEAD = "Set linear_cross_entropy=True, whose chunks need no other package"
# the first release of liger-kernel that was run with this code
RELEASE = "0.8.5"
# arguments that a release may lack: for the gradients of row losses, and float32 sums over chunks
ARGUMENTS = {"token_grad_output", "compute_gradients", "weight_requires_grad", "accum_dtype"}


class LigerKernel:
    """Computes row losses and gradients by the fused linear cross-entropy of Liger.

    Each call synchronizes with the device once, where Liger counts the targets.

    Raises:
        ImportError: liger-kernel is missing, or too old.
        UnsupportedOption: there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available() and not is_interpreted():
            raise UnsupportedOption(f"linear_cross_entropy='liger' needs a CUDA device, and there is none. {INSTEAD}.")
        try:
            fused: Any = require("liger_kernel.ops.fused_linear_cross_entropy", "liger")
        except ImportError as error:
            raise ImportError(f"linear_cross_entropy='liger': {error}. {INSTEAD}.", name=error.name) from error
        self._compute = fused.fused_linear_cross_entropy_forward
        if not set(inspect.signature(self._compute).parameters) >= ARGUMENTS:
            raise ImportError(
                "linear_cross_entropy='liger': the installed liger-kernel lacks arguments of release "
                f'{RELEASE}: pip install "liger-kernel>={RELEASE}". {INSTEAD}.'
            )

    def check(self, rows: Tensor, head: Head, loss: CrossEntropy) -> None:
        """Checks that the kernel computes a loss as defined.

        Raises:
            UnsupportedOption: it does not; the message says why.
        """
        obstacle = find_loss_obstacle(head, loss)
        if obstacle is None and rows.device.type != "cuda" and not is_interpreted():
            obstacle = f"the head is on {rows.device}, and the kernel runs on a CUDA device"
        if obstacle is not None:
            raise UnsupportedOption(f"linear_cross_entropy='liger' is not possible: {obstacle}. {INSTEAD}.")

    def __call__(
        self,
        rows: Tensor,
        targets: Tensor,
        head: Head,
        loss: CrossEntropy,
        factors: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the row losses, and the gradients of the sum of `factors * losses`; see `Kernel`."""
        check_classes(targets, head.num_classes, loss.ignore_index)  # the kernel would read past the logits
        kind = rows.device.type
        on_device = torch.cuda.device(rows.device) if kind == "cuda" else nullcontext()  # Triton's is the current one
        with torch.autocast(kind, dtype=head.autocast, enabled=head.autocast is not None), on_device:
            losses, _, _, _, *slopes = self._compute(
                rows,
                head.weight,
                targets,
                ce_weight=None if loss.weight is None else loss.weight.float(),
                bias=head.bias,
                ignore_index=loss.ignore_index,
                label_smoothing=loss.label_smoothing,
                reduction="none",  # the caller divides, in single precision
                softcap=cap_of(head.steps),
                accum_dtype=torch.float32,
                token_grad_output=factors if loss.reduction == "none" else None,  # else all are 1
                compute_gradients=factors is not None,
                weight_requires_grad=needs[1],
            )
        is_needed = [need and factors is not None for need in needs]
        found = zip(slopes, is_needed, strict=True)
        return losses, [slope.float() if slope is not None and need else None for slope, need in found]


def is_interpreted() -> bool:
    """Returns True if Triton runs its kernels in Python, on tensors of any device, as its tests do."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def find_loss_obstacle(head: Head, loss: CrossEntropy) -> str | None:
    """Returns the reason why Liger's function does not compute a loss as it is defined here; None: it does."""
    if head.shard is not None:
        return "tensor parallelism has split the classes of the head"
    if head.adapters:
        return "the head has LoRA adapters"
    if head.weight.dtype == torch.float64:
        return "the head has double precision, and the kernel computes in single precision"
    if head.weight.dtype == torch.float16:
        return "the weights are float16, to which the kernel rounds gradients before the loss scale is applied"
    if loss.z_weight:
        return "a z-loss is added to the loss"
    if cap_of(head.steps) is None and has_steps(head.steps):
        return "the logits are scaled, shifted or squashed otherwise than by a soft-cap, c * tanh(logits / c)"
    return None


def has_steps(steps: Sequence[Step]) -> bool:
    """Returns True if there are operations between the layer and the loss that change values."""
    return any(not isinstance(step, Cast) for step in steps)


def cap_of(steps: Sequence[Step]) -> float | None:
    """Returns c if the operations are the soft-cap `c * tanh(logits / c)`; None for others."""
    match [step for step in steps if not isinstance(step, Cast)]:
        case [Scale(inner), Squash(), Scale(cap)] if math.isclose(inner * cap, 1.0, rel_tol=1e-12):
            return cap
    return None


def kernel_of(option: str | bool) -> LigerKernel | None:
    """Returns the kernel that a value of `linear_cross_entropy` names; None: it names none.

    Raises:
        ImportError: its package is missing, or too old.
        UnsupportedOption: there is no device for it.
    """
    return LigerKernel() if option == "liger" else None
