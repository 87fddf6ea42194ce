"""Parameter groups of GaLore and APOLLO, which project the linear layers that `optim_target_modules` names."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from paceline.args.sections import Options
from paceline.pytorch.optim.groups import decay_parameter_names, is_all_linear, matches
from paceline.pytorch.optim.layerwise import LayerwiseOptimizer

logger = logging.getLogger(__name__)

HOW = "a list of parts of module names such as ['attn', 'mlp'], a regular expression for whole names, or 'all-linear'"


def low_rank_groups(
    model: nn.Module, args: Options, options: dict[str, Any], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns parameter groups: the other parameters first, then the projected weights.

    With a weight decay, each of the two is split into parameters with and without weight decay.

    Args:
        model: the model.
        args: provides optim and optim_target_modules.
        options: settings of the projected groups (rank, scale, ...).
        weight_decay: 0 disables it.

    Raises:
        ValueError: no module is named, or no named module is a linear layer of the model.
        TypeError: `optim_target_modules` has another type.
    """
    targets = find_targets(model, args)
    projected: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    decayed = set(decay_parameter_names(model)) if weight_decay else set()
    for name, parameter in model.named_parameters():
        (projected if name in targets else others).append((name, parameter))
    groups: list[dict[str, Any]] = []
    for part, settings in ((others, {}), (projected, options)):
        if not weight_decay:
            groups.append({"params": [parameter for _, parameter in part], **settings})
            continue
        for decays in (True, False):
            chosen = [parameter for name, parameter in part if (name in decayed) is decays]
            if chosen:
                decay = weight_decay if decays else 0.0
                groups.append({"params": chosen, "weight_decay": decay, **settings})
    return groups


def find_targets(model: nn.Module, args: Options) -> set[str]:
    """Returns the names of the projected weights; see `low_rank_groups`."""
    targets = args.optim_target_modules
    if not targets:
        raise ValueError(
            f"You need to define `optim_target_modules` to use {args.optim} optimizers, which project the weights of "
            f"some layers: set optim_target_modules to {HOW}."
        )
    if not isinstance(targets, (str, list, tuple)):
        raise TypeError(
            "`optim_target_modules` must be a list of strings or a string: "
            f"optim_target_modules={targets!r} must be {HOW}."
        )
    found = set()
    for name, module in model.named_modules():
        # in a list, "attn" also matches "self_attn.q_proj", as in transformers
        if not matches(name, targets) and not (not isinstance(targets, str) and any(part in name for part in targets)):
            continue
        if isinstance(module, nn.Linear):
            found.add(f"{name}.weight" if name else "weight")
        elif not is_all_linear(targets) and next(module.parameters(recurse=False), None) is not None:
            logger.info("%s is named in optim_target_modules and left out: it is no linear layer.", name)
    if not found:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"No target modules found for {args.optim}: optim_target_modules={targets!r} names no linear layer of "
            f"{type(model).__name__}; it has "
            f"{', '.join(linear[:5]) or 'none'}{', ...' if len(linear) > 5 else ''}. Give {HOW}."
        )
    return found


def apply_targets(
    optimizer_class: object,
    kwargs: dict[str, Any],
    model: nn.Module | None,
    args: Any,
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Returns the class and arguments of a low-rank optimizer, with its parameter groups as "params".

    The class is `LayerwiseOptimizer` if the name of the optimizer ends in "layerwise".

    Raises:
        ValueError: there is no model, or see `low_rank_groups`.
    """
    name = str(args.optim)
    if model is None:
        raise ValueError(f"optim={name!r} looks at the model for the layers to project: pass the model")
    weight_decay = kwargs.get("weight_decay", args.weight_decay)  # one in `optim_args` also excludes biases and norms
    kwargs = {**kwargs, "params": low_rank_groups(model, args, options, weight_decay)}
    if name.endswith("layerwise"):
        return LayerwiseOptimizer, {**kwargs, "optimizer_class": optimizer_class}
    return optimizer_class, kwargs
