"""The reference's samplers: the same order for the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import paceline
from paceline import DistributedLengthGroupedSampler, IterableDatasetShard, LengthGroupedSampler

theirs = pytest.importorskip("transformers.trainer_pt_utils")

lengths_of_samples = st.lists(st.integers(1, 50), min_size=1, max_size=60)
sizes = st.integers(0, 40)
processes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], pair[1] % pair[0]))


class Stream(IterableDataset[int]):
    """Numbers, shuffled by its own generator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


@given(lengths=lengths_of_samples, batch_size=st.integers(1, 5), kind=st.sampled_from(["list", "tensor", "dataset"]))
def test_length_grouped(lengths: list[int], batch_size: int, kind: str) -> None:
    options: dict[str, Any] = {
        "list": {"lengths": lengths},
        "tensor": {"lengths": torch.tensor(lengths)},
        "dataset": {"dataset": [{"text": [0] * length} for length in lengths], "model_input_name": "text"},
    }[kind]
    ours, expected = (
        library.LengthGroupedSampler(batch_size, generator=torch.Generator().manual_seed(5), **options)
        for library in (paceline, theirs)
    )
    assert len(ours) == len(expected)
    assert [list(ours), list(ours)] == [list(expected), list(expected)]


@given(
    lengths=lengths_of_samples,
    batch_size=st.integers(1, 5),
    process=processes,
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_length_grouped_of_each_process(
    lengths: list[int], batch_size: int, process: tuple[int, int], drop_last: bool, epoch: int
) -> None:
    options = {"num_replicas": process[0], "rank": process[1], "seed": 4, "drop_last": drop_last, "lengths": lengths}
    ours, expected = (library.DistributedLengthGroupedSampler(batch_size, **options) for library in (paceline, theirs))
    for sampler in (ours, expected):
        sampler.set_epoch(epoch)
    found = list(ours)
    assert len(found) == len(ours) == len(expected)
    if drop_last or -len(lengths) % process[0] <= len(lengths):  # theirs fails where it has to repeat twice
        assert found == list(expected)


def test_lengths_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="One of dataset and lengths"):
        LengthGroupedSampler(2)
    with pytest.raises(ValueError, match=r"an 'input_ids' key.*dicts with 'text'.*model_input_name"):
        DistributedLengthGroupedSampler(2, [{"text": [1]}], num_replicas=1, rank=0)
    assert list(LengthGroupedSampler(2, [])) == []


@given(size=sizes, batch_size=st.integers(1, 5), process=processes, drop_last=st.booleans())
def test_shards(size: int, batch_size: int, process: tuple[int, int], drop_last: bool) -> None:
    options = {"drop_last": drop_last, "num_processes": process[0], "process_index": process[1]}
    ours, expected = (library.ShardSampler(range(size), batch_size, **options) for library in (paceline, theirs))
    assert list(ours) == list(expected)
    assert len(ours) == len(expected)


@given(
    size=sizes, batch_size=st.integers(1, 5), process=processes, drop_last=st.booleans(), epoch=st.integers(0, 2)
)  # fmt: skip
def test_shards_of_streams(size: int, batch_size: int, process: tuple[int, int], drop_last: bool, epoch: int) -> None:
    options = {"drop_last": drop_last, "num_processes": process[0], "process_index": process[1], "seed": 3}
    ours, expected = (
        library.IterableDatasetShard(Stream(size), batch_size, **options) for library in (paceline, theirs)
    )
    for shard in (ours, expected):
        shard.set_epoch(epoch)
    assert list(ours) == list(expected)
    assert len(ours) == len(expected)
    assert ours.num_examples == expected.num_examples == size


def test_shards_of_one_process_are_everything() -> None:
    assert list(paceline.ShardSampler(range(5), 2, drop_last=True)) == [0, 1, 2, 3]
    assert list(IterableDatasetShard(range(5), 2, drop_last=True)) == [0, 1, 2, 3]
    assert list(paceline.ShardSampler(range(5), 2)) == list(IterableDatasetShard(range(5), 2)) == [0, 1, 2, 3, 4, 0]


def test_a_stream_is_told_the_epoch_and_read_as_needed() -> None:
    class Endless(IterableDataset[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return itertools.count(100 * self.epoch)

    shard = IterableDatasetShard(Endless(), 2, num_processes=2, process_index=1)
    shard.set_epoch(3)
    assert list(itertools.islice(shard, 4)) == [302, 303, 306, 307]
    with pytest.raises(TypeError):
        len(shard)


@given(size=st.integers(1, 40), batch_size=st.integers(1, 5), process=processes)
def test_the_loop(size: int, batch_size: int, process: tuple[int, int]) -> None:
    options = {"num_replicas": process[0], "rank": process[1], "seed": 3}
    ours, expected = (
        library.DistributedSamplerWithLoop(range(size), batch_size, **options) for library in (paceline, theirs)
    )
    found, wanted = list(ours), list(expected)
    assert len(found) % batch_size == 0
    assert found[: len(wanted)] == wanted  # theirs stops where it would have to repeat twice


@given(
    lengths=lengths_of_samples, process=processes, grad_accum=st.integers(1, 3), per_batch=st.integers(1, 4),
    shuffle=st.booleans(), drop_last=st.booleans(), epoch=st.integers(0, 2),
)  # fmt: skip
def test_rebalanced_batches(
    lengths: list[int], process: tuple[int, int], grad_accum: int, per_batch: int, shuffle: bool, drop_last: bool,
    epoch: int,
) -> None:  # fmt: skip
    options = {"shuffle": shuffle, "rank": process[1], "drop_last": drop_last}
    update = process[0] * grad_accum * per_batch
    ours, expected = (
        library.BatchRebalanceSampler(lengths, update, process[0], grad_accum, **options)
        for library in (paceline, theirs)
    )
    for sampler in (ours, expected):
        sampler.set_epoch(epoch)
    assert list(ours) == list(expected)
    assert len(ours) == len(expected)


@given(lengths=lengths_of_samples, batch_size=st.integers(1, 5), block=st.none() | st.integers(1, 4))
def test_length_grouped_indices(lengths: list[int], batch_size: int, block: int | None) -> None:
    ours, expected = (
        library.get_length_grouped_indices(lengths, batch_size, block, torch.Generator().manual_seed(5))
        for library in (paceline, theirs)
    )
    assert ours == expected
