"""Splits parameters into groups: with and without weight decay, and matrices for Muon."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

INITIAL_DECAY = "initial_weight_decay"
"""Key of a group's weight decay before a run changed it, as torch's schedules keep "initial_lr"."""

OPTIONS_OF = {
    "lr": ("learning_rate",),
    "initial_lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}
"""Key of a parameter group -> options that set it; `optim_args` may set each of them."""

_NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_NORM_CLASS = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_UNDECAYED_NAME = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")


def reset_decay(optimizer: Any) -> None:
    """Restores the weight decay of each group that an earlier run changed."""
    for group in optimizer.param_groups:
        if INITIAL_DECAY in group:
            group["weight_decay"] = group.pop(INITIAL_DECAY)


def group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the settings of each parameter group; of a rate that a schedule computes, the base only."""
    left_out = {"params"}, {"params", "lr"}
    return [
        {name: value for name, value in group.items() if name not in left_out["initial_lr" in group]}
        for group in getattr(optimizer, "param_groups", ())
    ]


def overridden_options(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """Returns the options whose values in the parameter groups differ, such as after an optimizer was restored.

    Args:
        before, after: as `group_settings` returns them.
    """
    keys = {
        name
        for one, other in zip(before, after, strict=False)
        for name, value in one.items()
        if name in other and bool(value != other[name])
    }
    found = {option for name in keys for option in OPTIONS_OF.get(name, ())}
    return found | {"optim_args"} if keys else found


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Returns the names of the parameters with weight decay: all but biases and normalization layers.

    A layer is recognized as normalization by its type (torch's, or a class whose name ends in "Norm") or by the
    parameter's name. Embeddings have weight decay. Tied parameters are listed under each of their names.
    """
    names = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _NORM_LAYERS) or _NORM_CLASS.search(type(module).__name__):
            continue
        for name, _ in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if not _UNDECAYED_NAME.search(full_name.lower()):
                names.append(full_name)
    return names


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    optimizer_name: str = "",
    targets: str | Sequence[str] | None = None,
    decay_names: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups of the trainable parameters of `model`, in the order of `named_parameters`.

    Args:
        model: the model.
        weight_decay: of the first group; the second group, of biases and normalization layers, has none.
        optimizer_name: "muon" puts a group of hidden matrices, marked `use_muon=True`, before these two.
        targets: the modules whose 2-D weights Muon trains; see `matches`. None: all 2-D weights except those of
            embeddings and of the output layer.
        decay_names: names of the parameters with weight decay; None: `decay_parameter_names(model)`.

    Returns:
        Two groups (three for Muon); a group may be empty.

    Raises:
        ValueError: there is no matrix for Muon.
    """
    decayed = set(decay_parameter_names(model) if decay_names is None else decay_names)
    matrices = _matrix_names(model, targets) & decayed if optimizer_name == "muon" else set()
    hidden: list[nn.Parameter] = []
    with_decay: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            others = with_decay if name in decayed else without_decay
            group = hidden if name in matrices else others
            group.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    if optimizer_name != "muon":
        return groups
    if not hidden:
        raise ValueError(
            'optim="muon" found no hidden matrix (a trainable 2-D weight that is neither embedding nor output layer): '
            'name the modules in optim_target_modules, or choose optim="adamw_torch_fused"'
        )
    return [{"params": hidden, "weight_decay": weight_decay, "use_muon": True}, *groups]


def matches(module_name: str, targets: str | Sequence[str]) -> bool:
    """Returns True if `optim_target_modules` names this module.

    "all-linear" matches every name (callers keep only `nn.Linear`). Any other string is a regular expression for the
    whole name. In a list, each entry is the end of the name (such as "attn.q_proj") or a regular expression for the
    whole name.
    """
    if isinstance(targets, str):
        return is_all_linear(targets) or re.fullmatch(targets, module_name) is not None
    return any(
        f".{module_name}".endswith(f".{target}") or re.fullmatch(target, module_name) is not None for target in targets
    )


def is_all_linear(targets: str | Sequence[str]) -> bool:
    """Returns True if `optim_target_modules` is "all-linear" (or "all_linear")."""
    return isinstance(targets, str) and targets.replace("_", "-") == "all-linear"


def _matrices(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, nn.Parameter]]:
    """Yields (parameter name, module name, module, parameter) of every 2-D weight except embeddings, each once."""
    embedded = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and id(parameter) not in embedded:
            module_name = name.rpartition(".")[0]
            yield name, module_name, owners[module_name], parameter


def _matrix_names(model: nn.Module, targets: str | Sequence[str] | None) -> set[str]:
    found = list(_matrices(model))
    if targets is not None:
        return {
            name
            for name, module_name, module, _ in found
            if matches(module_name, targets) and (isinstance(module, nn.Linear) or not is_all_linear(targets))
        }
    head = _output_layer(model, found)
    return {name for name, _, module, _ in found if module is not head}


def _output_layer(model: nn.Module, found: list[tuple[str, str, nn.Module, nn.Parameter]]) -> nn.Module | None:
    """Returns the layer that computes the logits: the layer that the model names, else the last linear layer if it is
    unique; None if there is no such layer.
    """
    ask = getattr(model, "get_output_embeddings", None)
    if callable(ask):
        try:
            named = ask()
        except (NotImplementedError, AttributeError):
            named = None
        if isinstance(named, nn.Module):
            return named
    # a layer of repeated blocks is not unique: others have the same shape, and the same name except for numbers
    kinds = [(re.sub(r"\d+", "#", name), parameter.shape) for name, _, _, parameter in found]
    if found and isinstance(found[-1][2], nn.Linear) and kinds.count(kinds[-1]) == 1:
        return found[-1][2]
    return None
