"""The head of a model whose processes share its weights: its logits are settled within the model's forward.

torch's `fully_shard` gathers the parameters outside of all units before the model's forward, takes them back after it,
and gathers them again when the backward pass reaches an output. With tensor parallelism the processes have to read
logits together, and all of them run the forward. So the loss has to be computed within the forward. Logits that the
loss does without are computed before its end if code keeps them, and cannot be read later otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.data.batches import recast
from paceline.pytorch.model.lazy_logits import Family, LazyLogits, Recipe, attach
from paceline.pytorch.model.vocabulary_shard import Readers, is_by_classes, is_split

IN_UNIT = "belongs to a unit of FSDP, which takes its weights back before the loss is computed"
KEEPER = "code that keeps them"


def is_sharded(module: object) -> bool:
    """Returns True for a module that `fully_shard` was applied to. Does not import torch's module of it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Returns True for a plain nn.Linear, and for one that `fully_shard` was applied to."""
    kind = type(module)
    return kind is nn.Linear or (is_sharded(module) and kind.__bases__[-1] is nn.Linear)


def find_sharding_obstacle(path: Sequence[nn.Module], layers: Sequence[nn.Module], name: str) -> str | None:
    """Returns the reason why FSDP leaves the weights of a head sharded in a part of the model's forward; None: it
    does not.

    Args:
        path: the modules from the model down to the head.
        layers: the linear layers of the head.
        name: the name of the head.
    """
    *between, head = path[1:]
    if is_sharded(head) and is_linear(head):
        return None  # it keeps its weights until the backward pass
    if any(is_sharded(module) for module in (*between, head, *layers)):
        return f"{name} {IN_UNIT}"
    return None


def are_at_hand(layers: Sequence[nn.Module]) -> bool:
    """Returns True if the weights of all layers are plain tensors, as while the forward of a sharded model runs.

    The classes of a single layer may be split by tensor parallelism.
    """
    if len(layers) == 1 and is_split(layers[0]):
        return is_by_classes(layers[0])
    weights: list[Any] = [layer.weight for layer in layers]
    return all(type(weight.data) is Tensor for weight in weights)


@contextmanager
def kept_whole(unit: Any) -> Iterator[None]:
    """Lets a unit of FSDP keep its weights after its forward while entered, until its backward pass."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    before = [group.post_forward_mesh_info for group in groups]
    unit.reshard()  # after a pass that had no backward pass
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        if not torch.is_grad_enabled():
            unit.reshard()


def run_to_end(
    units: Sequence[Any],
    forward: Callable[[], Any],
    families: Sequence[Family],
    made: Sequence[weakref.ref[Any]],
    computes_kept: bool,
    computes_outputs: bool,
    readers: Readers | None,
) -> Any:
    """Runs the forward of a model whose processes share its weights; no logits need these afterwards.

    Args:
        units: the units of FSDP whose weights are used, first the model if it is one.
        forward: runs the forward.
        families: those of the logits of the head, which the forward adds.
        made: these logits.
        computes_kept: logits that code keeps are computed; else reading them is an error.
        computes_outputs: the logits of the outputs are computed.
        readers: lets all processes compute what one of them reads; None: each reads for itself.

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
        is_kept = readers is None and isinstance(value, LazyLogits) and value.recipe.family.stored_by == KEEPER
        return stood_in[id(value)].compute() if is_kept else value

    outputs = recast(forward(), stand_in)
    for reference in made:
        kept = reference()
        if kept is not None and kept.recipe.logits is None and computes_kept:
            kept.recipe.family.stored_by = KEEPER
            gathers_before_backward(units, kept.recipe.compute())
    outputs = recast(outputs, computed)
    if readers is not None:
        readers.meet()
    for family in families:
        family.is_gone = True
    return recast(outputs, lambda value: gathers_before_backward(units[1:], value))


def gathers_before_backward(units: Sequence[Any], value: Tensor) -> Tensor:
    """Returns a tensor of a forward that is no output of these units, from which backward passes may begin."""
    if value.requires_grad:
        for unit in units:
            unit._get_fsdp_state()._register_pre_backward_hook(value)
    return value
