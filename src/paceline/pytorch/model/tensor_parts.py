"""Helpers for sharded tensors: the local shard, the whole tensor, and nests of both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.core.optional import LateModule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

tensors: Any = LateModule("torch.distributed.tensor")


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """True if `value` is a DTensor. Does not import the DTensor module, which takes 0.4 s."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Any) -> Tensor:
    """Returns this process's shard of a tensor, detached."""
    held: Tensor = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's shard of a parameter that it has partitioned
    held = held.detach()
    return held.to_local() if is_dtensor(held) else held


def placed_like(value: Tensor, like: Any) -> Any:
    """Returns a value that each process holds whole with the placement of `like`; unchanged if that is no DTensor.

    Each process takes its own part. torch's scatter, which is the default, fails where both FSDP and tensor parallelism
    cut a dimension into parts of different sizes.
    """
    if is_dtensor(value) or not is_dtensor(like):
        return value
    moved = value.detach().to(like.device_mesh.device_type)
    return tensors.distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def whole(value: object) -> Any:
    """Returns a DTensor's full tensor on the host (collective); any other value unchanged."""
    return value.full_tensor().cpu() if is_dtensor(value) else value


def map_tensors(function: Callable[[Any], Any], nest: object) -> Any:
    """Applies `function` to each tensor of a nest of dicts, lists and tuples, in the same order on each process."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {key: map_tensors(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map_tensors(function, value) for value in nest)
    return nest


def differing_names(own: Mapping[str, Any], given: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the missing names (in the model, not given) and the unexpected names (given, not in the model).

    Args:
        own: `state_dict(keep_vars=True)`; a value with several names is missing only if none of them is given.
        given: the names to compare with.
    """
    names = list(given)
    known = {id(own[name]) for name in names if name in own}
    return [name for name in own if id(own[name]) not in known], [name for name in names if name not in own]
