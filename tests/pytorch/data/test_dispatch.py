"""Batches that one process reads and deals out; here the processes are threads."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.dispatch import BatchDispatcher, DispatchedLoader, ReadingFailed
from paceline.pytorch.data.feed import StatefulDataIterator, place_in
from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.lengths import loader_length, sample_count
from paceline.pytorch.data.loading import split_loader
from paceline.pytorch.data.sampling import random_sampler
from paceline.pytorch.data.stream import StreamLoader

OPTIONS = {"num_workers": 0, "pin_memory": False}


class Wire:
    """Broadcasts from the first of several threads to the others."""

    def __init__(self, size: int) -> None:
        self.barrier, self.sent = threading.Barrier(size, timeout=20), [b""] * size

    def send(self, rank: int, packed: list[bytes] | None) -> Any:
        self.barrier.wait()
        if packed is not None:
            self.sent = packed
        self.barrier.wait()
        return pickle.loads(self.sent[rank]) if rank else None


def on_each(parts: tuple[int, ...], work: Callable[[int, BatchDispatcher], Any]) -> list[Any]:
    """Returns the result of `work(rank, deal)` on each of several processes, or the error that it raised there."""
    wire = Wire(len(parts))

    def run(rank: int) -> Any:
        try:
            return work(rank, BatchDispatcher(parts, rank == 0, pickle.dumps, partial(wire.send, rank)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


def indexed(num_samples: int, data_shard: DataShard | None, drop_last: bool = False) -> IndexedLoader:
    return IndexedLoader(
        list(range(num_samples)), sampler=random_sampler(num_samples, 3), batch_size=4, drop_last=drop_last,
        collate=list, seed=0, options=OPTIONS, data_shard=data_shard,
    )  # fmt: skip


class Numbers(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def streamed(num_samples: int, batch_size: int = 3) -> StreamLoader:
    return StreamLoader(
        Numbers(num_samples), batch_size=batch_size, drop_last=False, collate=list, seed=0, options=OPTIONS
    )


@settings(deadline=None, max_examples=30)
@given(num_samples=st.integers(0, 40), size=st.integers(1, 4), at_once=st.integers(4, 9), drop_last=st.booleans())
def test_each_process_gets_the_samples_that_it_would_read(
    num_samples: int, size: int, at_once: int, drop_last: bool
) -> None:
    slots = (at_once,)

    def work(rank: int, dispatcher: BatchDispatcher) -> tuple[list[Any], int]:
        loader = DispatchedLoader(
            indexed(num_samples, DataShard(rank, size, slots, reads_all=True), drop_last), dispatcher
        )
        return list(loader), len(loader)

    for rank, (dispatched, length) in enumerate(on_each(tuple(range(size)), work)):
        own = indexed(num_samples, DataShard(rank, size, slots), drop_last)
        assert length == len(own)
        if num_samples % at_once == 0 or num_samples % at_once >= size or drop_last:
            assert dispatched == list(own)  # else the last samples, fewer than processes, go to the first of these


@settings(deadline=None, max_examples=20)
@given(num_samples=st.integers(0, 30), size=st.integers(1, 4))
def test_a_stream_comes_in_its_order(num_samples: int, size: int) -> None:
    read = on_each(
        tuple(range(size)), lambda rank, dispatcher: list(DispatchedLoader(streamed(num_samples), dispatcher))
    )
    turns = [batches[turn : turn + 1] for turn in range(len(read[0])) for batches in read]
    assert [sample for turn in turns for batch in turn for sample in batch] == list(range(num_samples))


def test_processes_that_have_the_same_part_get_the_same_batches() -> None:
    read = on_each((0, 0, 1, 1), lambda rank, dispatcher: list(DispatchedLoader(streamed(20), dispatcher)))
    assert read[0] == read[1] == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19]]
    assert read[2] == read[3] == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]


class Failing(Numbers):
    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise OSError("the disk is gone")


class Missing(Numbers):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError("there is no such file")


def unsendable(rows: list[int]) -> Any:
    return lambda: rows


@pytest.mark.parametrize(("dataset", "collate"), [(Failing(9), list), (Missing(9), list), (Numbers(9), unsendable)])
def test_what_goes_wrong_on_the_first_process_is_told_to_all(dataset: Any, collate: Any) -> None:
    def work(rank: int, dispatcher: BatchDispatcher) -> Any:
        loader = StreamLoader(dataset, batch_size=2, drop_last=False, collate=collate, seed=0, options=OPTIONS)
        return list(DispatchedLoader(loader, dispatcher))

    first, second = on_each((0, 1), work)
    is_told(first, second)


def test_data_that_a_feed_cannot_open_is_told_to_all() -> None:
    def work(rank: int, dispatcher: BatchDispatcher) -> Any:
        loader = StreamLoader(Missing(9), batch_size=2, drop_last=False, collate=list, seed=0, options=OPTIONS)
        feed = StatefulDataIterator(
            DispatchedLoader(loader, dispatcher), accumulation=1, collect=lambda source, number: (list(source), None)
        )
        feed.start_epoch(0)
        return feed.draw()

    is_told(*on_each((0, 1), work))


def is_told(first: Any, second: Any) -> None:
    assert isinstance(first, Exception)
    assert not isinstance(first, ReadingFailed)
    assert isinstance(second, ReadingFailed)
    assert f"failed there: {type(first).__name__}: {first}" in str(second)


@pytest.mark.parametrize("kind", ["indexed", "stream", "own"])
def test_a_position_is_that_of_the_process_that_reads(kind: str) -> None:
    """Left after three updates, gone on from with the state that the first process writes."""

    def make(rank: int, dispatcher: BatchDispatcher) -> DispatchedLoader:
        loader: Any = streamed(31)
        if kind == "indexed":
            loader = indexed(31, DataShard(rank, 2, (6,), reads_all=True))
        elif kind == "own":
            loader = DataLoader(Numbers(31), batch_size=3, collate_fn=list)
        return DispatchedLoader(loader, dispatcher)

    def feed_of(loader: DispatchedLoader) -> StatefulDataIterator:
        feed = StatefulDataIterator(loader, accumulation=2, collect=lambda source, number: (list(source), None))
        feed.synchronize = lambda window, number: (window, min(12, 31 - feed.consumed), len(window[0]))
        return feed

    def read_on(feed: StatefulDataIterator) -> list[Any]:
        return list(iter(lambda: feed.draw()[0], []))

    def work(rank: int, dispatcher: BatchDispatcher) -> Any:
        feed = feed_of(make(rank, dispatcher))
        assert feed.is_common
        feed.start_epoch(0)
        begun = [feed.draw()[0]]
        return begun, feed.state_dict(), read_on(feed)

    told = on_each((0, 1), work)
    state = told[0][1]
    assert (state["consumed"], state["is_dealt"], "own_consumed" in state) == (12, True, False)

    def go_on(rank: int, dispatcher: BatchDispatcher) -> Any:
        feed = feed_of(make(rank, dispatcher))
        feed.load_state_dict(state)
        feed.start_epoch(0)
        return read_on(feed)

    assert on_each((0, 1), go_on) == [rest for _, _, rest in told]
    samples = [sample for begun, _, rest in told for window in begun + rest for batch in window for sample in batch]
    assert sorted(samples) == list(range(31))


def test_a_dispatched_loader_answers_as_the_one_that_is_read() -> None:
    dispatcher = BatchDispatcher((0, 1), True, pickle.dumps, lambda packed: None)
    own = DispatchedLoader(DataLoader(list(range(10)), batch_size=3), dispatcher)
    assert (own.batch_size, own.global_micro_batch_size, loader_length(own), sample_count(own)) == (3, 6, 2, 10)
    assert loader_length(DispatchedLoader(streamed(3), dispatcher)) is None
    taken = split_loader(DataLoader(list(range(10)), batch_size=3), DataShard(0, 2, (6,)), 0, dispatcher)
    assert isinstance(taken, DispatchedLoader)
    assert split_loader(taken, DataShard(0, 2, (6,)), 0, dispatcher) is taken
    assert (loader_length(taken), sample_count(taken), taken.global_micro_batch_size) == (2, 10, 6)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.num_samples


def test_a_place_in_a_dispatched_stream_is_counted_in_batches_of_all() -> None:
    """32 of 64 samples, read in batches of 4 by 2 processes, are 8 batches of 2 by 2 processes."""
    dispatcher = BatchDispatcher((0, 1), True, pickle.dumps, lambda packed: None)
    own = DataLoader(Sized(64), batch_size=2, collate_fn=list)
    ours = StreamLoader(Sized(64), batch_size=2, drop_last=False, collate=list, seed=0, options=OPTIONS, num_parts=2)
    for loader in (own, ours):
        place = place_in(DispatchedLoader(loader, dispatcher), {"consumed": 32, "batches": 4, "batch_size": 8})
        assert place == (32, 8)
