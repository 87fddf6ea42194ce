"""Collators, which make batches of samples."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from paceline.pytorch.data.padding import fill_rows, pad_features

LABEL_NAMES = ("label", "label_ids")


def default_data_collator(
    features: Sequence[Any],
    return_tensors: str = "pt",
    keep_names: frozenset[str] = frozenset(),
) -> Any:
    """Stacks samples of equal shape.

    Samples may be dicts (or BatchEncodings, dataclasses, plain objects with attributes), whose values are stacked by
    name; tuples, lists or named tuples, whose items are stacked by position; arrays, tensors or numbers. Values may be
    nested. `label` and `label_ids` of dict-like samples become `labels`: integers as int64, others as float32. Strings
    are kept as lists; a value that is None in the first sample is dropped.

    Args:
        features: the samples, at least one.
        return_tensors: `pt` or `np`.
        keep_names: those of `label` and `label_ids` that are not renamed, because the model's forward takes them.

    Returns:
        A batch with the samples' structure; the first dimension of every array is the samples.

    Raises:
        ValueError: the values of a name have different shapes, or some samples lack the name; the message names it.
    """
    if return_tensors not in ("pt", "np"):
        raise ValueError(f"return_tensors={return_tensors!r} is unknown: use 'pt' or 'np'.")
    stack = stack_tensors if return_tensors == "pt" else stack_arrays
    first = features[0]
    if isinstance(first, Mapping):
        return collate_fields(features, stack, keep_names)
    if isinstance(first, tuple) and len({len(feature) for feature in features}) == 1:
        return collate_places(list(features), stack, "sample")  # (input, target), numbers included
    if is_value(first) or isinstance(first, list | tuple):
        return collate_values(list(features), stack, "sample")
    return collate_fields([vars(feature) for feature in features], stack, keep_names)


class DataCollatorMixin:
    """A collator that returns tensors or arrays, depending on `return_tensors` of the call or else of the object.

    Subclasses define `collate(examples, kind)`. It is called through `torch_call` and `numpy_call`, because subclasses
    of transformers' collators override these.
    """

    return_tensors: str

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Any:
        kind = return_tensors or self.return_tensors
        if kind not in ("pt", "np"):
            raise ValueError(f"return_tensors={kind!r} is unknown: use 'pt' or 'np'.")
        return self.torch_call(features) if kind == "pt" else self.numpy_call(features)

    def torch_call(self, examples: Sequence[Any]) -> Any:
        """Returns the batch as tensors."""
        return self.collate(examples, "pt")

    def numpy_call(self, examples: Sequence[Any]) -> Any:
        """Returns the batch as arrays."""
        return self.collate(examples, "np")

    def collate(self, examples: Sequence[Any], kind: str) -> Any:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        raise NotImplementedError


@dataclass
class DefaultDataCollator(DataCollatorMixin):
    """The class form of `default_data_collator`.

    Attributes:
        return_tensors: `pt` or `np`.
        keep_names: see `default_data_collator`.
    """

    return_tensors: str = "pt"
    keep_names: frozenset[str] = frozenset()

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Any:
        return default_data_collator(features, return_tensors or self.return_tensors, self.keep_names)


@dataclass
class DataCollatorWithPadding:
    """Pads samples to one length with a tokenizer's (or other processor's) `pad`.

    Labels that are a list per sample are padded with -100, which losses ignore. They are padded to the length and on
    the side of the inputs if there is one label per token, else to the longest labels of the batch.

    Attributes:
        tokenizer: has `pad(features, padding=, max_length=, pad_to_multiple_of=, return_tensors=)`.
        padding: True or `longest`: to the longest of the batch; `max_length`: to `max_length`, or the model's
            maximum input length; False or `do_not_pad`: no padding.
        max_length: in tokens.
        pad_to_multiple_of: round the length up to a multiple, for tensor cores and fewer compilations.
        return_tensors: `pt` or `np`.
        keep_names: those of `label` and `label_ids` that are not renamed, because the model's forward takes them.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    keep_names: frozenset[str] = frozenset()

    def __call__(self, features: Sequence[Any]) -> Any:
        features, name, labels = take_label_lists(features)
        batch = pad_features(
            self.tokenizer,
            features,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=self.return_tensors,
        )
        for other in LABEL_NAMES:
            if other in batch and other not in self.keep_names:
                batch["labels"] = batch[other]
                del batch[other]
        if labels:
            batch[name if name in self.keep_names else "labels"] = self._pad_labels(labels, features, batch)
        return batch

    def _pad_labels(self, labels: list[Any], features: Sequence[Any], batch: Any) -> Any:
        width, side = max(map(len, labels)), "right"
        for name, value in batch.items():  # look for a padded input with one entry per label
            rows = [feature.get(name) for feature in features]
            pairs = zip(rows, labels, strict=True)
            is_aligned = all(hasattr(row, "__len__") and len(row) == len(label) for row, label in pairs)
            if is_aligned and len(getattr(value, "shape", ())) >= 2:
                width, side = value.shape[1], getattr(self.tokenizer, "padding_side", "right")
                break
        filled = fill_rows(labels, width, -100, side)
        return torch.from_numpy(filled) if self.return_tensors == "pt" else filled


def take_label_lists(features: Sequence[Any]) -> tuple[Sequence[Any], str, list[Any]]:
    """Returns the samples without list-valued labels, the labels' name, and the labels as arrays (empty if none)."""
    first = features[0]
    name = next((name for name in ("labels", *LABEL_NAMES) if isinstance(first, Mapping) and name in first), None)
    if name is None or not isinstance(first[name], list | tuple | np.ndarray | torch.Tensor):
        return features, "labels", []
    labels = [np.asarray(feature[name]) for feature in features]
    if any(label.ndim != 1 or label.dtype.kind not in "iu" for label in labels):
        return features, name, []
    rest = [{key: value for key, value in feature.items() if key != name} for feature in features]
    return rest, name, labels


def choose_collator(processing_class: object, forward_names: Iterable[str]) -> Any:
    """Returns the default collator of a Trainer: it pads if the tokenizer or processor can, else stacks.

    Args:
        processing_class: a tokenizer or processor, or None.
        forward_names: parameters of the model's forward; `label` and `label_ids` among them are not renamed.
    """
    keep_names = frozenset(LABEL_NAMES).intersection(forward_names)
    if hasattr(processing_class, "pad"):
        return DataCollatorWithPadding(processing_class, keep_names=keep_names)
    return DefaultDataCollator(keep_names=keep_names)


def collate_fields(features: Sequence[Mapping[str, Any]], stack: Any, keep_names: frozenset[str]) -> dict[str, Any]:
    """Collates mappings by name, and renames labels."""
    first = features[0]
    batch: dict[str, Any] = {}
    labels = None
    for name in LABEL_NAMES:
        if labels is None and name not in keep_names and first.get(name) is not None:
            labels = name
    for name, value in first.items():
        if value is None:
            continue
        try:
            values = list(map(itemgetter(name), features))
        except KeyError:
            raise missing_name(features, name) from None
        if name not in LABEL_NAMES or name in keep_names:
            is_flat = isinstance(value, torch.Tensor)  # the usual case: saves one call per name
            batch[name] = stack(values, name) if is_flat else collate_values(values, stack, name)
        elif name == labels:
            batch["labels"] = stack(values, name, labels=True) if not isinstance(value, str) else values
    return batch


def collate_values(values: list[Any], stack: Any, name: str) -> Any:
    """Collates the values of one name: recursively if they are containers, else by stacking."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: collate_values([value[key] for value in values], stack, f"{name}.{key}") for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        rows = [vars(value) for value in values]
        return {key: collate_values([row[key] for row in rows], stack, f"{name}.{key}") for key in rows[0]}
    if isinstance(first, str | bytes) or first is None:
        return values
    if isinstance(first, list | tuple) and not is_numeric(first):
        if any(len(value) != len(first) for value in values):
            raise ragged(name, values)
        return collate_places(values, stack, name)
    return stack(values, name)


def collate_places(values: list[Any], stack: object, name: str) -> Any:
    """Collates tuples or lists of equal length by position, into one object of their type."""
    first = values[0]
    columns = [
        collate_values(list(column), stack, f"{name}[{place}]")
        for place, column in enumerate(zip(*values, strict=True))
    ]
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


def stack_tensors(values: list[Any], name: str, labels: bool = False) -> Any:
    """Stacks values of one shape to a tensor of shape (samples, *shape); numbers become int64 or float32."""
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            stacked = torch.stack(values)
            return as_label_type(stacked) if labels and first.ndim == 0 else stacked
        if isinstance(first, np.ndarray | np.generic):
            stacked = torch.from_numpy(np.stack(values))
            return as_label_type(stacked) if labels else stacked
        if labels:
            return torch.tensor(values, dtype=torch.int64 if is_whole(first) else torch.float32)
        return torch.tensor(values)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ragged(name, values, error) from error


def as_label_type(labels: torch.Tensor) -> torch.Tensor:
    """Returns class indices as int64, other targets as float32."""
    return labels.to(torch.float32 if labels.is_floating_point() else torch.int64)


def stack_arrays(values: list[Any], name: str, labels: bool = False) -> Any:
    """Stacks values like `stack_tensors`, but returns a numpy array."""
    try:
        rows = [value.numpy() if isinstance(value, torch.Tensor) else value for value in values]
        if labels and not (isinstance(rows[0], np.ndarray) and rows[0].ndim):
            return np.array(rows, dtype=np.int64 if is_whole(rows[0]) else np.float32)
        return np.stack(rows)
    except (ValueError, TypeError) as error:
        raise ragged(name, values, error) from error


def is_value(value: object) -> bool:
    """Returns True if a sample is itself one value: a number, string, array or tensor."""
    return value is None or isinstance(value, numbers.Number | np.generic | np.ndarray | torch.Tensor | str | bytes)


def is_numeric(values: Iterable[Any]) -> bool:
    """Returns True if a list, possibly nested, contains numbers, judged by its first items."""
    first = next(iter(values), 0)
    if isinstance(first, list | tuple):
        return is_numeric(first)
    return isinstance(first, numbers.Number | np.generic)


def is_whole(value: object) -> bool:
    """Returns True if a number, or the first number of nested lists, is an integer."""
    while isinstance(value, list | tuple):
        value = value[0] if len(value) else 0
    if isinstance(value, torch.Tensor | np.ndarray):
        return not value.is_floating_point() if isinstance(value, torch.Tensor) else bool(value.dtype.kind in "iub")
    return isinstance(value, int | np.integer)


def shape_of(value: object) -> str:
    """Returns text that describes a value's shape."""
    if hasattr(value, "shape"):
        return str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return f"length {len(value)}"
    return type(value).__name__


def ragged(name: str, values: list[Any], error: Exception | None = None) -> ValueError:
    """Returns the error for values that cannot be stacked."""
    shapes = list(dict.fromkeys(shape_of(value) for value in values))
    listed = ", ".join(shapes[:5]) + (", ..." if len(shapes) > 5 else "")
    if len(shapes) > 1 or error is None:
        return ValueError(
            f"The values of {name!r} have different shapes in one batch ({listed}), so they cannot be stacked. Pass a "
            "data_collator that pads them (DataCollatorWithPadding(tokenizer), or processing_class=tokenizer), or pad "
            "them beforehand."
        )
    return ValueError(
        f"The values of {name!r} ({listed}) cannot be made a tensor: {error}. Convert or drop them in the dataset, or "
        "pass a data_collator that does."
    )


def take_column(examples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Returns the values of one name in all samples.

    Raises:
        ValueError: a sample lacks it.
    """
    try:
        return [example[name] for example in examples]
    except KeyError:
        raise missing_name(examples, name) from None


def missing_name(features: Sequence[Mapping[str, Any]], name: str) -> ValueError:
    """Returns the error for a name that not every sample has."""
    place = next(index for index, feature in enumerate(features) if name not in feature)
    return ValueError(
        f"The first sample of a batch has {name!r}, sample {place} has only {', '.join(map(repr, features[place]))}. "
        "Give every sample the same names, or pass a data_collator that fills the gaps."
    )
