"""Replaces torch's normalization layers by the fused ones of NVIDIA's Apex, with the same parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.core.apex import has_apex


def fuse_norms(model: nn.Module) -> tuple[str, Callable[[], None]]:
    """Replaces every `nn.LayerNorm` and `nn.RMSNorm` in place.

    Layers with hooks and layers without an equivalent in Apex are kept.

    Returns:
        A note, and the function that restores the layers.
    """
    if not has_apex("normalization"):
        return "This Apex has no fused norms: torch's stay.", lambda: None
    fused: Any = importlib.import_module("apex.normalization")
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            made = _fused(fused, layer)
            if made is not None:
                setattr(owner, name, made)
                swapped.append((owner, name, layer))

    def undo() -> None:
        for owner, name, layer in swapped:
            layer.train(getattr(owner, name).training)
            setattr(owner, name, layer)

    return f"Apex's fused norms in {len(swapped)} places.", undo


def _fused(fused: object, layer: nn.Module) -> nn.Module | None:
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if has_hooks or type(layer) not in (nn.LayerNorm, nn.RMSNorm):
        return None
    parameters = dict(layer.named_parameters(recurse=False))
    eps: Any = layer.eps
    if isinstance(layer, nn.LayerNorm):
        if layer.elementwise_affine and layer.bias is None:
            return None
        kind = getattr(fused, "FusedLayerNorm", None)
    else:
        kind = getattr(fused, "FusedRMSNorm", None)
        if eps is None:  # torch's default is the epsilon of the dtype
            eps = torch.finfo(next(iter(parameters.values())).dtype if parameters else torch.float32).eps
    if kind is None:
        return None
    made: nn.Module = kind(layer.normalized_shape, eps=eps, elementwise_affine=layer.elementwise_affine)
    for name, parameter in parameters.items():
        setattr(made, name, parameter)
    return made.train(layer.training)
