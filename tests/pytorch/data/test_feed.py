"""Positions: whatever was drawn before, what is left is drawn after, once, in the same order."""

import json
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from paceline.pytorch.data.collators import default_data_collator
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.loading import make_loader, split_loader
from paceline.pytorch.data.sampling import make_train_sampler, random_order, random_sampler
from paceline.pytorch.data.shuffle import ShuffleBuffer
from paceline.pytorch.data.stream import reread


def arguments(**options: Any) -> SimpleNamespace:
    defaults = {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
        "dataloader_multiprocessing_context": None,
        "dataloader_pin_memory": True,
        "dataloader_in_order": True,
        "dataloader_drop_last": False,
        "use_cpu": True,
    }
    return SimpleNamespace(**defaults, **options)


def collect(iterator: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
    batches = [batch for _, batch in zip(range(num_batches), iterator, strict=False)]
    return batches, len(batches)


class Counting:
    """A dataset that notes every index that is read."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return {"id": index, "input_ids": [0] * (index * 7 % 11 + 1), "noise": random.random() + torch.rand(()).item()}


def collate_ids(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor([row["id"] for row in rows]), "noise": torch.tensor([row["noise"] for row in rows])}


class Numbers(IterableDataset[dict[str, Any]]):
    """A stream without any state."""

    def __init__(self, size: int) -> None:
        self.size, self.reads, self.epoch = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(self.size))
        random.shuffle(order)  # an order out of a global generator
        for index in order:
            self.reads += 1
            yield {"id": index + 1000 * self.epoch, "noise": torch.rand(()).item()}


class StatefulNumbers(IterableDataset[dict[str, Any]]):
    """A stream that can be put back to its place."""

    def __init__(self, size: int) -> None:
        self.size, self.reads, self.next = size, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self.next = self.next, 0
        for index in range(start, self.size):
            self.reads += 1
            self.next = index + 1
            yield {"id": index, "noise": torch.rand(()).item()}
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def loader_of(dataset: Any, batch_size: int, strategy: str = "random", accumulation: int = 1, **options: Any) -> Any:
    sampler = make_train_sampler(
        dataset, strategy=strategy, batch_size=batch_size, accumulation=accumulation, seed=13, drop_last=False
    )
    return make_loader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate=collate_ids,
        args=arguments(**options),
        train=True,
        seed=13,
    )


def feed_of(loader: Any, accumulation: int = 1, **options: Any) -> StatefulDataIterator:
    return StatefulDataIterator(loader, accumulation=accumulation, collect=collect, **options)


def draw_ids(feed: StatefulDataIterator, num_windows: int | None = None) -> list[int]:
    ids: list[int] = []
    while num_windows is None or num_windows > 0:
        batches, _ = feed.draw()
        if not batches:
            break
        ids += [index for batch in batches for index in batch["id"].tolist()]
        num_windows = None if num_windows is None else num_windows - 1
    return ids


def saved(feed: StatefulDataIterator) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(feed.state_dict()))
    return state


STRATEGIES = ["random", "sequential", "group_by_length", "batch_rebalance"]


@given(
    size=st.integers(12, 60),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 3),
    windows=st.integers(1, 8),
    new_batch_size=st.integers(1, 7),
    new_accumulation=st.integers(1, 3),
    more=st.integers(0, 4),
    strategy=st.sampled_from(STRATEGIES),
    epoch=st.integers(0, 2),
)
@settings(max_examples=150)
def test_resumed_twice_every_sample_is_seen_once(
    size: int,
    batch_size: int,
    accumulation: int,
    windows: int,
    new_batch_size: int,
    new_accumulation: int,
    more: int,
    strategy: str,
    epoch: int,
) -> None:
    """Any position, any batch size and accumulation before and after."""
    dataset = Counting(size)
    undisturbed = feed_of(loader_of(dataset, batch_size, strategy, accumulation), accumulation)
    undisturbed.start_epoch(epoch)
    expected = draw_ids(undisturbed)
    assert set(expected) == set(range(size))
    ids: list[int] = []
    state: dict[str, Any] | None = None
    for num_windows, size_now, accumulation_now in (
        (windows, batch_size, accumulation),
        (more, new_batch_size, new_accumulation),
        (None, batch_size, accumulation),
    ):
        feed = feed_of(loader_of(dataset, size_now, strategy, accumulation_now), accumulation_now)
        if state is not None:
            feed.load_state_dict(state)
            assert feed.epoch == epoch
        feed.start_epoch(epoch)
        ids += draw_ids(feed, num_windows)
        state = saved(feed)
        assert state["consumed"] == len(ids)
    assert ids == expected


@given(size=st.integers(1, 40), batch_size=st.integers(1, 6), accumulation=st.integers(1, 4))
def test_only_the_window_is_read(size: int, batch_size: int, accumulation: int) -> None:
    dataset = Counting(size)
    feed = feed_of(loader_of(dataset, batch_size), accumulation)
    feed.start_epoch(0)
    assert dataset.reads == []
    num_windows = 0
    while feed.draw()[0]:
        num_windows += 1
        assert len(dataset.reads) == feed.consumed == min(num_windows * batch_size * accumulation, size)
        assert feed.batches == min(num_windows * accumulation, -(-size // batch_size))
    assert feed.draw() == ([], 0)
    assert dataset.reads == random_order(size, 13, 0).tolist()


def test_a_greedy_collect_gets_no_more_than_the_window() -> None:
    dataset = Counting(20)
    feed = StatefulDataIterator(
        loader_of(dataset, 2), accumulation=3, collect=lambda iterator, number: (list(iterator), None)
    )
    feed.start_epoch(0)
    assert len(feed.draw()[0]) == 3
    assert len(dataset.reads) == 6


def test_resuming_reads_nothing_that_was_read() -> None:
    first = feed_of(loader_of(Counting(1000), 4), 2)
    first.start_epoch(1)
    draw_ids(first, 50)
    dataset = Counting(1000)
    feed = feed_of(loader_of(dataset, 4), 2)
    feed.load_state_dict(saved(first))
    feed.start_epoch(1)
    assert dataset.reads == []
    draw_ids(feed, 1)
    assert dataset.reads == random_order(1000, 13, 1)[400:408].tolist()


def test_nothing_touches_the_global_generators() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    dataset = [{"id": index, "noise": 0.0} for index in range(20)]
    before = state()
    for options in ({}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}):
        settings = {**vars(arguments()), **options}
        sampler = make_train_sampler(dataset, strategy="random", batch_size=3, accumulation=2, seed=1)
        loader = make_loader(
            dataset,
            batch_size=3,
            sampler=sampler,
            collate=collate_ids,
            args=SimpleNamespace(**settings),
            train=True,
            seed=1,
        )
        feed = feed_of(loader, 2)
        for epoch in range(2):
            feed.start_epoch(epoch)
            assert len(draw_ids(feed)) == 20
        feed.close()
    assert state() == before


def test_without_workers_augmentation_draws_from_this_process() -> None:
    dataset = Counting(8)
    feed = feed_of(loader_of(dataset, 4))
    random.seed(0)
    torch.manual_seed(0)
    expected = [random.random() + torch.rand(()).item() for _ in range(4)]
    random.seed(0)
    torch.manual_seed(0)
    feed.start_epoch(0)
    assert feed.draw()[0][0]["noise"].tolist() == torch.tensor(expected).tolist()


def test_drop_last() -> None:
    loader = make_loader(
        Counting(10),
        batch_size=4,
        sampler=None,
        collate=collate_ids,
        args=SimpleNamespace(**{**vars(arguments()), "dataloader_drop_last": True}),
        train=True,
        seed=0,
    )
    feed = feed_of(loader)
    feed.start_epoch(0)
    assert draw_ids(feed) == list(range(8))
    assert (feed.consumed, feed.batches) == (8, 2)


def test_micro_batches_are_counted_in_the_present_size() -> None:
    """So that the epoch ends at its own length, whatever the batch size was before."""
    for consumed, batches, expected in ((12, 6, 3), (6, 3, 1), (24, 12, 6), (2, 1, 0)):
        feed = feed_of(loader_of(Counting(24), 4))
        feed.load_state_dict({"epoch": 0, "consumed": consumed, "batches": batches})
        feed.start_epoch(0)
        assert (feed.consumed, feed.batches) == (consumed, expected)
        draw_ids(feed)
        assert feed.batches == 6


def test_a_position_needs_no_micro_batches() -> None:
    feed = feed_of(loader_of(Counting(24), 4))
    feed.load_state_dict({"epoch": 1, "consumed": 8})
    assert (feed.epoch, feed.consumed, feed.batches) == (1, 8, 0)


def test_ignore_data_skip_begins_the_epoch_anew() -> None:
    first = feed_of(loader_of(Counting(12), 2))
    first.start_epoch(3)
    draw_ids(first, 2)
    feed = feed_of(loader_of(Counting(12), 2), ignore_data_skip=True)
    feed.load_state_dict(saved(first))
    assert feed.epoch == 3
    feed.start_epoch(3)
    assert draw_ids(feed) == random_order(12, 13, 3).tolist()


def test_a_position_is_kept_until_its_epoch_starts() -> None:
    feed = feed_of(loader_of(Counting(12), 2))
    state = {"epoch": 2, "consumed": 4, "batches": 2}
    feed.load_state_dict(state)
    assert (feed.epoch, feed.consumed, feed.batches) == (2, 4, 2)
    assert saved(feed) == state
    feed.start_epoch(2)
    assert draw_ids(feed) == random_order(12, 13, 2)[4:].tolist()
    feed.start_epoch(3)
    assert draw_ids(feed) == random_order(12, 13, 3).tolist()
    feed.finish_epoch()
    assert saved(feed) == {"epoch": 4, "consumed": 0, "batches": 0, "batch_size": 2, "num_samples": 12, "largest": None}


def test_another_pass_over_the_loader_does_not_disturb_the_feed() -> None:
    loader = loader_of(Counting(12), 2)
    feed = feed_of(loader)
    feed.start_epoch(0)
    draw_ids(feed, 2)
    assert sum(len(batch["id"]) for batch in loader) == 12
    assert draw_ids(feed) == random_order(12, 13, 0)[4:].tolist()
    assert feed.consumed == 12


@pytest.mark.parametrize("kind", [RandomSampler, WeightedRandomSampler])
@pytest.mark.parametrize("with_generator", [True, False])
def test_someone_elses_sampler_resumes_exactly(kind: Any, with_generator: bool) -> None:
    """Its order comes out of a generator: the generator's state at the epoch's start is what is saved."""

    def make() -> StatefulDataIterator:
        generator = torch.Generator().manual_seed(3) if with_generator else None
        if kind is RandomSampler:
            sampler: Any = RandomSampler(range(30), generator=generator)
        else:
            sampler = WeightedRandomSampler([1.0, 5.0] * 15, 30, generator=generator)
        args = arguments()
        return feed_of(
            make_loader(Counting(30), batch_size=4, sampler=sampler, collate=collate_ids, args=args, train=True, seed=0)
        )

    torch.manual_seed(1)
    feed = make()
    feed.start_epoch(0)
    draw_ids(feed)
    feed.start_epoch(1)
    before, state = draw_ids(feed, 3), saved(feed)
    rest = draw_ids(feed)
    feed = make()
    torch.manual_seed(99)
    feed.load_state_dict(state)
    feed.start_epoch(1)
    assert torch.initial_seed() == 99
    assert draw_ids(feed) == rest
    assert len(before) + len(rest) == 30


@pytest.mark.parametrize("new_batch_size", [4, 3, 7])
def test_someone_elses_loader_is_replayed(new_batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    def make(batch_size: int) -> StatefulDataIterator:
        return feed_of(DataLoader(Counting(30), batch_size=batch_size, shuffle=True, collate_fn=collate_ids), 2)

    torch.manual_seed(1)
    feed = make(4)
    feed.start_epoch(0)
    before, state = draw_ids(feed, 2), saved(feed)
    noise = torch.get_rng_state()
    rest = draw_ids(feed)
    assert sorted(before + rest) == list(range(30))
    torch.manual_seed(5)
    torch.set_rng_state(noise)
    feed = make(new_batch_size)
    feed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        feed.start_epoch(0)
    assert "reading the first 16 samples again" in caplog.text
    assert "ignore_data_skip" in caplog.text
    assert "Read 16 samples again in" in caplog.text
    assert torch.equal(torch.get_rng_state(), noise)
    assert draw_ids(feed) == rest
    assert feed.consumed == 30


def test_a_loader_with_our_sampler_needs_no_replay(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[StatefulDataIterator, Counting]:
        dataset = Counting(30)
        return feed_of(
            DataLoader(dataset, batch_size=4, sampler=random_sampler(30, 2), collate_fn=collate_ids)
        ), dataset

    feed, _ = make()
    feed.start_epoch(2)
    before, state = draw_ids(feed, 2), saved(feed)
    feed, dataset = make()
    feed.load_state_dict(state)
    feed.start_epoch(2)
    assert before + draw_ids(feed) == random_order(30, 2, 2).tolist()
    assert len(dataset.reads) == 22
    assert "again" not in caplog.text


class StatefulLoader:
    """As torchdata's: knows its own place."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.next = self.next, 0
        for index in range(start, self.size):
            self.next = index + 1
            yield {"id": torch.tensor([index])}

    def state_dict(self) -> dict[str, Any]:
        return {"next": torch.tensor(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = int(state["next"])


def test_a_loader_with_state_is_asked_for_it() -> None:
    feed = feed_of(StatefulLoader(10), 2)
    feed.start_epoch(0)
    assert draw_ids(feed, 2) == [0, 1, 2, 3]
    state = saved(feed)
    feed = feed_of(StatefulLoader(10), 2)
    feed.load_state_dict(state)
    feed.start_epoch(0)
    assert draw_ids(feed) == list(range(4, 10))


def test_a_list_of_batches_is_a_loader() -> None:
    batches = [{"id": torch.arange(3) + 3 * index} for index in range(4)]
    feed = feed_of(batches, 2)
    feed.start_epoch(0)
    assert draw_ids(feed, 1) == list(range(6))
    state = saved(feed)
    feed = feed_of(batches, 2)
    feed.load_state_dict(state)
    feed.start_epoch(0)
    assert draw_ids(feed) == list(range(6, 12))


@pytest.mark.parametrize("make_stream", [Numbers, StatefulNumbers])
@pytest.mark.parametrize("size", [8, 9, 10])
def test_a_stream_that_was_read_to_its_end_is_not_begun_anew(make_stream: Any, size: int) -> None:
    feed = feed_of(loader_of(make_stream(size), 2))
    feed.start_epoch(0)
    assert len(draw_ids(feed, -(-size // 2))) == size
    state = saved(feed)
    feed = feed_of(loader_of(make_stream(size), 2))
    feed.load_state_dict(state)
    feed.start_epoch(0)
    assert draw_ids(feed) == []
    feed.start_epoch(1)
    assert len(draw_ids(feed)) == size


@pytest.mark.parametrize("make_stream", [Numbers, StatefulNumbers])
@pytest.mark.parametrize("new_batch_size", [4, 3])
def test_streams_resume_exactly(make_stream: Any, new_batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    random.seed(0)
    feed = feed_of(loader_of(make_stream(30), 4), 2)
    feed.start_epoch(1)
    before, state = draw_ids(feed, 2), saved(feed)
    after = random.getstate(), torch.get_rng_state()
    rest = draw_ids(feed)
    random.seed(7)
    random.setstate(after[0])
    torch.set_rng_state(after[1])
    stream = make_stream(30)
    feed = feed_of(loader_of(stream, new_batch_size), 2)
    feed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        feed.start_epoch(1)
    assert (feed.consumed, feed.batches) == (16, 16 // new_batch_size)
    assert (random.getstate(), torch.get_rng_state().tolist()) == (after[0], after[1].tolist())
    assert draw_ids(feed) == rest
    assert len(before) == 16
    assert len(rest) == 14
    assert ("again" in caplog.text) == (make_stream is Numbers)
    assert stream.reads == (30 if make_stream is Numbers else 14)


def test_streams_tell_the_epoch_and_the_window() -> None:
    stream = Numbers(10)
    feed = feed_of(loader_of(stream, 2), 2)
    feed.start_epoch(4)
    assert min(draw_ids(feed, 1)) >= 4000
    assert stream.reads == 4


def test_a_plain_iterable_is_a_stream() -> None:
    rows = ({"id": index, "noise": 0.0} for index in range(5))
    feed = feed_of(loader_of(rows, 2))
    feed.start_epoch(0)
    assert draw_ids(feed) == list(range(5))


def test_the_dataset_is_left_at_its_own_state() -> None:
    stream = StatefulNumbers(10)
    feed = feed_of(loader_of(stream, 2))
    place = {"num_read": 4, "is_shared": True, "is_ended": False, "dataset": {"next": 4}}
    feed.load_state_dict({"epoch": 0, "consumed": 4, "stream": {"num_workers": 0, "last": -1, "workers": [place]}})
    feed.start_epoch(0)
    draw_ids(feed, 1)
    feed.close()
    assert [row["id"] for row in stream] == list(range(10))


def test_default_collation_in_a_feed() -> None:
    dataset = [{"x": np.ones(2, dtype=np.float32) * index, "label": index} for index in range(6)]
    loader = make_loader(
        dataset, batch_size=4, sampler=None, collate=default_data_collator, args=arguments(), train=True, seed=0
    )
    feed = feed_of(loader, 2)
    feed.start_epoch(0)
    batches, _ = feed.draw()
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]


def test_rewinding_in_the_middle_of_a_run() -> None:
    feed = feed_of(loader_of(Counting(12), 2), 2)
    feed.start_epoch(0)
    first = draw_ids(feed, 1)
    state = saved(feed)
    rest = draw_ids(feed)
    feed.finish_epoch()
    feed.start_epoch(1)
    draw_ids(feed, 1)
    assert not feed.is_restored
    feed.load_state_dict(state)
    assert feed.is_restored
    assert feed.epoch == 0
    feed.start_epoch(0)
    assert not feed.is_restored
    assert first + draw_ids(feed) == first + rest == random_order(12, 13, 0).tolist()


def test_reading_again_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter(range(0, 1000, 2))  # two seconds a sample
    monkeypatch.setattr("paceline.pytorch.data.stream.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    source = iter(range(20))
    assert reread(source, 12, "samples") == 12
    assert next(source) == 12
    lines = [record.message for record in caplog.records]
    assert "load_state_dict()" in lines[0]
    assert "ignore_data_skip=True" in lines[0]
    assert lines[1] == "Read 1 of 12 samples again; 22 s to go."
    assert lines[2] == "Read 7 of 12 samples again; 10 s to go."
    assert lines[-1] == "Read 12 samples again in 26.0 s."
    assert len(lines) == 4


class Continuing(IterableDataset[dict[str, Any]]):
    """Goes on where it stopped: each epoch is the next six samples."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(6):
            self.next += 1
            yield {"id": self.next - 1, "noise": torch.rand(()).item()}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Ending(StatefulNumbers):
    """Begins anew with each epoch, but says at its end that it is at its end."""

    loaded = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self.loaded = self.loaded, 0
        for index in range(start, self.size):
            self.next = index + 1
            yield {"id": index, "noise": torch.rand(()).item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["next"]


KEEPING: dict[str, Any] = {
    "continuing": Continuing,
    "beginning anew": lambda: StatefulNumbers(6),
    "at its end": lambda: Ending(6),
    "continuing, shuffled": lambda: ShuffleBuffer(Continuing(), 4),
    "at its end, shuffled": lambda: ShuffleBuffer(Ending(6), 4),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_a_stream_that_keeps_its_place_resumes_between_epochs(kind: str) -> None:
    feed = feed_of(loader_of(KEEPING[kind](), 2))
    epochs, states = [], []
    for epoch in range(3):
        states.append(saved(feed))
        feed.start_epoch(epoch)
        epochs.append(draw_ids(feed))
        feed.finish_epoch()
    assert all(len(ids) == 6 for ids in epochs)
    for first in (0, 1, 2):
        resumed = feed_of(loader_of(KEEPING[kind](), 2))
        resumed.load_state_dict(states[first])
        for epoch in range(first, 3):
            resumed.start_epoch(epoch)
            assert draw_ids(resumed) == epochs[epoch]
            resumed.finish_epoch()


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("kind", KEEPING)
def test_a_stream_that_keeps_its_place_goes_back_to_the_start_of_an_epoch(kind: str, windows: int) -> None:
    feed = feed_of(loader_of(KEEPING[kind](), 2))
    for epoch in range(2):
        state = saved(feed)
        feed.start_epoch(epoch)
        before = draw_ids(feed, windows)
        feed.load_state_dict(state)  # as when a run is rewound
        feed.start_epoch(epoch)
        ids = draw_ids(feed)
        assert ids[: len(before)] == before
        assert len(set(ids)) == 6
        feed.finish_epoch()


@pytest.mark.parametrize("kind", KEEPING)
def test_a_second_training_begins_where_the_first_did(kind: str) -> None:
    stream = KEEPING[kind]()
    seen = []
    for _ in range(2):
        feed = feed_of(loader_of(stream, 2))
        feed.start_epoch(0)
        seen.append(draw_ids(feed, 2))
        feed.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", KEEPING)
def test_an_epoch_that_is_left_early_loses_nothing(kind: str) -> None:
    """The next one takes what was left, in a resumed run too."""
    feed = feed_of(loader_of(KEEPING[kind](), 2))
    feed.start_epoch(0)
    first = draw_ids(feed, 1)
    feed.finish_epoch()
    state = saved(feed)
    feed.start_epoch(1)
    rest = draw_ids(feed)
    assert len(set(first + rest)) == len(first + rest) >= 6
    resumed = feed_of(loader_of(KEEPING[kind](), 2))
    resumed.load_state_dict(state)
    resumed.start_epoch(1)
    assert draw_ids(resumed) == rest


def test_workers_that_live_on_begin_each_epoch_alike() -> None:
    settings = {**vars(arguments()), "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    loader = make_loader(
        StatefulNumbers(12),
        batch_size=2,
        sampler=None,
        collate=collate_ids,
        args=SimpleNamespace(**settings),
        train=True,
        seed=0,
    )
    feed = feed_of(loader)
    state = saved(feed)
    for epoch in (0, 0, 1):  # the first is left after one batch, when more have been read ahead
        feed.load_state_dict({**state, "epoch": epoch})
        feed.start_epoch(epoch)
        assert draw_ids(feed, 1) == [0, 1]
    assert draw_ids(feed) == list(range(2, 12))
    feed.close()


def test_a_loader_that_keeps_its_place_goes_back_to_the_start_of_an_epoch() -> None:
    feed = feed_of(StatefulLoader(10), 2)
    state = saved(feed)
    feed.start_epoch(0)
    draw_ids(feed, 2)
    feed.load_state_dict(state)
    feed.start_epoch(0)
    assert draw_ids(feed) == list(range(10))


class Stopping(Counting):
    """One of its samples raises what would pass for the end of the data."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return next(iter(())) if index == 4 else super().__getitem__(index)


class StoppingMany(Stopping):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Stopping, StoppingMany])
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch(kind: Any, workers: int) -> None:
    args = SimpleNamespace(**{**vars(arguments()), "dataloader_num_workers": workers})
    loader = make_loader(kind(12), batch_size=3, sampler=None, collate=collate_ids, args=args, train=True, seed=0)
    feed = feed_of(loader)
    feed.start_epoch(0)
    assert draw_ids(feed, 1) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="index 4 of" if kind is Stopping else "indices 3, 4, 5 of"):
        draw_ids(feed)
    feed.close()


def stop(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return next(iter(())) if rows[0]["id"] >= 3 else collate_ids(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collator_that_raises_stop_iteration_does_not_end_the_epoch(workers: int) -> None:
    args = SimpleNamespace(**{**vars(arguments()), "dataloader_num_workers": workers})
    loader = make_loader(Counting(12), batch_size=3, sampler=None, collate=stop, args=args, train=True, seed=0)
    feed = feed_of(loader)
    feed.start_epoch(0)
    with pytest.raises(RuntimeError, match="StopIteration was raised"):
        draw_ids(feed)
    feed.close()


@pytest.mark.parametrize("makes_batches", [True, False])
def test_a_share_of_an_own_sampler_goes_on_where_it_was_left(makes_batches: bool) -> None:
    """Of two processes: each position is its own, for an order that can only be read from its start."""
    order = SequentialSampler(range(40))

    def feed_of(rank: int) -> StatefulDataIterator:
        shape: dict[str, Any] = {"batch_sampler": BatchSampler(order, 3, False)}
        if not makes_batches:
            shape = {"sampler": order, "batch_size": 3}
        loader: Any = DataLoader(list(range(40)), collate_fn=list, **shape)
        feed = StatefulDataIterator(
            split_loader(loader, DataShard.even(rank, 2, 3), 0),
            accumulation=2,
            collect=lambda source, number: (list(source), None),
        )
        feed.synchronize = lambda window, number: (window, 12, len(window[0]))
        return feed

    for rank in range(2):
        begun, again = feed_of(rank), feed_of(rank)
        begun.start_epoch(0)
        begun.draw()
        again.load_state_dict(begun.state_dict())
        again.start_epoch(0)
        firsts = (12 + 3 * rank, 18 + 3 * rank)
        assert again.draw()[0] == begun.draw()[0] == [list(range(first, first + 3)) for first in firsts]
