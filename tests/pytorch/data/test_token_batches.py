"""The plan of micro-batches of a number of tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.args.packing import TokenBudget
from paceline.pytorch.data.packing import best_fit_decreasing
from paceline.pytorch.data.sampling import make_train_sampler
from paceline.pytorch.data.token_batches import TokenBatches, class_widths

TOKENS = 96
KINDS = (None, TOKENS, 40)  # padded, one row, rows of 40 tokens


def ragged(size: int, seed: int = 0, longest: int = 40) -> Any:
    return np.random.default_rng(seed).integers(1, longest + 1, size)


def shards(lengths: Any, row_length: int | None, num_ranks: int, accumulation: int = 2, **options: Any) -> Any:
    """The samplers of all processes."""
    per_update = options.pop("per_update", accumulation * num_ranks)
    budget = TokenBudget(TOKENS, row_length)
    return [
        TokenBatches(lengths, budget, 3, per_update, num_ranks=num_ranks, rank=r, **options) for r in range(num_ranks)
    ]


def epoch_of(samplers: Any, epoch: int = 0, position: int = 0) -> list[list[list[int]]]:
    """The micro-batches of each process."""
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.set_position(position)
    return [list(sampler) for sampler in samplers]


def num_tokens(batch: list[int], lengths: Any, row_length: int | None) -> int:
    sizes = [int(lengths[index]) for index in batch]
    if row_length is None:
        return len(sizes) * max(sizes)
    return len(best_fit_decreasing(sizes, row_length)) * row_length if row_length < TOKENS else sum(sizes)


@settings(max_examples=60, deadline=None)
@given(st.integers(9, 120), st.integers(0, 99), st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 3))
def test_each_sample_once_within_the_budget_and_as_many_for_each_process(
    size: int, seed: int, row_length: int | None, num_ranks: int, epoch: int
) -> None:
    lengths = ragged(size, seed)
    samplers = shards(lengths, row_length, num_ranks)
    own = epoch_of(samplers, epoch)
    assert sorted(itertools.chain(*itertools.chain(*own))) == list(range(size))
    assert all(batch and num_tokens(batch, lengths, row_length) <= TOKENS for batch in itertools.chain(*own))
    assert {len(batches) for batches in own} == {len(samplers[0])}, "planned exactly, and the same in each epoch"


def test_epochs_and_seeds_have_their_own_micro_batches() -> None:
    samplers = shards(ragged(400), None, 1)
    first, again, second = (epoch_of(samplers, epoch)[0] for epoch in (0, 0, 1))
    assert first == again
    same = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert len(same) < len(first) / 5


def test_little_is_padded_and_similar_lengths_change_places() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.2, 0.8, 10000).astype(int) + 1, 1, 476)
    (sampler,) = [TokenBatches(lengths, TokenBudget(4096), 0, 1)]
    padded = sum(num_tokens(batch, lengths, None) for batch in sampler)
    assert 1 - lengths.sum() / padded < 0.03
    (packed,) = [TokenBatches(lengths, TokenBudget(4096, 4096), 0, 1)]
    assert len(packed) <= 1.01 * lengths.sum() / 4096
    widths = class_widths(lengths, 1)
    assert np.all(widths >= lengths)
    assert np.all(widths[lengths < 32] == lengths[lengths < 32])
    assert np.max(widths / lengths) < 17 / 16
    assert np.all(class_widths(lengths, 8) % 8 == 0)


@pytest.mark.parametrize("row_length", KINDS)
def test_the_processes_have_about_the_same_work_at_each_moment(row_length: int | None) -> None:
    lengths = ragged(2000)
    samplers = shards(lengths, row_length, 4)
    slots = list(zip(*epoch_of(samplers), strict=True))
    ratios = []
    for slot in slots[:-1]:
        costs = [samplers[0]._cost(np.asarray(batch)) for batch in slot]
        ratios.append(max(costs) / min(costs))
    assert np.mean(ratios) < 1.05


@pytest.mark.parametrize("row_length", KINDS)
def test_any_position_between_optimizer_steps_is_gone_on_from(row_length: int | None) -> None:
    lengths = ragged(150)
    samplers = shards(lengths, row_length, 2)
    whole = epoch_of(samplers, 1)
    for done in range(0, len(whole[0]), 2):
        consumed = sum(len(batch) for batches in whole for batch in batches[:done])
        resumed = shards(lengths, row_length, 2, per_update=4)
        for sampler in resumed:
            sampler.set_epoch(1)
            sampler.load_state_dict(samplers[0].state_dict())
            sampler.set_position(consumed)
        assert [list(sampler) for sampler in resumed] == [batches[done:] for batches in whole]
        saved = {"epoch": 1, "consumed": consumed, "order": samplers[0].state_dict()}
        assert resumed[0].batches_after(saved) == len(whole[0]) - done


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_processes_makes_the_same_optimizer_steps(num_ranks: int) -> None:
    lengths = ragged(150)
    before = shards(lengths, None, 2, accumulation=2)
    whole = epoch_of(before, 1)
    steps = [
        {index for batches in whole for batch in batches[at : at + 2] for index in batch}
        for at in range(0, len(whole[0]), 2)
    ]
    after = shards(lengths, None, num_ranks, per_update=4)
    for sampler in after:
        sampler.set_epoch(1)
        sampler.load_state_dict(before[0].state_dict())
        sampler.set_position(len(steps[0]))
    own, accumulation = [list(sampler) for sampler in after], 4 // num_ranks
    again = [
        {index for batches in own for batch in batches[at : at + accumulation] for index in batch}
        for at in range(0, len(own[0]), accumulation)
    ]
    assert again == steps[1:]


def test_the_places_that_workers_seed_by_do_not_depend_on_the_process() -> None:
    samplers = shards(ragged(150), None, 2)
    own = epoch_of(samplers)
    placed = sorted((batch.position, len(batch)) for batch in itertools.chain(*own))  # type: ignore[attr-defined]
    assert [place for place, _ in placed] == [0, *itertools.accumulate(size for _, size in placed)][:-1]


def test_single_samples_that_do_not_go_round_leave_a_process_without_at_the_end() -> None:
    samplers = shards(np.full(7, 90), None, 3)
    own = epoch_of(samplers)
    assert [len(batches) for batches in own] == [3, 2, 2]
    assert len(samplers[2]) == 3


@pytest.mark.parametrize(
    ("budget", "multiple", "message"),
    [
        (TokenBudget(39), 1, "per_device_train_tokens=39: sample 2 of the training data has 40 tokens, more than any"),
        (TokenBudget(80, 30), 1, "packing_length=30: sample 2 .* Raise packing_length, or truncate the samples"),
        (TokenBudget(43), 16, "has 40 tokens, padded to a multiple of 16, more than any other. Raise per_device"),
    ],
)
def test_a_sample_that_is_too_long_is_named(budget: TokenBudget, multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatches(np.asarray([3, 5, 40, 9]), budget, 0, 1, multiple=multiple)


def test_a_stream_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"per_device_train_tokens=9 is planned from .* a stream\. Use per_device_train"
    ):
        make_train_sampler(iter([]), strategy="tokens", batch_size=1, accumulation=1, seed=0, budget=TokenBudget(9))
