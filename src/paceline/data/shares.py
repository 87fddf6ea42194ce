"""Who reads which samples where several processes share the data: index arithmetic over one common order.

The order of the samples is that of one process. It is cut into slots, one micro-batch of all processes together, and
each slot into as many parts as there are processes, in the order of their ranks, sizes equal up to one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Shares:
    """The part of one process.

    Attributes:
        rank: this process.
        size: how many there are.
        slots: samples of each slot of an update, over all processes.
        reads_all: this process reads the parts of all, one after another.
    """

    rank: int
    size: int
    slots: tuple[int, ...]
    reads_all: bool = False

    @classmethod
    def even(cls, rank: int, size: int, batch_size: int) -> Shares:
        """Slots of `batch_size` samples for each process."""
        return cls(rank, size, (batch_size * size,))

    @classmethod
    def of_update(cls, rank: int, size: int, batch_size: int, num_samples: int) -> Shares:
        """As few slots as hold an update of `num_samples`, with at most `batch_size` samples for each process."""
        count = -(-num_samples // (batch_size * size))
        bounds = [num_samples * slot // count for slot in range(count + 1)]
        return cls(rank, size, tuple(end - start for start, end in itertools.pairwise(bounds)))

    @property
    def each(self) -> int | None:
        """Samples of each process in every slot; None where these differ."""
        sizes = set(self.slots)
        size = self.slots[0] if len(sizes) == 1 else 1
        return size // self.size if size % self.size == 0 else None

    @property
    def window(self) -> int:
        """Samples until the slots begin anew."""
        return sum(self.slots)

    def left_in_slot(self, position: int) -> int:
        """Samples from a position in the common order to the end of its slot."""
        place = position % self.window
        for slot in self.slots:
            if place < slot:
                return slot - place
            place -= slot
        raise AssertionError(position)

    def num_slots(self, num_samples: int) -> int:
        """Slots, the last one perhaps not full, that hold so many samples."""
        windows, rest = divmod(num_samples, self.window)
        count = windows * len(self.slots)
        for slot in self.slots:
            if rest <= 0:
                break
            rest -= slot
            count += 1
        return count

    def bounds(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Where a process's part of a slot of `length` samples begins and ends in it; this one's if none is named."""
        rank = self.rank if rank is None else rank
        return length * rank // self.size, length * (rank + 1) // self.size

    def cut(self, samples: list[T]) -> Iterator[tuple[int, list[T]]]:
        """What this process reads of a slot: parts that are not empty, and where each begins."""
        for rank in range(self.size) if self.reads_all else (self.rank,):
            start, end = self.bounds(len(samples), rank)
            if start < end:
                yield start, samples[start:end]
