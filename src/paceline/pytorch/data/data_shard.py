"""The samples that each of several processes reads, by index arithmetic over one common order.

The order of the samples is that of a single process. It is split into slots, each of which is one micro-batch of all
processes together. A slot is split into one shard per process, by rank; the sizes differ by at most one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class DataShard:
    """The shard of one process.

    Attributes:
        rank: the rank of this process.
        size: number of processes.
        slots: samples in each slot of an optimizer step, over all processes.
        reads_all: this process reads the shards of all processes in turn.
    """

    rank: int
    size: int
    slots: tuple[int, ...]
    reads_all: bool = False

    @classmethod
    def even(cls, rank: int, size: int, batch_size: int) -> DataShard:
        """Returns a shard with slots of `batch_size` samples per process."""
        return cls(rank, size, (batch_size * size,))

    @classmethod
    def of_update(cls, rank: int, size: int, batch_size: int, num_samples: int) -> DataShard:
        """Returns a shard with the fewest slots for an optimizer step of `num_samples`.

        A slot has at most `batch_size` samples per process.
        """
        count = -(-num_samples // (batch_size * size))
        bounds = [num_samples * slot // count for slot in range(count + 1)]
        return cls(rank, size, tuple(end - start for start, end in itertools.pairwise(bounds)))

    @property
    def each(self) -> int | None:
        """Returns the samples per process and slot; None if they differ."""
        size = self.slots[0]
        is_even = len(set(self.slots)) == 1 and size % self.size == 0
        return size // self.size if is_even else None

    @property
    def window(self) -> int:
        """Returns the number of samples after which the slots repeat."""
        return sum(self.slots)

    def left_in_slot(self, position: int) -> int:
        """Returns the number of samples from a position in the common order to the end of its slot."""
        place = position % self.window
        for slot in self.slots:
            if place < slot:
                return slot - place
            place -= slot
        raise AssertionError(position)

    def num_slots(self, num_samples: int) -> int:
        """Returns the number of slots that hold `num_samples`, including an incomplete last slot."""
        windows, rest = divmod(num_samples, self.window)
        count = windows * len(self.slots)
        for slot in self.slots:
            if rest <= 0:
                break
            rest -= slot
            count += 1
        return count

    def bounds(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the start and end of a process's shard in a slot of `length` samples; None: this process's shard."""
        rank = self.rank if rank is None else rank
        return length * rank // self.size, length * (rank + 1) // self.size

    def cut(self, samples: list[T]) -> Iterator[tuple[int, list[T]]]:
        """Yields the non-empty shards of a slot that this process reads, and the start of each."""
        for rank in range(self.size) if self.reads_all else (self.rank,):
            start, end = self.bounds(len(samples), rank)
            if start < end:
                yield start, samples[start:end]
