"""Tensors of which processes hold parts: the part that lies here, the whole, and nests of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor, without its graph."""
    held: Tensor = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's part of a parameter that it has cut up
    held = held.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def whole(value: Any) -> Any:
    """A tensor of all shards, on the host, for which all processes take part; what is no shard as it is."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest of dicts, lists and tuples with `function` of each tensor, in the same order everywhere."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {key: map_tensors(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map_tensors(function, value) for value in nest)
    return nest


def differing_names(own: Mapping[str, Any], given: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of a model's own values that were not given, and the given ones that it does not have.

    Args:
        own: `state_dict(keep_vars=True)`: values with several names are there when one of these is.
        given: names.
    """
    names = list(given)
    known = {id(own[name]) for name in names if name in own}
    return [name for name in own if id(own[name]) not in known], [name for name in names if name not in own]
