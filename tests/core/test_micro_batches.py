"""The micro-batch size after an out-of-memory: when it grows again, and what a checkpoint keeps of it."""

import itertools
import json
import logging
from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.plan import resolve
from paceline.core.micro_batches import FIRST_WAIT, MicroBatchSize

ERROR = MemoryError("no room")


def sizes_of(batch: int = 8, **options: Any) -> MicroBatchSize:
    defaults: dict[str, Any] = {"per_device_train_batch_size": batch, "auto_find_batch_size": True}
    args = TrainingArguments("unused", use_cpu=True, **{**defaults, **options})
    return MicroBatchSize(resolve(args, micro_batches_per_epoch=10))


def run(sizes: MicroBatchSize, room: int, num_steps: int) -> list[int]:
    """Returns the size of each attempt of some steps with memory for `room` samples."""
    tried = []
    for _ in range(num_steps):
        tried.append(sizes.plan.micro_batch_size)
        while sizes.plan.micro_batch_size > room:
            sizes.shrink(ERROR)
            tried.append(sizes.plan.micro_batch_size)
        if sizes.is_watched:
            sizes.count_step()
    return tried


def gaps(tried: list[int], size: int) -> list[int]:
    """Returns the numbers of attempts between those of a size."""
    places = [index for index, each in enumerate(tried) if each == size]
    return [later - earlier for earlier, later in itertools.pairwise(places)]


def test_it_backs_off_while_memory_stays_short() -> None:
    tried = run(sizes_of(), room=4, num_steps=100 + 200 + 400 + 50)
    assert gaps(tried, 8) == [FIRST_WAIT + 1, 2 * FIRST_WAIT + 1, 4 * FIRST_WAIT + 1]
    assert set(tried) == {8, 4}


def test_it_grows_to_the_original_size_and_no_further(caplog: pytest.LogCaptureFixture) -> None:
    sizes = sizes_of(9)
    run(sizes, room=2, num_steps=10)
    assert sizes.plan.micro_batch_size == 2
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paceline"):
        tried = run(sizes, room=100, num_steps=1000)
    assert sorted(set(tried)) == [2, 3, 5, 9]
    assert sizes.plan == sizes.original
    assert len(caplog.messages) == 3
    assert "Trying 3 samples per micro-batch after 100 optimizer steps with 2; the global" in caplog.messages[0]


def test_the_wait_is_the_first_again_after_a_size_that_lasted() -> None:
    sizes = sizes_of()
    run(sizes, room=4, num_steps=2 * FIRST_WAIT + FIRST_WAIT // 2)
    assert sizes.wait == 2 * FIRST_WAIT
    run(sizes, room=8, num_steps=4 * FIRST_WAIT)
    assert sizes.plan.micro_batch_size == 8
    run(sizes, room=4, num_steps=1)
    assert sizes.wait == FIRST_WAIT


@pytest.mark.parametrize("stop", [1, 99, 100, 101, 102, 250, 301])
def test_a_restored_size_goes_on_alike(stop: int) -> None:
    whole, first, second = sizes_of(), sizes_of(), sizes_of()
    expected = run(whole, room=3, num_steps=stop), run(whole, room=3, num_steps=700)
    assert run(first, room=3, num_steps=stop) == expected[0]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, room=3, num_steps=700) == expected[1]


def test_a_run_without_a_lack_of_memory_keeps_nothing() -> None:
    assert sizes_of().state_dict() == {}


def test_other_arguments_on_resume() -> None:
    state = {"size": 3, "wait": 100, "good_steps": 7, "has_grown": False}
    for batch, expected in ((16, 4), (8, 4), (3, 3), (2, 2)):
        sizes = sizes_of(batch)
        sizes.load_state_dict(state)
        assert sizes.plan.micro_batch_size == expected
    sizes = sizes_of(8, auto_find_batch_size=False)
    sizes.load_state_dict(state)
    assert sizes.plan.micro_batch_size == 8


@pytest.mark.parametrize("change", [{"size": 0}, {"size": "2"}, {"wait": 0}, {"good_steps": -1}, {"wait": None}])
def test_a_damaged_state_is_an_error(change: dict[str, Any]) -> None:
    state = {"size": 3, "wait": 100, "good_steps": 7, "has_grown": False, **change}
    with pytest.raises(ValueError, match="micro-batch size cannot be"):
        sizes_of().load_state_dict(state)


def test_one_sample_is_the_least() -> None:
    sizes = sizes_of(1)
    with pytest.raises(MemoryError, match=r"one sample.*activation_checkpointing"):
        sizes.shrink(ERROR)
