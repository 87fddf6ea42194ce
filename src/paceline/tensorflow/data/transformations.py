"""Looks into the transformations of a tf.data.Dataset, for its size, its batches and its shuffles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.tensorflow.framework import tf

# operations that unbatch, or whose function determines what their elements are
MAKE_SAMPLES = ("Unbatch", "FlatMap", "Interleave", "ParallelInterleave", "Window")


def known_size(dataset: Any) -> int | None:
    """Returns the number of elements of a tf.data.Dataset; None if unknown or endless."""
    size = int(dataset.cardinality())
    return size if size >= 0 else None


def is_infinite(dataset: Any) -> bool:
    """True if a tf.data.Dataset is known to repeat without end."""
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def is_batched(dataset: Any, is_mapped: bool = False) -> bool:
    """True if the elements of a tf.data.Dataset are batches: it was batched, and not unbatched afterwards.

    Args:
        dataset: its transformations are followed back to its inputs.
        is_mapped: a later `map` exists. Single numbers that were batched before it count as tokens of a text that is
            cut into sequences, not as samples.
    """
    name = type(dataset).__name__.strip("_").removesuffix("Dataset")
    if name in MAKE_SAMPLES:
        return False
    sources = dataset._inputs()
    if name.lower().endswith("batch"):
        return not (is_mapped and is_of_tokens(sources[0]))
    if name == "GroupByWindow":  # also made by bucket_by_sequence_length
        return True
    if name == "DirectedInterleave":  # its first input selects among the others
        sources = sources[1:]
    return any(is_batched(source, is_mapped or name.endswith("Map")) for source in sources)


def is_of_tokens(dataset: Any) -> bool:
    """True if each element is a single number or text, but not a row index (as in `to_tf_dataset` of datasets)."""
    spec = dataset.element_spec
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 0:
        return False
    while dataset._inputs():
        dataset = dataset._inputs()[0]
    return type(dataset).__name__ != "_RangeDataset"


def shuffles_of(dataset: Any, later: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields the shuffles of a tf.data.Dataset, except those inside functions, each with the transformations after it.

    Args:
        dataset: its transformations are followed back to its inputs.
        later: the names of the transformations after it.
    """
    name = type(dataset).__name__.strip("_").removesuffix("Dataset")
    if name == "Shuffle":
        yield dataset, later
    for source in dataset._inputs():
        yield from shuffles_of(source, (*later, name))
