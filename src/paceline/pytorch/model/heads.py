"""The head of a model, which makes its logits, and the hooks on it."""

from __future__ import annotations

from functools import partial

from torch import nn

from paceline.pytorch.model.signature import innermost

# modules whose hooks on a model neither read nor keep logits
HARMLESS = (
    "paceline.pytorch.distributed.precision",
    "paceline.pytorch.distributed.shard_precision",
    "paceline.pytorch.model.loss_terms",
    "paceline.pytorch.model.offload",
    "torch.distributed.fsdp._fully_shard._fsdp_state",  # gathers and takes back the weights of sharded modules
    "torch.distributed.tensor._api",  # places the inputs and outputs of split modules
)


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
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__module__", None) in HARMLESS
