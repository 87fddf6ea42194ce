"""Orders: pure functions of (seed, epoch, consumed), and the reference's for the same seed."""

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.lengths import find_lengths, length_grouped_order
from paceline.pytorch.data.indexed import IndexBatches
from paceline.pytorch.data.rebalance import balance, padded_cost
from paceline.pytorch.data.sampling import (
    OrderedSampler,
    RebalancedBatches,
    length_grouped_sampler,
    make_eval_sampler,
    make_train_sampler,
    random_order,
    random_sampler,
    sequential_sampler,
)

torch.set_num_threads(1)
lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(size=st.integers(0, 200), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5), start=st.integers(0, 220))
def test_order_from_a_position_is_the_tail_of_the_whole(size: int, seed: int, epoch: int, start: int) -> None:
    sampler = random_sampler(size, seed)
    sampler.set_epoch(epoch)
    whole = list(sampler)
    assert sorted(whole) == list(range(size))
    sampler.set_position(start)
    assert list(sampler) == whole[start:]
    sampler.set_epoch(epoch)
    assert list(sampler) == whole
    assert len(sampler) == size


def test_random_order_is_torchs_permutation() -> None:
    generator = torch.Generator().manual_seed(42 + 3)
    assert random_order(100, 42, 3).tolist() == torch.randperm(100, generator=generator).tolist()


def test_order_does_not_depend_on_the_default_device() -> None:
    expected = random_order(10, 0, 0)
    with torch.device("meta"):
        assert random_order(10, 0, 0).tolist() == expected.tolist()


def test_long_orders_are_walked_in_chunks() -> None:
    sampler = random_sampler(150_000, 1)
    sampler.set_position(70_000)
    assert list(sampler) == random_order(150_000, 1, 0)[70_000:].tolist()


def test_iterating_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    for sampler in (random_sampler(50, 0), sequential_sampler(50), length_grouped_sampler([1] * 50, 4, 0)):
        list(sampler)
    list(RebalancedBatches([3] * 50, 8, 2, 0))
    assert torch.equal(before, torch.get_rng_state())


@given(lengths=lengths_strategy, batch_size=st.integers(1, 9), seed=st.integers(0, 1000))
def test_grouped_order_is_a_permutation_with_the_longest_first(lengths: list[int], batch_size: int, seed: int) -> None:
    order = length_grouped_order(lengths, batch_size, random_order(len(lengths), seed, 0))
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)


def test_grouped_order_of_no_samples() -> None:
    assert length_grouped_order([], 4, random_order(0, 0, 0)).tolist() == []


@given(lengths=lengths_strategy, batch_size=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_grouped_order_equals_the_reference(lengths: list[int], batch_size: int, seed: int) -> None:
    reference = pytest.importorskip("transformers.trainer_pt_utils")
    theirs = reference.LengthGroupedSampler(
        batch_size, lengths=lengths, generator=torch.Generator().manual_seed(seed + 1)
    )
    ours = length_grouped_sampler(lengths, batch_size, seed)
    ours.set_epoch(1)
    assert list(ours) == list(theirs)


@given(
    lengths=lengths_strategy,
    per_group=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    num_ranks=st.integers(1, 3),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_rebalanced_batches_equal_the_reference(
    lengths: list[int], per_group: int, accumulation: int, num_ranks: int, epoch: int, drop_last: bool
) -> None:
    reference = pytest.importorskip("transformers.trainer_pt_utils")
    per_update = per_group * accumulation * num_ranks
    for rank in range(num_ranks):
        theirs = reference.BatchRebalanceSampler(
            lengths, per_update, num_ranks, accumulation, seed=7, rank=rank, drop_last=drop_last
        )
        ours = RebalancedBatches(
            lengths, per_update, accumulation, 7, num_ranks=num_ranks, rank=rank, drop_last=drop_last
        )
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_random_order_equals_the_reference() -> None:
    """accelerate's sampler is what the reference shuffles with."""
    loading = pytest.importorskip("accelerate.data_loader")
    theirs = loading.SeedableRandomSampler(range(37), data_seed=11)
    ours = random_sampler(37, 11)
    for epoch in (0, 1, 4):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)


@given(
    lengths=lengths_strategy,
    per_group=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    consumed=st.integers(0, 60),
    drop_last=st.booleans(),
)
def test_rebalanced_batches_from_a_position(
    lengths: list[int], per_group: int, accumulation: int, consumed: int, drop_last: bool
) -> None:
    sampler = RebalancedBatches(lengths, per_group * accumulation, accumulation, 3, drop_last=drop_last)
    whole = [index for batch in sampler for index in batch]
    assert len(whole) == sampler.num_samples
    sampler.set_position(consumed)
    assert [index for batch in sampler for index in batch] == whole[consumed:]


def test_workers_of_rebalanced_batches_seed_by_the_same_places_after_a_resume() -> None:
    """The place counts the samples of all processes, as the position of a checkpoint does."""
    lengths = np.random.default_rng(1).integers(5, 90, size=50).tolist()
    loaders = []
    for rank in range(2):
        sampler = RebalancedBatches(lengths, 12, 2, 3, num_ranks=2, rank=rank, drop_last=False)
        loaders.append(IndexBatches(sampler, None, drop_last=False, is_seeded=True))

    def keys(position: int) -> list[list[tuple[int, int]]]:
        for batches in loaders:
            batches.set_epoch(1)
            batches.set_position(position)
        return [[(batch.key[1], len(batch)) for batch in batches] for batches in loaders]  # type: ignore[attr-defined]

    whole = keys(0)
    placed = sorted(itertools.chain(*whole))
    assert [place for place, _ in placed] == [0, *itertools.accumulate(size for _, size in placed)][:-1]
    assert keys(24) == [own[4:] for own in whole]


def test_rebalancing_makes_costs_closer() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, size=64).tolist()
    groups = balance(range(64), lengths, 8)
    costs = [padded_cost(len(group), max(lengths[index] for index in group)) for group in groups]
    by_length = sorted(range(64), key=lambda index: -lengths[index])
    plain = [by_length[start : start + 8] for start in range(0, 64, 8)]
    plain_costs = [padded_cost(8, lengths[group[0]]) for group in plain]
    assert max(costs) / min(costs) < 2 < max(plain_costs) / min(plain_costs)


def test_too_few_samples_for_the_groups() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        balance([0, 1], [3, 4], 3)
    with pytest.raises(ValueError, match=r": 3 samples .* cannot fill 4 micro-batches.*device_train_batch_size"):
        RebalancedBatches([1, 2, 3], 3, 2, 0, num_ranks=2)


def test_an_epoch_in_progress_is_finished_in_its_own_order() -> None:
    lengths = np.random.default_rng(1).integers(1, 99, size=50).tolist()
    first = length_grouped_sampler(lengths, 8, 5)
    first.set_epoch(2)
    whole, state = list(first), first.state_dict()
    changed = length_grouped_sampler(lengths, 16, 6)
    changed.set_epoch(2)
    changed.load_state_dict(state)
    changed.set_position(24)
    assert list(changed) == whole[24:]
    assert changed.state_dict() == state  # saved again, it is still the order the epoch was begun in
    changed.set_epoch(3)
    assert list(changed) != length_grouped_order(lengths, 8, random_order(50, 5, 3)).tolist()
    assert list(changed) == length_grouped_order(lengths, 16, random_order(50, 6, 3)).tolist()


def test_changed_data_or_strategy_is_said(caplog: pytest.LogCaptureFixture) -> None:
    state = random_sampler(10, 0).state_dict()
    with caplog.at_level(logging.WARNING):
        random_sampler(12, 0).load_state_dict(state)
        sequential_sampler(10).load_state_dict(state)
    assert "10 samples" in caplog.text
    assert "12 now" in caplog.text
    assert "train_sampling_strategy was 'random'" in caplog.text


def make(dataset: object, strategy: str, **options: object) -> object:
    return make_train_sampler(dataset, strategy=strategy, batch_size=2, accumulation=2, seed=0, **options)  # type: ignore[arg-type]


def test_make_train_sampler() -> None:
    data = [{"input_ids": [0] * (index % 5 + 1)} for index in range(20)]
    assert isinstance(make(data, "random"), OrderedSampler)
    assert list(make(data, "sequential")) == list(range(20))  # type: ignore[call-overload]
    grouped = list(make(data, "group_by_length"))  # type: ignore[call-overload]
    assert grouped == length_grouped_order([i % 5 + 1 for i in range(20)], 4, random_order(20, 0, 0)).tolist()
    assert isinstance(make(data, "batch_rebalance"), RebalancedBatches)
    assert make(None, "random") is None
    assert make(iter(data), "random") is None
    with pytest.raises(ValueError, match="'shuffled' is unknown"):
        make(data, "shuffled")
    with pytest.raises(ValueError, match="no len"):
        make(iter(data), "group_by_length")


def test_make_eval_sampler() -> None:
    data = [{"input_ids": [0] * (index % 5 + 1)} for index in range(20)]
    plain = make_eval_sampler(data, strategy="random", batch_size=2, seed=0)
    assert plain is not None
    assert list(plain) == list(range(20))
    grouped = make_eval_sampler(data, strategy="group_by_length", batch_size=2, seed=0)
    assert grouped is not None
    assert sorted(grouped) == list(range(20)) != list(grouped)
    assert make_eval_sampler(iter(data), strategy="group_by_length", batch_size=2, seed=0) is None


def test_find_lengths() -> None:
    assert find_lengths([{"words": "abc"}, {"words": ""}], model_input_name="words").tolist() == [3, 0]
    with pytest.raises(ValueError, match=r"'words'.*'length'.*dicts with 'a'"):
        find_lengths([{"a": 1}], model_input_name="words")
    with pytest.raises(ValueError, match="of type int"):
        find_lengths([1, 2])


def test_find_lengths_in_columns() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1], [1, 2], []], "size": [7, 8, 9]}
    assert find_lengths(datasets.Dataset.from_dict(rows), "size").tolist() == [7, 8, 9]
    assert find_lengths(datasets.Dataset.from_dict(rows)).tolist() == [1, 2, 0]
