"""Length-grouped sampling: the order of the samples and their lengths. Framework-independent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

MEGABATCHES = 50  # batches sorted by length together, as in the Hugging Face Trainer


def length_grouped_order(
    lengths: Sequence[int], batch_size: int, permutation: Any, num_batches: int | None = None
) -> list[int]:
    """Returns the permutation with samples of similar length side by side, and the longest sample first.

    Blocks of 50 batches (fewer for little data) are sorted by length, longest first, so that batches need little
    padding and stay random. The longest sample of all comes first, so that an out-of-memory occurs at once. The order
    equals that of the Hugging Face Trainer for the same permutation.

    Args:
        lengths: the length of every sample.
        batch_size: samples that are padded together.
        permutation: a permutation of `range(len(lengths))`, a tensor or an array.
        num_batches: batches in a block; overrides the default of at most 50.
    """
    num_samples = len(lengths)
    block = batch_size * (num_batches or max(min(num_samples // (batch_size * 4), MEGABATCHES), 1))
    shuffled = permutation.tolist()
    blocks = [
        sorted(shuffled[start : start + block], key=lambda index: -lengths[index])
        for start in range(0, num_samples, block)
    ]
    if not blocks:
        return []
    longest = max(range(len(blocks)), key=lambda place: lengths[blocks[place][0]])
    blocks[0][0], blocks[longest][0] = blocks[longest][0], blocks[0][0]
    return list(itertools.chain.from_iterable(blocks))


def find_lengths(dataset: Any, column: str = "length", model_input_name: str | None = None) -> list[int]:
    """Returns the length of every sample, from a column of that name or else by reading the whole dataset once.

    Raises:
        ValueError: samples are not dicts, or lack the input that is measured.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    name = model_input_name or "input_ids"
    first = dataset[0] if len(dataset) else {name: ()}
    if isinstance(first, Mapping) and column in first:
        return [int(dataset[index][column]) for index in range(len(dataset))]
    if not isinstance(first, Mapping) or name not in first:
        raise ValueError(
            f"Sampling by length needs dict samples with {name!r}, or a dataset column {column!r} "
            f"(length_column_name); samples are {describe_sample(first)}."
        )
    if name in (getattr(dataset, "column_names", None) or ()):
        return [len(value) for value in dataset[name]]
    return [len(dataset[index][name]) for index in range(len(dataset))]


def describe_sample(sample: object) -> str:
    """Describes a sample's type for error messages."""
    if isinstance(sample, Mapping):
        return f"dicts with {', '.join(map(repr, sample))}"
    return f"of type {type(sample).__name__}"
