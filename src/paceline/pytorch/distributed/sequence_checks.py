"""Checks of a model that is to run on shards of its sequences: names of inputs, layers, and positions."""

from __future__ import annotations

import inspect
from itertools import chain

from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.args.errors import UnsupportedOption

KINDS = {"full_attention", "sliding_attention"}  # of layers


def title_of(model: nn.Module) -> str:
    """Returns the name of a model's class; sharding by FSDP replaces the class."""
    return next(each.__name__ for each in type(model).__mro__ if not issubclass(each, FSDPModule))


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters of the model's forward, with "**" for arbitrary keywords."""
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple("**" if each.kind is each.VAR_KEYWORD else each.name for each in parameters if each.name != "self")


def check_model(model: nn.Module, names: tuple[str, ...], said: str) -> None:
    """Refuses a model whose positions or targets would be wrong on shards.

    Raises:
        UnsupportedOption: names the missing feature.
    """
    said = f"{said}: {title_of(model)}"
    if "position_ids" not in names:
        raise UnsupportedOption(f"{said} takes no position_ids, so positions would restart in every shard.")
    is_causal_loss = getattr(model, "loss_type", None) == "ForCausalLM" and "**" in names
    if "labels" in names and not ("shift_labels" in names or is_causal_loss):
        raise UnsupportedOption(
            f"{said} takes labels and no shift_labels: the last token of a part has its target in the next. Let its "
            "forward take shift_labels (the target of each token, -100 for none), and make its loss of these."
        )
    kinds = set(getattr(getattr(model, "config", None), "layer_types", None) or ["full_attention"])
    if kinds - KINDS:
        others = ", ".join(sorted(kinds - KINDS))
        raise UnsupportedOption(f"{said} has layers of the kind {others}, which are not supported; leave it out.")
    # these depend on the last position of a pass, which differs in each shard; no short sample detects it
    rotations = sorted(rope for rope in rope_types(model) if "dynamic" in rope or rope == "longrope")
    if rotations:
        raise UnsupportedOption(
            f"{said} has rotary positions of the type {rotations[0]!r}, which change with the length of a part; leave "
            "it out, or set another rope_type in the model's configuration."
        )


def rope_types(model: nn.Module) -> set[str]:
    """Returns the types of a model's rotary positions, as transformers names them."""
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    every = chain.from_iterable(each.values() if isinstance(each, dict) else [each] for each in found)
    return {each for each in every if isinstance(each, str)}
