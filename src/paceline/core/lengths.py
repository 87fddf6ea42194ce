"""Length-grouped sampling: the order of the samples and their lengths. Framework-independent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.optional import LateModule

if TYPE_CHECKING:
    from paceline.core import stored_lengths
else:
    stored_lengths = LateModule("paceline.core.stored_lengths")

MEGABATCHES = 50  # batches sorted by length together, as in the Hugging Face Trainer

Lengths = np.ndarray[Any, np.dtype[np.int64]]
GivenLengths = Sequence[int] | Lengths


def length_grouped_order(
    lengths: GivenLengths, batch_size: int, permutation: Any, num_batches: int | None = None
) -> Lengths:
    """Returns the permutation with samples of similar length side by side, and the longest sample first.

    Blocks of 50 batches (fewer for little data) are sorted by length, longest first, so that batches need little
    padding and stay random. The longest sample of all comes first, so that an out-of-memory occurs at once. The order
    equals that of the Hugging Face Trainer for the same permutation.

    Args:
        lengths: the length of every sample.
        batch_size: the number of samples that are padded together.
        permutation: a permutation of `range(len(lengths))`, a tensor or an array.
        num_batches: batches in a block; overrides the default of at most 50.

    Returns: int64 of shape (len(lengths),): 8 bytes a sample, where a list of integers takes 40.
    """
    sizes = np.asarray(lengths)
    if sizes.dtype.kind not in "if":
        sizes = sizes.astype(np.int64)  # unsigned integers cannot be negated for the sort below
    num_samples = len(sizes)
    order = np.array(permutation, dtype=np.int64)  # a copy, which is sorted in place
    if not num_samples:
        return order
    block = batch_size * (num_batches or max(min(num_samples // (batch_size * 4), MEGABATCHES), 1))
    for start in range(0, num_samples, block):
        part = order[start : start + block]
        part[:] = part[np.argsort(-sizes[part], kind="stable")]
    firsts = np.arange(0, num_samples, block)
    longest = firsts[np.argmax(sizes[order[firsts]])]
    order[[0, longest]] = order[[longest, 0]]
    return order


def find_lengths(dataset: Any, column: str = "length", model_input_name: str | None = None) -> Lengths:
    """Returns the length of every sample, from the column `column` or else by reading the whole dataset once.

    A `datasets` dataset is measured by the offsets of its Arrow data. If a transform makes its samples, their lengths
    are cached beside the dataset's files.

    Returns: int64 of shape (len(dataset),).
    Raises:
        ValueError: samples are not dicts, or lack the input that is measured.
    """
    if getattr(dataset, "changes_by_epoch", False):
        raise ValueError(
            f"A {type(dataset).__name__} draws other samples in each epoch, so their lengths cannot be known in "
            "advance: use train_sampling_strategy='random' without a token budget, or packing='flatten'."
        )
    size = len(dataset)
    names = getattr(dataset, "column_names", None) or ()
    if column in names:
        stored = stored_lengths.stored_numbers(dataset, column)
        return stored if stored is not None else gather(dataset[column], size)
    name = model_input_name or "input_ids"
    stored = stored_lengths.list_lengths(dataset, name) if name in names else None
    if stored is not None:
        return stored
    if getattr(dataset, "_fingerprint", None) is None:
        return measure_lengths(dataset, column, name)
    measure = partial(measure_lengths, dataset, column, name)
    measure_one = partial(length_of_sample, dataset, column, name)
    return stored_lengths.cached(dataset, f"{column} or {name}", measure, measure_one)


def length_of_sample(dataset: Any, column: str, name: str, index: int) -> int:
    """Returns the length of one sample by reading it; see `find_lengths`. Raises: LookupError, TypeError."""
    sample = dataset[index]
    return int(sample[column]) if column in sample else len(sample[name])


def measure_lengths(dataset: Any, column: str, name: str) -> Lengths:
    """Returns the length of every sample by reading the samples; see `find_lengths`."""
    size = len(dataset)
    first = dataset[0] if size else {name: ()}
    if isinstance(first, Mapping) and column in first:
        return gather((dataset[index][column] for index in range(size)), size)
    if not isinstance(first, Mapping) or name not in first:
        raise ValueError(
            f"Sampling by length needs dict samples with {name!r}, or a dataset column {column!r} "
            f"(length_column_name); samples are {describe_sample(first)}."
        )
    if name in (getattr(dataset, "column_names", None) or ()):
        return gather((len(value) for value in dataset[name]), size)
    return gather((len(dataset[index][name]) for index in range(size)), size)


def gather(lengths: Iterable[Any], size: int) -> Lengths:
    """Returns the lengths as an int64 array of shape (size,), reading them one at a time."""
    return np.fromiter((int(length) for length in lengths), dtype=np.int64, count=size)


def describe_sample(sample: object) -> str:
    """Describes a sample's type for error messages."""
    if isinstance(sample, Mapping):
        return f"dicts with {', '.join(map(repr, sample))}"
    return f"of type {type(sample).__name__}"
