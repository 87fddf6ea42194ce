"""Mixtures: the shares are those of the weights, every sample is seen equally often, and a resume loses none."""

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Classifier, classification, make_trainer, weights
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from paceline import MixedDataset, MixedStream, TrainerCallback, TrainingArguments
from paceline.pytorch.data.parts import Share, Watch, acting_as

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


def named(sizes: list[int]) -> dict[str, list[tuple[str, int]]]:
    return {f"s{owner}": [(f"s{owner}", row) for row in range(size)] for owner, size in enumerate(sizes)}


def epochs_of(mixture: MixedDataset, count: int) -> list[list[Any]]:
    found = []
    for epoch in range(count):
        mixture.set_epoch(epoch)
        found.append([mixture[index] for index in range(len(mixture))])
    return found


@given(sizes=SIZES, data=st.data(), stop=st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_shares_and_how_often_a_sample_is_seen(sizes: list[int], data: Any, stop: str) -> None:
    sources = named(sizes)
    shares = {name: data.draw(st.floats(0.05, 1.0)) for name in sources}
    mixture = MixedDataset(sources, shares, stop=stop)
    epochs = epochs_of(mixture, 3)
    total = sum(shares.values())
    for samples in epochs:
        counts = Counter(name for name, _ in samples)
        for name, source in sources.items():
            assert abs(counts[name] - len(samples) * shares[name] / total) <= len(sources) + 1
            if stop == "all_exhausted":
                assert counts[name] >= len(source)
            else:
                assert counts[name] <= len(source)
    for name, source in sources.items():  # over all epochs, each sample of a source as often as the others, up to one
        seen = Counter(row for samples in epochs for own, row in samples if own == name)
        assert max(seen.values()) - min(seen[row] for row in range(len(source))) <= 1


@given(sizes=SIZES, size=st.integers(1, 60), seed=st.integers(0, 3))
def test_a_given_size(sizes: list[int], size: int, seed: int) -> None:
    mixture = MixedDataset(named(sizes), size=size, seed=seed)
    assert len(mixture) == size == len(epochs_of(mixture, 1)[0])
    copy = pickle.loads(pickle.dumps(mixture))
    indices = list(np.random.default_rng(seed).integers(0, size, 20))
    assert copy.__getitems__(indices) == [mixture[index] for index in indices]
    assert all(mixture[index][0] == mixture.source_of(index) for index in range(size))
    with pytest.raises(IndexError):
        mixture[size]


def test_sources_are_interleaved_and_named() -> None:
    rows = {"a": [{"x": 1}] * 30, "b": [{"x": 2}] * 10}
    mixture = MixedDataset(rows, source_column="source")
    found = [mixture[index] for index in range(40)]
    assert [sum(sample["source"] for sample in found[start : start + 8]) for start in range(0, 40, 8)] == [2] * 5
    assert all(sample["x"] == sample["source"] + 1 for sample in found)
    assert rows["a"][0] == {"x": 1}  # the sources' samples are left as they are


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": {}}, "one source or more"),
        ({"weights": {"a": 1.0}}, "one for each of a, b"),
        ({"weights": {"a": 1.0, "b": 0.0}}, "above 0"),
        ({"weights": {"a": 1.0, "b": float("nan")}}, "above 0"),
        ({"stop": "never"}, "first_exhausted"),
        ({"size": 0}, "1 sample or more"),
        ({"sources": {"a": [1], "b": []}}, "'b' of a mixture is empty"),
        ({"sources": {"a": [1], "b": iter([1])}}, "no length"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixedDataset(**{"sources": {"a": [1, 2], "b": [3]}, **options})


class Counting(IterableDataset[Any]):
    """A stream without a position."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.epoch = name, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            yield self.name, number, self.epoch


class Positioned(Counting):
    """One with a position, which it keeps where a pass is broken off."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.size:
            self.next += 1
            yield self.name, self.next - 1, self.epoch
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def stream(kind: type[Counting], stop: str, sizes: tuple[int, ...] = (5, 17, 9)) -> MixedStream:
    sources = {f"s{owner}": kind(f"s{owner}", size) for owner, size in enumerate(sizes)}
    return MixedStream(sources, {"s0": 1.0, "s1": 2.0, "s2": 1.0}, stop=stop, seed=3)


class Eager(Counting):
    """Chooses its part as soon as it is opened."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([(self.name, number, self.epoch) for number in range(first, self.size, step)])


class Lazy(Eager):
    """Chooses it when the first sample is read."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


def read_by_two(mixture: MixedStream) -> list[Any]:
    """Returns the samples that two workers read."""
    found: list[Any] = []
    for worker in (0, 1):
        info: Any = WorkerInfo(id=worker, num_workers=2, seed=0, dataset=mixture)
        watch = Watch(info)
        with acting_as(info):
            found += Share(iter(mixture), watch, worker, 2)
    return found


@pytest.mark.parametrize("kinds", [(Counting, Positioned), (Eager, Lazy), (Lazy, Lazy)])
def test_workers_repeat_no_sample(kinds: tuple[type[Counting], type[Counting]]) -> None:
    mixture = MixedStream({"a": kinds[0]("a", 20), "b": kinds[1]("b", 20)})
    found = read_by_two(mixture)
    assert {name for name, *_ in found} == {"a", "b"}
    assert set(Counter(found).values()) == {1}


@pytest.mark.parametrize("kinds", [(Counting, Lazy), (Eager, Positioned)])
def test_sources_that_workers_would_repeat_are_refused(kinds: tuple[type[Counting], type[Counting]]) -> None:
    mixture = MixedStream({"a": kinds[0]("a", 20), "b": kinds[1]("b", 20)})
    with pytest.raises(ValueError, match=r"MixedStream: .*'[ab]' gives each of them a part .* '[ab]' all of them"):
        read_by_two(mixture)
    assert {name for name, *_ in mixture} == {"a", "b"}  # without workers


@given(
    kind=st.sampled_from([Counting, Positioned]),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    cut=st.integers(0, 60),
    epoch=st.integers(0, 2),
)
def test_a_stream_goes_on_where_it_was(kind: type[Counting], stop: str, cut: int, epoch: int) -> None:
    whole = stream(kind, stop)
    whole.set_epoch(epoch)
    expected = list(whole)
    assert {name for name, *_ in expected} == {"s0", "s1", "s2"}
    if stop == "all_exhausted":
        assert len({sample[:2] for sample in expected}) == 5 + 17 + 9
    first = stream(kind, stop)
    first.set_epoch(epoch)
    head = [sample for _, sample in zip(range(cut), first, strict=False)]
    if cut >= len(expected):
        assert head == expected
        return
    second = stream(kind, stop)
    second.set_epoch(epoch)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert head + list(second) == expected
    second.set_epoch(epoch)  # and a pass after one that was broken off begins at the beginning
    assert list(second) == expected


def test_a_stream_of_other_weights_is_refused() -> None:
    first = stream(Positioned, "all_exhausted")
    reader = iter(first)
    next(reader)
    other = MixedStream({f"s{owner}": Positioned(f"s{owner}", 5) for owner in range(3)}, seed=3)
    with pytest.raises(ValueError, match="weights"):
        other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="'b' of a mixture is empty"):
        list(MixedStream({"a": [1, 2], "b": []}, stop="all_exhausted"))


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Rows(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.next = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def mixture(kind: str) -> Any:
    rows = classification(40)
    if kind == "map":
        return MixedDataset({"a": rows[:30], "b": rows[30:]}, {"a": 0.4, "b": 0.6}, size=22, source_column="source")
    return MixedStream({"a": Rows(rows[:30]), "b": Rows(rows[30:])}, stop="all_exhausted")


@pytest.mark.parametrize(
    ("kind", "workers"), [("map", 0), ("stream", 0), pytest.param("map", 2, marks=pytest.mark.slow)]
)
def test_a_run_is_resumed_to_the_bit(tmp_path: Path, kind: str, workers: int) -> None:
    options: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers > 0,
    }
    torch.manual_seed(0)
    whole = make_trainer(tmp_path / "whole", Classifier(), mixture(kind), **options)
    whole.train()
    for stop in (3, 9):
        torch.manual_seed(0)
        folder = tmp_path / f"cut {stop}"
        make_trainer(folder, Classifier(), mixture(kind), callbacks=[StopsAt(stop)], **options).train()
        resumed = make_trainer(folder, Classifier(), mixture(kind), **options)
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(weights(resumed.model), weights(whole.model))


def test_lengths_are_not_planned_with(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}] * 8
    trainer = make_trainer(tmp_path, Classifier(), MixedDataset({"a": rows}), train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match="other samples in each epoch"):
        trainer.train()
    assert TrainingArguments(str(tmp_path)).train_sampling_strategy == "random"
