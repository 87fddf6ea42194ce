"""Reads the parameters of a model's `forward`, and the reductions of known losses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.pytorch.model.reductions import SUM, LossReduction

# suffixes of class names of transformers' heads, grouped by the reduction of their own loss
TARGETS = ("ForMaskedLM", "ForTokenClassification")
NEXT_TOKENS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSpeechSeq2Seq", "ForVision2Seq")
SAMPLES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForQuestionAnswering",
)
CTC = {"sum": SUM, "mean": LossReduction("samples")}
# model types of transformers whose output for a sample depends on the other samples of the batch
COUPLED = {"hunyuan_vl": "{} numbers the images of a whole batch in its position ids"}


@dataclass(frozen=True)
class ForwardSignature:
    """The parameters of a model's `forward`.

    Attributes:
        names: parameter names in order, without `self`.
        required: names of the parameters without a default.
        takes_keywords: True if it has `**kwargs`.
        takes_num_items: True if the model divides its loss by `num_items_in_batch` when that is passed.
        can_return_loss: True if the default is `return_loss=True` (CLIP-like models, whose loss needs no labels).
    """

    names: tuple[str, ...]
    required: frozenset[str]
    takes_keywords: bool
    takes_num_items: bool
    can_return_loss: bool


def innermost(model: nn.Module) -> nn.Module:
    """Returns the module that an adapter library wrapped (PEFT's `get_base_model`), or the module itself."""
    get_base = getattr(model, "get_base_model", None)
    inner = get_base() if callable(get_base) else model
    return inner if isinstance(inner, nn.Module) else model


def read_signature(model: nn.Module) -> ForwardSignature:
    """Returns the signature of the innermost model's `forward`."""
    inner = innermost(model)
    try:
        parameters = inspect.signature(inner.forward).parameters
    except (TypeError, ValueError):  # a compiled or scripted forward has no readable signature
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
    """Returns True if the model divides its loss by `num_items_in_batch`.

    Models declare this by the attribute `accepts_loss_kwargs` or by a parameter `num_items_in_batch`. If `forward` has
    `**kwargs`, the `loss_function` of models of transformers receives them.
    """
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    if "num_items_in_batch" in named:
        return True
    return takes_keywords and hasattr(type(model), "loss_function")


def shifts_labels(model: nn.Module) -> bool:
    """Returns True if a model of transformers is known to compare the output at i with the label at i + 1."""
    inner = innermost(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    if not hasattr(type(inner), "loss_function"):
        return False
    return "CausalLM" in getattr(inner.loss_function, "__name__", "")


def known_reduction(model: nn.Module) -> LossReduction | None:
    """Returns the reduction of the loss of a head of transformers, by its class; None for all other modules.

    It is also None for a user's subclass, which may compute another loss.
    """
    inner = innermost(model)
    if type(inner).__module__.split(".")[0] != "transformers":
        return None
    name = type(inner).__name__
    if name.endswith(SAMPLES):
        return LossReduction("samples")
    if name.endswith(TARGETS):
        return LossReduction("tokens")
    if name.endswith("ForCTC"):  # "mean" divides each sample's loss by its targets, and averages over samples
        return CTC.get(getattr(inner.config, "ctc_loss_reduction", ""))
    if name.endswith(NEXT_TOKENS):
        if getattr(inner.config, "is_encoder_decoder", False):
            return LossReduction("tokens")
        return LossReduction("tokens", shifted=True) if shifts_labels(inner) else None
    return None


def has_targets_beside_text(model: nn.Module) -> bool:
    """Returns True for a head of transformers whose targets are no tokens of its text: a class, a span, a tag."""
    return type(innermost(model)).__name__.endswith((*SAMPLES, "ForTokenClassification"))


def coupling(model: nn.Module, signature: ForwardSignature) -> str | None:
    """Returns a sentence on how a model or its loss couples the samples of a batch; None if no coupling is known."""
    inner = innermost(model)
    config = getattr(inner, "config", None)
    name = type(inner).__name__
    if signature.can_return_loss:
        return f"The loss of {name} compares the samples of a batch with each other (negatives from the batch)"
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        return f"The loss of {name} holds an auxiliary loss of its router over a whole batch (output_router_logits)"
    known = COUPLED.get(getattr(config, "model_type", ""))
    return known.format(name) if known and type(inner).__module__.startswith("transformers.") else None
