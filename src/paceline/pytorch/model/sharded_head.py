"""The head of a model that FSDP shards: its weights are whole only while the model's forward runs.

torch's `fully_shard` gathers the parameters outside of all units before the model's forward, takes them back after it,
and gathers them again when the backward pass reaches an output. So the loss has to be computed within the forward.
Logits that the loss does without are computed before its end if code keeps them, and cannot be read later otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.data.batches import recast
from paceline.pytorch.model.lazy_logits import Family, LazyLogits, Recipe, attach

IN_UNIT = "belongs to a unit of FSDP, which takes its weights back before the loss is computed"
KEEPER = "code that keeps them"


def is_sharded(module: object) -> bool:
    """Returns True for a module that `fully_shard` was applied to. Does not import torch's module of it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def find_sharding_obstacle(path: Sequence[nn.Module], layers: Sequence[nn.Module], name: str) -> str | None:
    """Returns the reason why FSDP leaves the weights of a head sharded in a part of the model's forward; None: it
    does not.

    Args:
        path: the modules from the model down to the head.
        layers: the linear layers of the head.
        name: of the head.
    """
    if any(is_sharded(module) for module in (*path[1:], *layers)):
        return f"{name} {IN_UNIT}"
    for layer in layers if is_sharded(path[0]) else ():
        for hook in layer._forward_pre_hooks.values():
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor"):
                return f"{name} is sharded by FSDP and split by tensor parallelism"
    return None


def is_gathered(layers: Sequence[nn.Module]) -> bool:
    """Returns True if the weights of all layers are plain tensors, as while the forward of a sharded model runs."""
    weights: list[Any] = [layer.weight for layer in layers]
    return all(type(weight.data) is Tensor for weight in weights)


def run_to_end(
    model: Any,
    forward: Callable[[], Any],
    families: Sequence[Family],
    made: Sequence[weakref.ref[Any]],
    computes_kept: bool,
    computes_outputs: bool,
) -> Any:
    """Runs the forward of a sharded model; no logits need its weights afterwards.

    Args:
        model: the sharded model.
        forward: runs the forward.
        families: those of the logits of the head, which the forward adds.
        made: these logits.
        computes_kept: logits that code keeps are computed; else reading them is an error.
        computes_outputs: the logits of the outputs are computed.

    Returns:
        The outputs. Logits that the loss did without are stand-ins, which cannot be read.
    """
    stood_in: dict[int, Recipe] = {}

    def stand_in(value: Any) -> Any:
        if not isinstance(value, LazyLogits):
            return value
        recipe = value.recipe
        if computes_outputs or not recipe.family.num_chunked or recipe.family.read_by is not None:
            return recipe.compute()
        with torch.no_grad():
            found: Any = attach(recipe.rows, recipe.head, recipe.family, value.dtype, None, None)
        # without the parent, so that it lives on only if code keeps it
        stood_in[id(found)] = replace(recipe, parent=None, derive=None, node=None)
        return found

    def computed(value: Any) -> Any:
        is_kept = isinstance(value, LazyLogits) and value.recipe.family.stored_by == KEEPER
        return stood_in[id(value)].compute() if is_kept else value

    outputs = recast(forward(), stand_in)
    for reference in made:
        kept = reference()
        if kept is not None and kept.recipe.logits is None and computes_kept:
            kept.recipe.family.stored_by = KEEPER
            gathers_before_backward(model, kept.recipe.compute())
    outputs = recast(outputs, computed)
    for family in families:
        family.is_gone = True
    return outputs


def gathers_before_backward(model: Any, value: Tensor) -> Tensor:
    """Returns a tensor of a sharded model's forward that is no output, from which backward passes may begin."""
    if value.requires_grad:
        model._get_fsdp_state()._register_pre_backward_hook(value)
    return value
