"""Chooses the optimizer for `optim="auto"` by the model and the free memory, and gives the reason."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.byte_sizes import format_memory

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu", "hpu"})
"""Device types for which torch has a fused AdamW."""

_MEMORY_SHARE = 0.8  # usable share of the free memory; the rest is for activations, whose size is unknown here


class Choice(NamedTuple):
    """A key of `OPTIMIZERS` and the reason for it."""

    name: str
    reason: str


def why_not_fused(model: nn.Module) -> str | None:
    """Returns the reason why the trainable parameters of `model` do not support the fused AdamW; None if they do."""
    are_all_meta = all(parameter.is_meta for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        # some meta parameters: their values are on another process
        if not parameter.requires_grad or (parameter.is_meta and not are_all_meta):
            continue
        if not parameter.is_floating_point():
            return f"{name} is {_short(parameter.dtype)}"
        if parameter.device.type not in FUSED_DEVICES:
            return f"{name} is on device {parameter.device.type!r}"
    return None


def choose_optimizer(model: nn.Module) -> Choice:
    """Returns AdamW if its two moments fit into the free memory, fused if possible, else Adafactor.

    The choice depends on the device, dtype and number of the trainable parameters, so the model must be placed before.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    obstacle = why_not_fused(model)
    if obstacle is not None:
        return Choice("adamw_torch", f"AdamW, not fused because {obstacle}")
    if not trainable:
        return Choice("adamw_torch_fused", "AdamW: the model has no trainable parameter to choose by")
    device = trainable[0].device
    sizes = [parameter.numel() * parameter.element_size() for parameter in trainable]
    gradients = sum(size for size, parameter in zip(sizes, trainable, strict=True) if parameter.grad is None)
    needed, free = 2 * sum(sizes) + gradients, free_memory(device)
    dtypes = ", ".join(sorted({_short(parameter.dtype) for parameter in trainable}))
    if free is None:
        facts = f"{dtypes} on {device.type}; how much memory is free is not known"
    else:
        taken = f"{format_memory(needed)} of {format_memory(free)}"
        facts = f"{dtypes} on {device.type}; its moments and the gradients take {taken} free"
        if needed > _MEMORY_SHARE * free:
            reason = (
                f"Adafactor keeps row and column means instead of AdamW's two moments per weight: {dtypes} on "
                f"{device.type}, where those and the gradients would take {taken} free"
            )
            return Choice("adafactor", reason)
    return Choice("adamw_torch_fused", f"fused AdamW: {facts}{_rounding_note(trainable)}")


def _rounding_note(trainable: list[nn.Parameter]) -> str:
    if all(parameter.element_size() > 2 for parameter in trainable):
        return ""
    return (
        ". 16-bit weights round small updates away: load the model in float32 with bf16=True if the loss stops falling"
    )


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes available to new tensors on `device`; None if unknown."""
    if device.type == "cpu":
        return _available_host_memory()
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    module = getattr(torch, device.type, None)  # every backend of torch.accelerator registers such a module
    ask = [getattr(module, name, None) for name in ("mem_get_info", "memory_reserved", "memory_allocated")]
    if not all(map(callable, ask)):
        return None
    free, reserved, allocated = (function(device) for function in ask if function is not None)
    return int(free[0]) + int(reserved) - int(allocated)  # torch reserves memory that it does not use


def _available_host_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
