"""Returns the sizes of a loader, if they are known without reading it."""

from __future__ import annotations

from typing import Any


def loader_length(loader: object) -> int | None:
    """Returns the number of batches in one pass over a loader, or None if unknown."""
    return length_of(loader)


def sample_count(loader: object) -> int | None:
    """Returns the number of samples in one pass over a loader, or None if unknown.

    The number is the batch sampler's `num_samples`, else the sampler's length, else the dataset's. Samples that
    `drop_last` drops do not count.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        known = getattr(batch_sampler, "num_samples", None)
        if isinstance(known, int):
            return known
    dataset = getattr(loader, "dataset", None)
    num_samples = length_of(sampler) if sampler is not None else None
    if num_samples is None:
        num_samples = length_of(dataset)
    batch_size = global_micro_batch_size(loader)
    if num_samples is not None and batch_size and getattr(loader, "drop_last", False):
        num_samples -= num_samples % batch_size
    return num_samples


def evaluation_samples(data: object) -> int | None:
    """Returns the samples of one evaluation of a dataset, or of a dict of several; None if one has no length."""
    lengths = [length_of(each) for each in (data.values() if isinstance(data, dict) else [data])]
    return None if None in lengths else sum(filter(None, lengths))


def global_micro_batch_size(loader: object) -> int | None:
    """Returns the samples per micro-batch over all processes that share this loader's order; None if unknown."""
    known: int | None = getattr(loader, "global_micro_batch_size", None) or getattr(loader, "batch_size", None)
    return known


def length_of(sized: Any) -> int | None:
    """Returns `len()`, or None if it is undefined."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None
