"""Sample ids of an optimizer step, from its position in the order of its epoch."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.pytorch.data.dispatch import source_of
from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.sampling import OrderedSampler


def has_ids(loader: object) -> bool:
    """True if samples have indices in a dataset, in an order that our sampler determines."""
    loader = source_of(loader)
    return isinstance(loader, IndexedLoader) and isinstance(loader.sampler, OrderedSampler)


def sample_ids(loader: Any, epoch: int, first: int, count: int) -> list[int]:
    """Returns the indices in the dataset of `count` samples of `epoch`, from the `first` one on.

    For a loader of another kind (a stream, someone else's sampler) the positions in the epoch themselves: a stream's
    samples have no other name.
    """
    if not has_ids(loader):
        return list(range(first, first + count))
    sampler = loader.sampler
    order = sampler.order(epoch, sampler.settings)
    return [int(index) for index in itertools.islice(iter(order[first : first + count]), count)]
