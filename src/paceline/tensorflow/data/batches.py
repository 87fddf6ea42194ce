"""Batches of (features, labels): functions to collate, separate, count and slice them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.tensorflow.framework import tf

Array = np.ndarray[Any, Any]
IGNORE_INDEX = -100
# default label columns without label_names: the first group whose names are all present
KNOWN_LABELS = (("labels",), ("label",), ("label_ids",), ("start_positions", "end_positions"))


class Weighted(NamedTuple):
    """The labels of a batch with sample weights, in place of the labels alone.

    Attributes:
        labels: the labels alone.
        sample_weight: as Keras takes it: (batch,), or with the shape of the losses, or one array per output.
    """

    labels: Any
    sample_weight: Any


def split_weights(labels: object) -> tuple[Any, Any]:
    """Returns (labels, sample weights); the weights are None for an unweighted batch."""
    return (labels.labels, labels.sample_weight) if isinstance(labels, Weighted) else (labels, None)


def to_array(value: object) -> Any:
    """Returns a leaf as a numpy array on the host. Ragged and sparse tensors are unchanged; Python floats become
    float32.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    if hasattr(value, "numpy"):
        return value.numpy()
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array  # Python floats, in the dtype of models


def to_rows(value: object) -> Any:
    """Returns a leaf as a host array with a row per sample; ragged rows are padded with -100, sparse rows with 0."""
    if isinstance(value, tf.RaggedTensor):
        is_number = value.dtype.is_floating or (value.dtype.is_integer and not value.dtype.is_unsigned)
        return value.to_tensor(default_value=tf.cast(IGNORE_INDEX, value.dtype) if is_number else None).numpy()
    return tf.sparse.to_dense(value).numpy() if isinstance(value, tf.SparseTensor) else to_array(value)


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Applies `function` to each leaf of a nest of dicts, tuples and lists; None stays None."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {name: map_leaves(function, value) for name, value in nest.items()}
    if isinstance(nest, Weighted):
        return Weighted(*(map_leaves(function, value) for value in nest))
    if isinstance(nest, tuple):
        return tuple(map_leaves(function, value) for value in nest)
    if is_list_of_arrays(nest):
        return [map_leaves(function, value) for value in nest]
    return function(nest)


def is_list_of_arrays(nest: object) -> bool:
    """True if a list is a nest of arrays, False if it is one array written as a list."""
    return isinstance(nest, list) and bool(nest) and not isinstance(nest[0], int | float | str | bytes | list)


def leaves(nest: object) -> Iterator[Any]:
    """Yields every leaf of a nest, in order."""
    if isinstance(nest, Mapping):
        for value in nest.values():
            yield from leaves(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from leaves(value)
    elif nest is not None:
        yield nest


def size_of(batch: object) -> int:
    """Returns the number of samples in a batch: the first dimension of its first leaf.

    Raises:
        ValueError: the batch is empty, or its first leaf is a single number.
    """
    first = next(leaves(batch), None)
    shape = getattr(first, "shape", None)
    if shape is None or len(shape) == 0:
        raise ValueError(f"A batch must be made of arrays with one row per sample; this one begins with {first!r:.80}.")
    return int(shape[0])


def rows(batch: object, start: int, stop: int) -> Any:
    """Returns the rows `start:stop` of a batch."""
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def separate(batch: object, label_names: Sequence[str] | None) -> tuple[Any, Any]:
    """Splits a batch into (features, labels).

    Args:
        batch: `(features, labels)`, `(features, labels, sample_weight)`, `(features,)`, a dict, or features alone.
        label_names: the keys that are labels; None: those of `KNOWN_LABELS`.

    Raises:
        ValueError: the batch is a tuple of more than three parts.
    """
    if isinstance(batch, tuple | list):
        if len(batch) > 3:
            raise ValueError(
                f"A batch of {len(batch)} parts was given; (features, labels) or (features, labels, sample_weight) is "
                "needed. Several inputs go into one part: ((first, second), labels)."
            )
        if len(batch) == 3 and batch[2] is not None:
            return batch[0], Weighted(batch[1], batch[2])
        return batch[0], batch[1] if len(batch) > 1 else None
    if not isinstance(batch, Mapping):
        return batch, None
    names = [name for name in label_names or () if name in batch]
    if label_names is None:
        names = next((list(known) for known in KNOWN_LABELS if all(name in batch for name in known)), [])
    labels = {name: batch[name] for name in names if batch[name] is not None}
    features = {name: value for name, value in batch.items() if name not in names}
    return features, next(iter(labels.values())) if len(labels) == 1 else labels or None


def main_labels(labels: object) -> Any:
    """Returns the labels that are counted: of several, those named `labels`, else the first."""
    if isinstance(labels, Weighted):
        labels = labels.labels
    if isinstance(labels, Mapping):
        return labels.get("labels", next(iter(labels.values()), None))
    if isinstance(labels, tuple | list):
        return labels[0] if labels else None
    return labels


def collate(samples: Sequence[Any], pad: Callable[[list[Any]], Any] | None = None) -> Any:
    """Collates a list of samples into a batch of the same structure, by stacking arrays and numbers.

    Args:
        samples: dicts, (features, labels) tuples, arrays or numbers.
        pad: pads dicts whose rows differ in length, as a tokenizer does.

    Raises:
        ValueError: the samples differ in shape, and `pad` is None.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        try:
            return {name: collate([sample[name] for sample in samples]) for name in first if is_numeric(first[name])}
        except ValueError:
            if pad is None:
                raise
            return pad([{name: value for name, value in sample.items() if is_numeric(value)} for sample in samples])
    if isinstance(first, tuple):
        return tuple(collate([sample[place] for sample in samples]) for place in range(len(first)))
    try:
        return np.stack([np.asarray(to_array(sample)) for sample in samples])
    except ValueError as error:
        shapes = ", ".join(str(np.shape(to_array(sample))) for sample in samples[:4])
        raise ValueError(
            f"Samples of different shapes ({shapes} ...) make no batch: pass a data_collator, or the tokenizer as "
            "processing_class, which pads them."
        ) from error


def is_numeric(value: object) -> bool:
    """True if a value is neither text nor None."""
    return value is not None and not isinstance(value, str | bytes)


def make_padding(processing_class: Any, label_names: Sequence[str] | None) -> Callable[[list[Any]], Any] | None:
    """Returns a function that pads inputs with the tokenizer and labels with -100; None without a tokenizer."""
    if not callable(getattr(processing_class, "pad", None)):
        return None
    names = list(label_names) if label_names else [name for known in KNOWN_LABELS for name in known]

    def pad(samples: list[Any]) -> Any:
        present = [name for name in names if name in samples[0]]
        given = [{key: value for key, value in sample.items() if key not in present} for sample in samples]
        batch = {name: np.asarray(value) for name, value in processing_class.pad(given, return_tensors="np").items()}
        for name in present:
            batch[name] = pad_labels([np.asarray(sample[name]) for sample in samples])
        return batch

    return pad


def pad_labels(labels: Sequence[Array]) -> Array:
    """Returns labels of different lengths as one array, padded with the ignore index -100."""
    if labels[0].ndim == 0:
        return np.stack(labels)
    filled = np.full((len(labels), max(map(len, labels))), IGNORE_INDEX, dtype=labels[0].dtype)
    for row, values in zip(filled, labels, strict=True):
        row[: len(values)] = values
    return filled


def share_out(batch: object, num_shares: int) -> list[tuple[Any, int]]:
    """Splits a batch into (part, number of samples that count) per replica.

    The sizes of parts differ by at most one sample. If there are fewer samples than replicas, the other replicas get a
    copy of the first sample, and 0 as their number.
    """
    size = size_of(batch)
    bounds = [size * place // num_shares for place in range(num_shares + 1)]
    return [
        (rows(batch, start, stop), stop - start) if stop > start else (rows(batch, 0, 1), 0)
        for start, stop in itertools.pairwise(bounds)
    ]
