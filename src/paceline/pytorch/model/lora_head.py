"""Heads that PEFT has wrapped: LoRA on the head, and a head of `modules_to_save`.

The logits of a LoRA layer are those of the base layer plus `scaling * B(A(dropout(x)))` for each active adapter. `A`
and the dropout are called as PEFT calls them, so that random numbers are drawn in the same order. Their outputs, `rank`
numbers per row, follow the inputs of the base layer. The products with the base weight and each `B` are computed in
chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.model.linear_head import Adapter


def is_lora(module: object) -> bool:
    """Returns True for PEFT's LoRA of a linear layer whose weight is not quantized."""
    kind = type(module)
    return kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear"


def is_trained_copy(module: object) -> bool:
    """Returns True for a module that PEFT trains whole (`modules_to_save`), beside the original one."""
    kind = type(module)
    return kind.__module__ == "peft.utils.other" and kind.__name__ == "ModulesToSaveWrapper"


def copy_in_use(wrapper: Any) -> nn.Module:
    """Returns the module that the wrapper of `modules_to_save` calls."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        found: nn.Module = wrapper.original_module
    else:
        found = wrapper.modules_to_save[wrapper.active_adapters[0]]
    return found


def linear_of(head: Any) -> nn.Linear:
    """Returns the linear layer of a head without its adapters."""
    found: nn.Linear = head.base_layer if is_lora(head) else head
    return found


def active_adapters(head: Any) -> list[str]:
    """Returns the names of the adapters that the forward of a LoRA layer adds."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def layers_of(head: Any) -> list[nn.Module]:
    """Returns the layers whose products are computed in chunks instead of by their forward."""
    if not is_lora(head):
        return [head]
    return [head.base_layer, *(head.lora_B[name] for name in active_adapters(head))]


def find_adapter_obstacle(head: Any, name: str) -> str | None:
    """Returns the reason why a LoRA layer is more than a sum of products; None if it is one."""
    if head.disable_adapters and head.merged:
        return f"the adapters of {name} are both merged and disabled"
    for adapter in active_adapters(head):
        variant = getattr(head, "lora_variant", {}).get(adapter)
        if variant is not None:
            kind = variant if isinstance(variant, type) else type(variant)
            return f"the adapter {adapter!r} of {name} is no plain LoRA ({kind.__name__})"
        if head.use_dora.get(adapter, False):
            return f"the adapter {adapter!r} of {name} is no plain LoRA (DoRA)"
    return None


def adapt(head: Any, rows: Tensor) -> tuple[Tensor, Tensor | None, tuple[Adapter, ...]]:
    """Returns the inputs of the products of a head, its bias, and its adapters.

    Args:
        head: a linear layer, or LoRA on one.
        rows: `(..., num_features)`, the inputs of the head.

    Returns:
        `(..., num_features + ranks)`, where the inputs of each adapter follow those of the base layer; the sum of all
        biases, or None; and the adapters.
    """
    bias: Tensor | None = linear_of(head).bias
    if not is_lora(head):
        return rows, bias, ()
    inputs, adapters, last = [rows], [], rows
    for name in active_adapters(head):
        down, up, scaling = head.lora_A[name], head.lora_B[name], float(head.scaling[name])
        if getattr(head, "cast_input_dtype_enabled", True):
            last = last.to(down.weight.dtype)
        inputs.append(down(head.lora_dropout[name](last)))
        adapters.append(Adapter(up.weight, scaling))
        if up.bias is not None:
            bias = up.bias * scaling if bias is None else bias + up.bias * scaling
    if not adapters:
        return rows, bias, ()
    # columns of two dtypes become the wider one, and are converted back before the products: no number is rounded
    return torch.cat(inputs, -1), None if bias is None else bias.to(linear_of(head).weight.dtype), tuple(adapters)
