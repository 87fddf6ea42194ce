"""A pass over a stream that some workers began is finished by others, or by none: every sample once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import slow_but
from worker_streams import (
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

from paceline import ShuffleBuffer
from paceline.pytorch.data.feed import StatefulDataIterator

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def begin(
    make: Callable[[int], StatefulDataIterator], num_workers: int, windows: int
) -> tuple[list[int], dict[str, Any]]:
    feed = make(num_workers)
    feed.start_epoch(0)
    seen, state = ids_of(draw(feed, windows)), json.loads(json.dumps(feed.state_dict()))
    feed.close()
    return seen, state


def go_on(
    make: Callable[[int], StatefulDataIterator], num_workers: int, state: dict[str, Any], windows: int | None
) -> tuple[list[int], dict[str, Any]]:
    feed = make(num_workers)
    feed.load_state_dict(state)
    feed.start_epoch(0)
    seen, state = ids_of(draw(feed, windows)), json.loads(json.dumps(feed.state_dict()))
    feed.close()
    return seen, state


def of(kind: Any, size: int) -> Callable[[int], StatefulDataIterator]:
    return lambda num_workers: feed_of(kind(size), arguments(num_workers), batch_size=3)


@pytest.mark.parametrize("kind", [SharedStream, StatefulStream])
@pytest.mark.parametrize(("before", "after"), slow_but([(3, 1), (2, 3)], [(3, 1), (2, 3), (1, 2), (3, 2)]))
def test_a_stream_that_shares_itself_out(kind: Any, before: int, after: int) -> None:
    make = of(kind, 47)
    first, state = begin(make, before, 2)
    middle, state = go_on(make, after, state, 2)
    last, _ = go_on(make, before, state, None)  # and back to the first number
    assert sorted(first + middle + last) == list(range(47))
    feed = make(after)
    feed.load_state_dict(state)
    assert sorted(ids_of(run_epochs(feed, range(2))[1])) == list(range(1000, 1047))  # the next epoch is whole


def test_without_workers_the_parts_are_read_here() -> None:
    class Here(StatefulStream):
        """As a script would write it: the whole stream where there is no worker."""

        def indices(self) -> Any:
            if torch.utils.data.get_worker_info() is None:
                return LoneStream.indices(self)  # type: ignore[arg-type]
            return super().indices()

    make = of(Here, 40)
    for windows in (1, 2):
        first, state = begin(make, 2, windows)
        middle, state = go_on(make, 0, state, 1)
        assert torch.utils.data.get_worker_info() is None
        last, _ = go_on(make, 2, state, None)
        assert sorted(first + middle + last) == list(range(40))
        first, state = begin(make, 0, windows)
        last, _ = go_on(make, 2, state, None)
        assert sorted(first + last) == list(range(40))


def test_interrupted_once_more_the_order_stays() -> None:
    make = of(StatefulStream, 50)
    _, state = begin(make, 3, 2)
    whole, _ = go_on(make, 2, state, None)
    for windows in (1, 2, 3):
        middle, again = go_on(make, 2, state, windows)
        last, _ = go_on(make, 2, again, None)
        assert middle + last == whole


@pytest.mark.parametrize("shuffling", slow_but(["theirs"], ["none", "theirs", "ours"]))
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 3), (0, 1), (1, 0), (1, 2)])
def test_streams_of_datasets(shuffling: str, before: int, after: int) -> None:
    datasets = pytest.importorskip("datasets")

    def make(num_workers: int) -> StatefulDataIterator:
        stream = datasets.Dataset.from_dict({"id": list(range(36))}).to_iterable_dataset(num_shards=4)
        stream = stream.shuffle(seed=5, buffer_size=6) if shuffling == "theirs" else stream
        stream = stream.map(lambda row: {"noise": [0.0]})
        stream = ShuffleBuffer(stream, 6, seed=5) if shuffling == "ours" else stream
        return feed_of(stream, arguments(num_workers), batch_size=3)

    first, state = begin(make, before, 2)
    middle, state = go_on(make, after, state, 1)
    last, _ = go_on(make, before, state, None)
    assert sorted(first + middle + last) == list(range(36))
    if shuffling == "ours":
        assert first + middle + last != list(range(36))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_our_buffer_resumes_exactly_around_a_stream_of_datasets(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")

    def make(num_workers: int) -> StatefulDataIterator:
        stream = datasets.Dataset.from_dict({"id": list(range(48))}).to_iterable_dataset(num_shards=4)
        stream = stream.map(lambda row: {"noise": [0.0]})
        return feed_of(ShuffleBuffer(stream, 10, seed=5), arguments(num_workers), batch_size=3)

    whole = run_epochs(make(num_workers), range(2))
    assert sorted(ids_of(whole[0])) == sorted(ids_of(whole[1])) == list(range(48))
    assert ids_of(whole[0]) != ids_of(whole[1])
    for windows in (1, 3):
        first, state = begin(make, num_workers, windows)
        feed = make(num_workers)
        feed.load_state_dict(state)
        last = run_epochs(feed, range(2))
        assert first + ids_of(last[0]) == ids_of(whole[0])
        assert ids_of(last[1]) == ids_of(whole[1])
    assert "again" not in caplog.text


def test_a_stream_that_cannot_be_copied_is_refused() -> None:
    class Tied(StatefulStream):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a socket")

    make = of(Tied, 40)
    _, state = begin(make, 2, 1)
    with pytest.raises(ValueError, match=r"cannot pickle a socket(.|\n)*dataloader_num_workers=2"):
        go_on(make, 0, state, 1)


def test_a_stream_that_does_not_share_itself_out_is_refused() -> None:
    make = of(Stream, 20)
    _, state = begin(make, 2, 1)
    with pytest.raises(ValueError, match=r"dataloader_num_workers=2.*get_worker_info"):
        go_on(make, 3, state, 1)
    seen, _ = go_on(make, 2, state, None)
    assert seen
