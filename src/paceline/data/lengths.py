"""How much a loader holds, where it can be known without reading it."""

from __future__ import annotations

from typing import Any


def loader_length(loader: Any) -> int | None:
    """Number of batches in one pass over a loader, or None where it is unknown."""
    return length_of(loader)


def sample_count(loader: Any) -> int | None:
    """Number of samples in one pass over a loader, or None where it is unknown.

    Asked of the sampler that knows (`num_samples`), then of the sampler's length, then of the dataset. Samples that
    `drop_last` leaves out do not count.
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
    batch_size = samples_at_once(loader)
    if num_samples is not None and batch_size and getattr(loader, "drop_last", False):
        num_samples -= num_samples % batch_size
    return num_samples


def samples_at_once(loader: Any) -> int | None:
    """Samples of one micro-batch over all processes that read this loader's order; None where it does not say."""
    known: int | None = getattr(loader, "samples_at_once", None) or getattr(loader, "batch_size", None)
    return known


def length_of(sized: Any) -> int | None:
    """`len()`, or None where there is none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None
