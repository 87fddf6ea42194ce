"""Linear layers that compute in 8-bit floating point, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import require

NVIDIA_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
AMD_ARCHITECTURES = ("gfx94", "gfx95")  # MI300, MI350
MULTIPLE = 16  # matrix products in 8 bits take sizes that are multiples of it


def check_device(device: torch.device) -> None:
    """Refuses a device that does not compute in 8 bits; nothing is emulated.

    Raises:
        UnsupportedOption: the message names the device.
    """
    if device.type != "cuda":
        shown, can = str(device), False
    else:
        properties = torch.cuda.get_device_properties(device)
        architecture = str(getattr(properties, "gcnArchName", ""))
        shown = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
        if torch.version.hip:
            can = architecture.startswith(AMD_ARCHITECTURES)
        else:
            can = (properties.major, properties.minor) >= NVIDIA_CAPABILITY
    if not can:
        raise UnsupportedOption(
            f"fp8=True is not supported on {shown}: it needs an NVIDIA GPU of compute capability 8.9 or more, or an "
            "AMD MI300. Leave it out, and keep bf16=True."
        )


def use_fp8(model: nn.Module, config: Any = None) -> tuple[str, Callable[[], None]]:
    """Makes the linear layers of `model` compute in 8 bits, forward and backward; parameters and names stay the same.

    Left out are the head that makes the logits, layers whose sizes are no multiples of 16, and subclasses of nn.Linear.
    The layers keep their identity, since hooks, sharding and adapters refer to them.

    Args:
        config: torchao's `Float8LinearConfig`; None scales each tensor by its current largest value.

    Returns:
        A note, and a function that makes them ordinary again.

    Raises:
        ImportError: torchao is missing.
        UnsupportedOption: no layer can be converted.
    """
    convert = require("torchao.float8", "torchao").convert_to_float8_training
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    head = _head_of(model)
    chosen = [
        layer
        for layer in layers
        if layer is not head and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    ]
    if not chosen:
        raise UnsupportedOption(
            f"fp8=True: none of the {len(layers)} linear layers of {type(model).__name__} has sizes that are multiples "
            f"of {MULTIPLE}, apart from its head. Leave it out."
        )
    # torchao replaces the children of a module: a list stands in for the model
    converted = convert(nn.ModuleList(chosen), config=config)
    added = [_become(layer, other) for layer, other in zip(chosen, converted, strict=True)]
    kind = type(chosen[0])

    def undo() -> None:
        for layer, names in zip(chosen, added, strict=True):
            if type(layer) is not kind:  # a unit of a sharded model, whose class is torch's now
                continue
            layer.__class__ = nn.Linear
            for name in names:
                delattr(layer, name)

    return f"{len(chosen)} of {len(layers)} linear layers compute in 8-bit floating point.", undo


def _become(layer: nn.Module, other: nn.Module) -> list[str]:
    """Gives a layer the class and the settings of another one; returns the names of the settings."""
    names = [name for name in vars(other) if name not in vars(layer)]
    for name in names:
        setattr(layer, name, getattr(other, name))
    layer.__class__ = type(other)
    return names


def _head_of(model: nn.Module) -> object:
    ask = getattr(model, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        return None
