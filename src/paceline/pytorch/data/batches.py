"""Counts the samples of collated batches of any structure, and splits batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def batch_size_of(batch: object) -> int:
    """Returns the number of samples in a collated batch: the leading dimension of the first array in it.

    A list of arrays or dicts in a batch, such as images or detection targets, either nests batched values or has one
    entry per sample. The other values of the batch decide which; without others, its arrays are batched values if they
    all have the same length.

    Args:
        batch: a tensor or array, or dicts, lists, tuples and dataclasses of them, in any nesting.

    Raises:
        ValueError: nothing in the batch has a leading dimension.
    """
    size = _leading_size(batch)
    if isinstance(batch, dict) and not batch:
        raise ValueError(
            "The batch received was empty, your model won't be able to train on it: let the dataset, or your "
            "data_collator, give what the model's forward takes."
        )
    if size is None:
        raise ValueError(
            f"A batch of type {type(batch).__name__} holds no tensor or array with a first dimension, so its samples "
            "cannot be counted. Let the data collator return tensors, arrays or lists, one row per sample."
        )
    return size


def split_batch(batch: object, chunk: int) -> list[Any]:
    """Splits a batch into batches of at most `chunk` samples; each keeps values without one row per sample unchanged.

    Args:
        batch: a batch as for `batch_size_of`.
        chunk: samples per part, at least 1.
    """
    size = batch_size_of(batch)
    return [cut_batch(batch, size, start, min(start + chunk, size)) for start in range(0, size, chunk)]


def split_batches(batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
    """Returns the same samples in batches of at most `micro_batch_size`."""
    parts: list[Any] = []
    for batch in batches:
        parts += split_batch(batch, micro_batch_size) if batch_size_of(batch) > micro_batch_size else [batch]
    return parts


def cut_batch(batch: Any, size: int, start: int, stop: int) -> Any:
    """Returns samples `start` to `stop` of a batch of `size`: leaves with `size` rows are sliced, others are kept."""
    unclear = [value for value in _children(batch) if _is_open(value) and len(value) == size]
    are_mixed = _are_mixed(unclear)

    def cut(value: Any) -> Any:
        if any(value is each for each in unclear) and (are_mixed or _is_by_sample(value, size)):
            return value[start:stop]
        return cut_batch(value, size, start, stop)

    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[start:stop] if batch.ndim > 0 and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        return rebuild_mapping(batch, {key: cut(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == size and _is_row_list(batch):
            return batch[start:stop]
        return rebuild_sequence(batch, [cut(value) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return rebuild_dataclass(batch, {name: cut(value) for name, value in vars(batch).items()})
    return batch


def rebuild_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type with other values; a BatchEncoding or ModelOutput keeps its attributes."""
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
    """Returns a list or tuple (named ones too) of the same type with other values."""
    if hasattr(like, "_fields"):
        return type(like)(*values)
    return values if type(like) is list else type(like)(values)


def rebuild_dataclass(like: object, values: dict[str, Any]) -> Any:
    """Returns a shallow copy of a dataclass instance with other values; nothing is recomputed."""
    rebuilt = object.__new__(type(like))
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def _leading_size(batch: object) -> int | None:
    """Returns the first leading dimension, depth first; a list of plain values counts as one row per sample."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim > 0 else None
    if isinstance(batch, list | tuple) and batch and _is_row_list(batch):
        return len(batch)
    unclear: list[Any] = []
    for value in _children(batch):
        if _is_open(value):
            unclear.append(value)
            continue
        size = _leading_size(value)
        if size is not None:
            return size
    return _size_of_open(unclear)


def _is_open(value: object) -> bool:
    """Returns True for a list of arrays or dicts, which may nest batched values or have one entry per sample."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or not value or _is_row_list(value):
        return False
    return all(isinstance(item, torch.Tensor | np.ndarray | Mapping) for item in value)


def _size_of_open(unclear: list[Any]) -> int | None:
    """Returns the number of samples of a batch from lists of arrays or dicts; None if they do not show it."""
    lengths = [set(_lengths(value)) for value in unclear]
    is_one = all(lengths) and len(set().union(*lengths)) == 1
    if is_one and not _are_mixed(unclear):  # all arrays in them have as many rows
        return lengths[0].pop()
    if len({len(value) for value in unclear}) == 1:
        return len(unclear[0])
    return next((min(found) for found in lengths if found), None)


def _are_mixed(unclear: list[Any]) -> bool:
    """Returns True for lists of arrays and lists of dicts of one length (images and targets): one entry per sample."""
    of_dicts = {any(isinstance(item, Mapping) for item in value) for value in unclear}
    return len(of_dicts) == 2 and len({len(value) for value in unclear}) == 1


def _is_by_sample(values: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Returns True if a list of `size` arrays or dicts has one entry per sample."""
    lengths = list(_lengths(values))
    has_dicts = any(isinstance(value, Mapping) for value in values)
    return any(length != size for length in lengths) if has_dicts else size not in lengths


def _lengths(value: object) -> Iterator[int]:
    """Yields the first dimension of each array in a nested value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim > 0:
            yield int(value.shape[0])
        return
    for child in _children(value):
        yield from _lengths(child)


def _is_row_list(values: list[Any] | tuple[Any, ...]) -> bool:
    """Returns True if the items of a sequence are rows: numbers, strings, lists of numbers, or dicts without arrays."""
    first = values[0] if values else None
    if isinstance(first, Mapping):  # uncollated samples
        return not any(isinstance(value, torch.Tensor | np.ndarray) for value in first.values())
    if isinstance(first, list | tuple):
        return _is_row_list(first) or not first
    return isinstance(first, str | bytes | int | float | bool | np.generic)


def _children(batch: object) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from vars(batch).values()


def recast(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the nest with `change` applied to its tensors; the same object if no tensor changes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        parts = {key: recast(item, change) for key, item in value.items()}
        return rebuild_mapping(value, parts) if any(parts[key] is not value[key] for key in parts) else value
    if isinstance(value, list | tuple):
        items = [recast(item, change) for item in value]
        has_changed = any(item is not before for item, before in zip(items, value, strict=True))
        return rebuild_sequence(value, items) if has_changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: recast(item, change) for name, item in fields.items()}
        if any(changed[name] is not fields[name] for name in fields):
            return rebuild_dataclass(value, {**vars(value), **changed})
    return value
