"""Models made by the user's `model_init`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def make_model(model_init: Callable[..., Any], trial: Any = None) -> nn.Module:
    """Call `model_init`, which takes nothing or the trial of a hyper-parameter search.

    Raises:
        TypeError: it returned no module.
    """
    try:
        parameters = inspect.signature(model_init).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    takes_trial = len(required) == 1 or any(p.name == "trial" for p in parameters)
    return check_model(model_init(trial) if takes_trial else model_init(), "`model_init` returned")


def check_model(model: Any, source: str) -> nn.Module:
    """The model, if it is a module.

    Raises:
        TypeError: it is not; the message begins with `source`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{source} {type(model).__name__}; an nn.Module is needed.")
    return model
