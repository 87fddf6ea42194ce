"""Checks models given by the user or made by `model_init`, and rejects those that cannot be trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def make_model(model_init: Callable[..., Any], trial: object = None) -> nn.Module:
    """Returns the model from `model_init`, which takes no argument or the trial of a hyperparameter search.

    Raises:
        RuntimeError: `model_init` requires several arguments, or returned None.
        TypeError: it did not return a module.
    """
    try:
        parameters = inspect.signature(model_init).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    takes_trial = len(required) == 1 or any(p.name == "trial" for p in parameters)
    if len(required) > 1:
        raise RuntimeError(f"model_init should have 0 or 1 argument; it needs {len(required)}.")
    model = model_init(trial) if takes_trial else model_init()
    if model is None:
        raise RuntimeError("model_init should not return None: let it return the model.")
    return check_model(model, "`model_init` returned")


def check_model(model: object, source: str) -> nn.Module:
    """Returns the model if it is a module.

    Raises:
        TypeError: it is not a module; the message begins with `source`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{source} {type(model).__name__}; an nn.Module is needed.")
    return model


def check_trainable(model: nn.Module) -> None:
    """Rejects a quantized model of transformers without an adapter, or with one that gets no gradient.

    Quantized weights take no gradient, so only the floating-point parameters (norms and biases) would be trained.

    Raises:
        ValueError: the model is quantized and cannot be trained.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    has_adapter = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if not getattr(model, "is_quantized", False) or quantizer is None:
        return
    if not has_adapter and not getattr(quantizer, "is_qat_trainable", False):
        raise ValueError(
            f"You cannot perform fine-tuning on purely quantized models: {type(model).__name__} is quantised "
            f"({method_of(quantizer)}), and quantised weights cannot be trained: "
            "add an adapter (`peft.get_peft_model(model, LoraConfig(...))`), or load the model without "
            "`quantization_config`."
        )
    if not getattr(quantizer, "is_trainable", True):
        raise ValueError(
            f"{type(model).__name__} is quantised with {method_of(quantizer)}, through which no gradient passes, to an "
            "adapter either: quantise it with bitsandbytes, or load it without `quantization_config`."
        )


def method_of(quantizer: object) -> str:
    """Returns the name of a quantization method."""
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "unknown")
    return str(getattr(method, "value", method))
