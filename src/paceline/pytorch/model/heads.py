"""The head of a model, which makes its logits, and the hooks on it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from paceline.pytorch.model.signature import innermost

# modules whose hooks on a model neither read nor keep logits
HARMLESS = (
    "paceline.pytorch.distributed.precision",
    "paceline.pytorch.distributed.shard_precision",
    "paceline.pytorch.distributed.tensor_parallel",
    "paceline.pytorch.model.loss_terms",
    "paceline.pytorch.model.offload",
    "torch.distributed.fsdp._fully_shard._fsdp_state",  # gathers and takes back the weights of sharded modules
    "torch.distributed.tensor._api",  # places the inputs and outputs of split modules
)
CASTS = ("cast_outputs", "widen_outputs")  # hooks of this package that cast the outputs of a model


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Returns the module that makes the logits, by the model's `get_output_embeddings`; None if it names none."""
    ask = getattr(innermost(model), "get_output_embeddings", None)
    try:
        found = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def has_hook(module: nn.Module) -> bool:
    """Returns True if a hook that may read them is given the inputs, outputs or gradients of a module."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(not is_harmless(hook) for group in hooks for hook in group.values())


def is_harmless(hook: object) -> bool:
    """Returns True for hooks of this package and of torch that neither read nor keep logits."""
    return getattr(function_of(hook), "__module__", None) in HARMLESS


def function_of(hook: object) -> object:
    """Returns the function that a hook calls."""
    return hook.func if isinstance(hook, partial) else hook


def casts_of(model: nn.Module) -> list[Any] | None:
    """Returns the hooks of a model that cast its outputs; None if another hook may change them."""
    hooks = list(model._forward_hooks.values())
    if not all(is_harmless(hook) for hook in hooks):
        return None
    return [hook for hook in hooks if getattr(function_of(hook), "__name__", "") in CASTS]


def find_reader(path: list[nn.Module]) -> str | None:
    """Describes the code that gets the outputs of the modules above a head and may read the logits; None without any.

    Args:
        path: the modules from the model down to the head.
    """
    for module in path:
        if module._backward_hooks:
            return f"a backward hook is set on {type(module).__name__}"
        if "forward" in vars(module):
            return f"the forward of {type(module).__name__} is replaced"
        for hook in module._forward_hooks.values():
            if not is_harmless(hook):
                return f"a hook is given the outputs of {type(module).__name__}"
    return None
