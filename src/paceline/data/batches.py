"""Collated batches of any shape: how many samples they hold, and how to cut them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def batch_size_of(batch: Any) -> int:
    """Number of samples in a collated batch: the leading dimension of the first array in it.

    Args:
        batch: a tensor or array, or dicts, lists, tuples and dataclasses of them, nested at will.

    Raises:
        ValueError: nothing in the batch has a leading dimension.
    """
    size = _leading_size(batch)
    if size is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} holds no tensor or array with a first dimension, so its samples "
            "cannot be counted. Let the data collator return tensors, arrays or lists, one row per sample."
        )
    return size


def split_batch(batch: Any, chunk: int) -> list[Any]:
    """The same samples in batches of at most `chunk`; what is not one row per sample is kept whole in each.

    Args:
        batch: as `batch_size_of` takes it.
        chunk: samples per part, at least 1.
    """
    size = batch_size_of(batch)
    return [cut_batch(batch, size, start, min(start + chunk, size)) for start in range(0, size, chunk)]


def cut_batch(batch: Any, size: int, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch of `size`: every leaf with `size` rows is cut, all else is kept."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[start:stop] if batch.ndim > 0 and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        return rebuild_mapping(batch, {key: cut_batch(value, size, start, stop) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == size and _is_row_list(batch):
            return batch[start:stop]
        return rebuild_sequence(batch, [cut_batch(value, size, start, stop) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {name: cut_batch(value, size, start, stop) for name, value in vars(batch).items()}
        return rebuild_dataclass(batch, fields)
    return batch


def rebuild_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type with other values (a BatchEncoding or ModelOutput stays one, attributes included)."""
    if type(like) is dict:
        return values
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        return type(like)(**values)
    if hasattr(like, "copy") and hasattr(like, "__setitem__"):
        rebuilt = like.copy()
        for key, value in values.items():
            rebuilt[key] = value
        return rebuilt
    return type(like)(values)  # type: ignore[call-arg]


def rebuild_sequence(like: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """A list or tuple (named ones too) of the same type with other values."""
    if hasattr(like, "_fields"):
        return type(like)(*values)
    return values if type(like) is list else type(like)(values)


def rebuild_dataclass(like: Any, values: dict[str, Any]) -> Any:
    """A shallow copy of a dataclass instance with other values; nothing is computed anew."""
    rebuilt = object.__new__(type(like))
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def _leading_size(batch: Any) -> int | None:
    """Depth first; a list of anything but arrays and containers is itself one row per sample."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim > 0 else None
    if isinstance(batch, list | tuple) and batch and _is_row_list(batch):
        return len(batch)
    for value in _children(batch):
        size = _leading_size(value)
        if size is not None:
            return size
    return None


def _is_row_list(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a sequence is itself the rows (numbers, strings, lists of numbers, dicts without an array in them), not a
    container of arrays."""
    first = values[0] if values else None
    if isinstance(first, Mapping):  # samples that the collator left as they are
        return not any(isinstance(value, torch.Tensor | np.ndarray) for value in first.values())
    if isinstance(first, list | tuple):
        return _is_row_list(first) or not first
    return isinstance(first, str | bytes | int | float | bool | np.generic)


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from vars(batch).values()
