"""The samples that each of several processes reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.distributed_streams import StatefulStreamPart, part_of
from paceline.pytorch.data.indexed import IndexBatches
from paceline.pytorch.data.sampling import random_sampler

sizes = st.integers(1, 6)


def read(num_samples: int, data_shard: DataShard, start: int = 0, drop_last: bool = False) -> list[list[int]]:
    batches = IndexBatches(random_sampler(num_samples, 3), data_shard.slots[0], drop_last, False, data_shard)
    batches.set_epoch(1)
    batches.set_position(start)
    return [list(batch) for batch in batches]


@given(num_samples=st.integers(0, 60), size=sizes, batch_size=sizes, drop_last=st.booleans())
def test_each_sample_is_read_once_in_the_order_of_one_process(
    num_samples: int, size: int, batch_size: int, drop_last: bool
) -> None:
    order = random_sampler(num_samples, 3)
    order.set_epoch(1)
    whole = list(order)
    ranks = [read(num_samples, DataShard.even(rank, size, batch_size), drop_last=drop_last) for rank in range(size)]
    num_slots = max((len(batches) for batches in ranks), default=0)
    slots = [[index for batches in ranks for batch in batches[k : k + 1] for index in batch] for k in range(num_slots)]
    kept = num_samples - num_samples % (size * batch_size) if drop_last else num_samples
    assert [index for slot in slots for index in slot] == whole[:kept]
    assert all(len(slot) == size * batch_size for slot in slots[:-1])
    lengths = [len(batches[-1]) if len(batches) == num_slots else 0 for batches in ranks] if num_slots else [0]
    assert max(lengths) - min(lengths) <= 1  # the last samples are dealt out evenly


@pytest.mark.parametrize(
    ("size", "slots", "expected"),
    [(2, (4, 4), 2), (2, (6,), 3), (2, (4, 3), None), (3, (4, 4), None), (1, (3, 3), 3), (1, (4, 3), None)],
)
def test_samples_of_each_process(size: int, slots: tuple[int, ...], expected: int | None) -> None:
    assert DataShard(0, size, slots).each == expected


@given(num_samples=st.integers(1, 60), size=sizes, batch_size=sizes, update=st.integers(1, 30), other=sizes)
def test_another_number_of_processes_goes_on_where_the_others_stopped(
    num_samples: int, size: int, batch_size: int, update: int, other: int
) -> None:
    """Updates of the same samples, whatever the number of processes; micro-batches within their size."""
    data_shard = DataShard.of_update(0, size, batch_size, update)
    assert sum(data_shard.slots) == update
    assert all(-(-slot // size) <= batch_size for slot in data_shard.slots)
    position = num_samples // 2 // update * update
    if min(data_shard.slots) < size:
        return
    ranks = [read(num_samples, DataShard.of_update(rank, size, batch_size, update), position) for rank in range(size)]
    order = random_sampler(num_samples, 3)
    order.set_epoch(1)
    assert sorted(index for batches in ranks for batch in batches for index in batch) == sorted(list(order)[position:])
    count = len(data_shard.slots)
    for start in range(position, num_samples, update):
        window = (start - position) // update * count
        seen = [index for batches in ranks for batch in batches[window : window + count] for index in batch]
        assert sorted(seen) == sorted(list(order)[start : start + update])


class Whole(IterableDataset[int]):
    """Reads everything, whoever asks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Split(IterableDataset[int]):
    """Chooses its part by the worker that it runs in."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 20, info.num_workers) if info is not None else range(20))


class Placed(Whole):
    """Keeps its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 20:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("kind", [Whole, Split, Placed])
def test_the_parts_of_a_stream_are_all_of_it(kind: type[Any]) -> None:
    parts = [list(part_of(kind(), rank, 3, 2)) for rank in range(3)]
    assert sorted(sample for part in parts for sample in part) == list(range(20))
    if kind is Whole:
        assert parts[1] == [2, 3, 8, 9, 14, 15]


def test_a_part_goes_on_at_its_place() -> None:
    first = part_of(Placed(), 1, 2, 3)
    assert isinstance(first, StatefulStreamPart)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(4)]
    second = part_of(Placed(), 1, 2, 3)
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == list(part_of(Placed(), 1, 2, 3))
