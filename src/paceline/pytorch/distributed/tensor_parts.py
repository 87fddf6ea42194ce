"""Sharded tensors: the local shard, the whole, and nests of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """True if `value` is a DTensor. Their module, 0.4 s of imports, is loaded only if one has been made."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Any) -> Tensor:
    """Returns this process's part of a tensor, detached."""
    held: Tensor = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's part of a parameter that it has partitioned
    held = held.detach()
    return held.to_local() if is_dtensor(held) else held


def whole(value: object) -> Any:
    """Returns the full tensor of all shards, on the host; all processes take part. Any other value is unchanged."""
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
    """Returns the names of a model's own values that were not given, and the given ones that it does not have.

    Args:
        own: `state_dict(keep_vars=True)`: a value with several names is given when one of these is.
        given: names.
    """
    names = list(given)
    known = {id(own[name]) for name in names if name in own}
    return [name for name in own if id(own[name]) not in known], [name for name in names if name not in own]
