"""A shuffle buffer loses nothing over a restart, wherever that comes, and however the stream is read."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from paceline import ShuffleBuffer
from paceline.pytorch.data.stream import restores_exactly


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.read = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.read += 1
            yield number + 1000 * self.epoch


class StatefulNumbers(Numbers):
    """Begins anew once it has been read to its end; shares itself out among workers."""

    next = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = range(first, self.size, step)
        while self.next < len(numbers):
            self.next += 1
            self.read += 1
            yield numbers[self.next - 1] + 1000 * self.epoch
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def take(stream: Any, count: int) -> list[Any]:
    return [sample for _, sample in zip(range(count), stream, strict=False)]


@given(
    kind=st.sampled_from([Numbers, StatefulNumbers]),
    size=st.integers(0, 40),
    buffer_size=st.integers(1, 15),
    stops=st.lists(st.integers(0, 41), min_size=1, max_size=3),
    epoch=st.integers(0, 2),
)
def test_every_sample_once_in_the_same_order(
    kind: Any, size: int, buffer_size: int, stops: list[int], epoch: int
) -> None:
    def make() -> ShuffleBuffer:
        stream = ShuffleBuffer(kind(size), buffer_size, seed=3)
        stream.set_epoch(epoch)
        return stream

    whole = list(make())
    assert sorted(whole) == [number + 1000 * epoch for number in range(size)]
    seen: list[int] = []
    state = None
    for stop in stops:
        stream = make()
        if state is not None:
            stream.load_state_dict(state)
        seen += take(iter(stream), min(stop, size - len(seen)))
        state = json.loads(json.dumps(stream.state_dict()))
    stream = make()
    assert state is not None
    stream.load_state_dict(state)
    if len(seen) < size:  # at the end, a stream says that it stands at its start
        assert seen + list(stream) == whole
    else:
        assert seen == whole


def test_orders_differ_by_epoch_seed_and_block() -> None:
    stream = ShuffleBuffer(Numbers(40), 20, seed=1)
    first = list(stream)
    assert sorted(first[:20]) == list(range(20))
    assert [number - 20 for number in first[20:]] != first[:20]
    assert list(stream) == first
    stream.set_epoch(1)
    assert [number - 1000 for number in stream] != first
    assert list(ShuffleBuffer(Numbers(40), 20, seed=2)) != first


def test_to_resume_reads_no_more_than_two_buffers() -> None:
    stream = ShuffleBuffer(StatefulNumbers(10_000), 50)
    take(iter(stream), 7_777)
    state = stream.state_dict()
    resumed = ShuffleBuffer(inner := StatefulNumbers(10_000), 50)
    resumed.load_state_dict(state)
    take(iter(resumed), 1)
    assert inner.read <= 101
    assert len(json.dumps(state)) < 200


def test_a_stream_without_a_state_is_read_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert restores_exactly(ShuffleBuffer(StatefulNumbers(5), 2))
    assert not restores_exactly(ShuffleBuffer(Numbers(5), 2))
    stream = ShuffleBuffer(Numbers(30), 4)
    whole = take(iter(stream), 30)
    seen = take(iter(stream), 13)
    state = stream.state_dict()
    stream = ShuffleBuffer(Numbers(30), 4)
    stream.load_state_dict(state)
    assert seen + list(stream) == whole
    assert "reading the first 12 samples again" in caplog.text
    assert "Read 12 samples again in" in caplog.text


def test_augmentation_belongs_behind_the_buffer(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(StatefulNumbers):
        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                yield number + random.random()

    list(ShuffleBuffer(Noisy(9), 4))
    assert "Give what draws them as `transform`" in caplog.text
    caplog.clear()
    stream = ShuffleBuffer(StatefulNumbers(9), 4, transform=lambda number: number + random.random())
    random.seed(1)
    whole = list(stream)
    random.seed(1)
    iterator = iter(stream)
    seen, state, generator = take(iterator, 5), stream.state_dict(), random.getstate()
    random.seed(2)
    resumed = ShuffleBuffer(StatefulNumbers(9), 4, transform=stream.transform)
    resumed.load_state_dict(state)
    random.setstate(generator)
    assert seen + list(resumed) == whole
    assert not caplog.text


@pytest.mark.parametrize("changed", [{"buffer_size": 5}, {"seed": 1}])
def test_another_order_is_refused(changed: dict[str, int]) -> None:
    stream = ShuffleBuffer(StatefulNumbers(9), 4)
    take(iter(stream), 3)
    other = ShuffleBuffer(StatefulNumbers(9), **{"buffer_size": 4, **changed})
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        other.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match="buffer_size=0"):
        ShuffleBuffer(Numbers(1), 0)


@pytest.mark.parametrize("count", [0, 5])
def test_a_position_that_was_loaded_is_that_which_is_saved(count: int) -> None:
    buffer = ShuffleBuffer(StatefulNumbers(9), 4)
    buffer.set_epoch(3)
    take(iter(buffer), count)
    state = buffer.state_dict()
    assert state["epoch"] == 3
    other = ShuffleBuffer(StatefulNumbers(9), 4)
    if not count:
        other.set_epoch(3)
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_another_size_may_begin_with_an_epoch() -> None:
    buffer = ShuffleBuffer(range(10), 3)
    list(buffer)
    other = ShuffleBuffer(range(10), 5)
    other.load_state_dict(buffer.state_dict())
    assert sorted(other) == list(range(10))
