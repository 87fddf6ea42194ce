"""Finds the sample ids of an optimizer step from its position in the order of its epoch."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.pytorch.data.dispatch import source_of
from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.sampling import OrderedSampler


def has_ids(loader: object) -> bool:
    """Returns True if samples have dataset indices, in an order that one of our samplers determines."""
    loader = source_of(loader)
    return isinstance(loader, IndexedLoader) and isinstance(loader.sampler, OrderedSampler)


def sample_ids(loader: Any, epoch: int, first: int, count: int) -> list[int]:
    """Returns the dataset indices of `count` samples of `epoch`, starting with sample `first`.

    For other loaders (a stream, a user's sampler), returns the positions in the epoch, because the samples have no
    other known identity.
    """
    if not has_ids(loader):
        return list(range(first, first + count))
    sampler = loader.sampler
    order = sampler.order(epoch, sampler.settings)
    return [int(index) for index in itertools.islice(iter(order[first : first + count]), count)]
