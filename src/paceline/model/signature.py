"""What a model's `forward` accepts, read once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ForwardSignature:
    """The parameters of a model's `forward`.

    Attributes:
        names: parameter names in order, without `self`.
        required: those without a default.
        takes_keywords: whether it has `**kwargs`.
        takes_num_items: whether the loss inside the model is divided by `num_items_in_batch` when that is given.
        can_return_loss: whether `return_loss=True` is a default (CLIP-like models, whose loss needs no labels).
    """

    names: tuple[str, ...]
    required: frozenset[str]
    takes_keywords: bool
    takes_num_items: bool
    can_return_loss: bool


def innermost(model: nn.Module) -> nn.Module:
    """The module that an adapter library wrapped (PEFT's `get_base_model`), or the module itself."""
    get_base = getattr(model, "get_base_model", None)
    inner = get_base() if callable(get_base) else model
    return inner if isinstance(inner, nn.Module) else model


def read_signature(model: nn.Module) -> ForwardSignature:
    """Read `model.forward`; a wrapper that only forwards `**kwargs` is looked through."""
    inner = innermost(model)
    try:
        parameters = inspect.signature(inner.forward).parameters
    except (TypeError, ValueError):  # a compiled or scripted forward tells nothing
        return ForwardSignature((), frozenset(), True, False, False)
    kinds = inspect.Parameter
    named = {k: p for k, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    keywords = any(p.kind == kinds.VAR_KEYWORD for p in parameters.values())
    return_loss = named.get("return_loss")
    return ForwardSignature(
        names=tuple(named),
        required=frozenset(name for name, p in named.items() if p.default is kinds.empty),
        takes_keywords=keywords,
        takes_num_items=takes_num_items(inner, named, keywords),
        can_return_loss=return_loss is not None and return_loss.default is True,
    )


def takes_num_items(model: nn.Module, named: dict[str, Any], takes_keywords: bool) -> bool:
    """Whether the model divides its loss by `num_items_in_batch`.

    It says so by an attribute `accepts_loss_kwargs`, by a parameter of that name, or, where `forward` only has
    `**kwargs`, by carrying the `loss_function` that models of transformers hand them to.
    """
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    if "num_items_in_batch" in named:
        return True
    return takes_keywords and hasattr(type(model), "loss_function")


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model of transformers is known to compare the output at i with the label at i + 1."""
    inner = innermost(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    if not hasattr(type(inner), "loss_function"):
        return False
    return "CausalLM" in getattr(inner.loss_function, "__name__", "")
