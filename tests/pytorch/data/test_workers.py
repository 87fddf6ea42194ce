"""Worker processes: augmentation does not depend on them, streams are shared out, positions are exact."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_but
from torch.utils.data import get_worker_info
from worker_streams import (
    Images,
    LoneStream,
    SharedStream,
    StatefulStream,
    Stream,
    arguments,
    draw,
    feed_of,
    ids_of,
    run_epochs,
)

from paceline.pytorch.data import generators
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.generators import capture_generators, generators_at, restore_generators, seed_generators


def test_seeds_depend_on_every_part_of_the_key() -> None:
    def draws(*key: int) -> tuple[float, float, float]:
        seed_generators(*key)
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    with generators_at(None):
        keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**63, 0, 0), (0, 0)]
        seen = [draws(*key) for key in keys]
        assert len({value for values in seen for value in values}) == 3 * len(keys)
        assert draws(0, 0, 1) == seen[1]


def test_seeding_looks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed formats the stack for each kind of device that is not in use; the numbers are the same."""
    with generators_at(None):
        monkeypatch.setattr(generators, "has_devices", lambda: True)
        seed_generators(0, 1, 2)
        expected = torch.rand(3)
        monkeypatch.setattr(generators, "has_devices", lambda: False)
        monkeypatch.setattr(torch, "manual_seed", None)
        seed_generators(0, 1, 2)
        assert torch.equal(torch.rand(3), expected)


def test_generators_are_put_back() -> None:
    own = {"mine": torch.Generator().manual_seed(4)}
    state = json.loads(json.dumps(capture_generators(own)))
    drawn = random.random(), float(np.random.rand()), torch.rand(3).tolist(), torch.rand(3, generator=own["mine"])
    with generators_at(state, own):
        assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == drawn[:3]
        assert torch.equal(torch.rand(3, generator=own["mine"]), drawn[3])
    after = random.random(), float(np.random.rand()), torch.rand(3).tolist()
    assert after != drawn[:3]
    restore_generators(state, own)
    assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == drawn[:3]


@pytest.mark.parametrize("reads_many", slow_but([True], [False, True]))
def test_augmentation_depends_on_neither_workers_nor_prefetching(reads_many: bool) -> None:
    dataset = Images(22, reads_many=False)
    expected = run_epochs(feed_of(dataset, arguments(1)), range(2))
    dataset = ManyImages(22) if reads_many else Images(22)
    for args in (
        arguments(2),
        arguments(2, dataloader_persistent_workers=True),
        arguments(1, dataloader_prefetch_factor=5),
    ):
        assert run_epochs(feed_of(dataset, args), range(2)) == expected
    noises = [noise for epoch in expected for _, rows in epoch for noise in rows]
    assert len({tuple(noise) for noise in noises}) == len(noises)
    assert min(ids_of(expected[1])) >= 1000  # the epoch reached the dataset in the workers
    assert run_epochs(feed_of(dataset, arguments(1), seed=4), range(1)) != expected[:1]


class ManyImages(Images):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        assert type(indices) is list
        return [self[index] for index in indices]


@pytest.mark.parametrize("persistent", [False, True])
def test_mid_epoch_resume_with_two_workers(persistent: bool) -> None:
    args = arguments(2, dataloader_persistent_workers=persistent)
    whole = run_epochs(feed_of(Images(30), args), range(2))
    feed = feed_of(Images(30), args)
    feed.start_epoch(0)
    before, state = draw(feed, 2), json.loads(json.dumps(feed.state_dict()))
    feed.close()
    assert state["consumed"] == 16  # drawn, not prefetched
    feed = feed_of(Images(30), args)
    feed.load_state_dict(state)
    resumed = run_epochs(feed, range(2))
    assert before + resumed[0] == whole[0]
    assert resumed[1] == whole[1]


def test_another_number_of_workers_and_batch_size_on_resume() -> None:
    whole = run_epochs(feed_of(Images(30), arguments(2)), range(1))
    feed = feed_of(Images(30), arguments(2))
    feed.start_epoch(0)
    before, state = draw(feed, 1), feed.state_dict()
    feed = feed_of(Images(30), arguments(1), batch_size=7)
    feed.load_state_dict(state)
    after = run_epochs(feed, range(1))[0]
    assert ids_of(before) + ids_of(after) == ids_of(whole[0])


@pytest.mark.parametrize("kind", [Stream, SharedStream, StatefulStream])
@pytest.mark.parametrize("size", slow_but([23], [23, 32]))
def test_streams_are_shared_out_once(kind: Any, size: int) -> None:
    first = run_epochs(feed_of(kind(size), arguments(2)), range(2))
    assert sorted(ids_of(first[0])) == list(range(size))
    assert sorted(ids_of(first[1])) == list(range(1000, 1000 + size))
    again = run_epochs(feed_of(kind(size), arguments(2, dataloader_persistent_workers=True)), range(2))
    assert again == first


@pytest.mark.parametrize(
    ("kind", "persistent", "windows"),
    [(Stream, False, 1), (Stream, True, 2), (StatefulStream, False, 3), (StatefulStream, True, 1)],
)
def test_streams_with_workers_resume_exactly(kind: Any, persistent: bool, windows: int) -> None:
    """Five batches in one window and a half leave the two workers at different places."""
    args = arguments(2, dataloader_persistent_workers=persistent)

    def make() -> StatefulDataIterator:
        feed = feed_of(kind(29), args, batch_size=3)
        feed.accumulation = 1 if windows % 2 else 2
        return feed

    whole = run_epochs(make(), range(2))
    feed = make()
    feed.start_epoch(0)
    before, state = draw(feed, windows), json.loads(json.dumps(feed.state_dict()))
    feed.close()
    feed = make()
    feed.load_state_dict(state)
    feed.start_epoch(0)
    middle, state = draw(feed, 1), json.loads(json.dumps(feed.state_dict()))
    feed.close()
    feed = make()
    feed.load_state_dict(state)
    resumed = run_epochs(feed, range(2))
    assert before + middle + resumed[0] == whole[0]
    assert resumed[1] == whole[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
def test_streams_with_three_uneven_workers_resume_exactly() -> None:
    """The first worker's part ends long before the others'."""
    args = arguments(3)
    whole = run_epochs(feed_of(UnevenStream(26), args, batch_size=2), range(1))[0]
    assert sorted(ids_of(whole)) == list(range(26))
    for windows in (1, 2, 4):
        feed = feed_of(UnevenStream(26), args, batch_size=2)
        feed.accumulation = 1
        feed.start_epoch(0)
        before, state = draw(feed, 2 * windows - 1), feed.state_dict()
        feed.close()
        feed = feed_of(UnevenStream(26), args, batch_size=2)
        feed.load_state_dict(state)
        assert before + run_epochs(feed, range(1))[0] == whole


class UnevenStream(StatefulStream):
    def indices(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        bounds = [0, 3, 14, self.size]
        part = range(bounds[info.id], bounds[info.id + 1])
        start, self.next = self.next or 0, None
        for place in range(start, len(part)):
            self.next = place + 1
            yield part[place]
        self.next = None


def test_a_stream_with_another_number_of_workers_is_refused() -> None:
    feed = feed_of(Stream(20), arguments(2), batch_size=2)
    feed.start_epoch(0)
    draw(feed, 1)
    state = feed.state_dict()
    feed.close()
    for num_workers in (0, 1):
        feed = feed_of(Stream(20), arguments(num_workers), batch_size=2)
        feed.load_state_dict(state)
        with pytest.raises(ValueError, match="dataloader_num_workers=2, or set ignore_data_skip=True"):
            feed.start_epoch(0)
    feed = feed_of(Stream(20), arguments(2), batch_size=2)
    feed.load_state_dict({"epoch": 0, "consumed": 4})
    with pytest.raises(ValueError, match="how far each worker"):
        feed.start_epoch(0)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_none_and_one_worker_read_a_stream_alike(kind: Any) -> None:
    def ids(saved_with: int, resumed_with: int) -> list[int]:
        feed = feed_of(LoneStream(20) if kind is StatefulStream else Stream(20), arguments(saved_with), batch_size=2)
        feed.start_epoch(0)
        before, state = draw(feed, 1), feed.state_dict()
        feed.close()
        feed = feed_of(LoneStream(20) if kind is StatefulStream else Stream(20), arguments(resumed_with), batch_size=2)
        feed.load_state_dict(state)
        return ids_of(before) + ids_of(run_epochs(feed, range(1))[0])

    assert ids(0, 1) == ids(1, 0) == list(range(20))


@pytest.mark.slow
def test_datasets_streams() -> None:
    datasets = pytest.importorskip("datasets")

    def make(num_workers: int, is_shuffled: bool) -> StatefulDataIterator:
        stream = datasets.Dataset.from_dict({"id": list(range(24))}).to_iterable_dataset(num_shards=4)
        if is_shuffled:
            stream = stream.shuffle(seed=5, buffer_size=6)
        return feed_of(stream.map(lambda row: {"noise": [0.0]}), arguments(num_workers), batch_size=3)

    for num_workers in (0, 2):
        for is_shuffled in (False, True):
            whole = run_epochs(make(num_workers, is_shuffled), range(2))
            assert sorted(ids_of(whole[0])) == list(range(24))
            assert (ids_of(whole[0]) != ids_of(whole[1])) == is_shuffled
            feed = make(num_workers, is_shuffled)
            feed.start_epoch(0)
            before, state = draw(feed, 1), json.loads(json.dumps(feed.state_dict()))
            feed.close()
            feed = make(num_workers, is_shuffled)
            feed.load_state_dict(state)
            feed.start_epoch(0)
            middle, state = draw(feed, 1), json.loads(json.dumps(feed.state_dict()))
            feed.close()
            feed = make(num_workers, is_shuffled)
            feed.load_state_dict(state)
            resumed = run_epochs(feed, range(2))
            assert ids_of(before + middle + resumed[0]) == ids_of(whole[0])
            assert ids_of(resumed[1]) == ids_of(whole[1])


@pytest.mark.parametrize("kind", [Images, Stream])
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers(kind: Any, persistent: bool) -> None:
    before = set(torch.multiprocessing.active_children())
    feed = feed_of(kind(40), arguments(2, dataloader_persistent_workers=persistent))
    feed.start_epoch(0)
    draw(feed, 1)
    assert len(set(torch.multiprocessing.active_children()) - before) == 2
    feed.close()
    assert set(torch.multiprocessing.active_children()) == before
    feed.start_epoch(0)  # and a closed feed can be begun again
    assert len(ids_of(draw(feed, 1))) == 8
    feed.close()


@pytest.mark.parametrize("kind", [Images, Stream])
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers_of_a_pass_that_somebody_holds(kind: Any, persistent: bool) -> None:
    """As the traceback of an error does."""
    before = set(torch.multiprocessing.active_children())
    feed = feed_of(kind(40), arguments(2, dataloader_persistent_workers=persistent))
    held = iter(feed.loader)
    next(held)
    assert len(set(torch.multiprocessing.active_children()) - before) == 2
    feed.close()
    assert set(torch.multiprocessing.active_children()) == before
    del held


def test_an_error_in_a_worker_names_its_cause() -> None:
    class Broken(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise KeyError("no such image")

    feed = feed_of(Broken(4), arguments(1))
    feed.start_epoch(0)
    with pytest.raises(KeyError, match="no such image"):
        feed.draw()
    feed.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Images, Stream])
def test_spawned_workers(kind: Any) -> None:
    args = arguments(1, dataloader_multiprocessing_context="spawn")
    assert run_epochs(feed_of(kind(8), args), range(1)) == run_epochs(feed_of(kind(8), arguments(1)), range(1))
