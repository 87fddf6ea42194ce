"""Warm-ups of the batch size and the sequence length: reading the options, their stages, and the number of steps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import TrainingArguments, UnsupportedOption
from paceline.args.parser import HfArgumentParser
from paceline.args.plan import resolve
from paceline.args.warmups import BatchWarmup, passes_of, resolve_length_warmup, rising_stages


def arguments(**options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return TrainingArguments("x", **{**defaults, **options})


def test_a_line_is_rounded_down_to_whole_values() -> None:
    stages = rising_stages(1, 4, 10)
    warmup = BatchWarmup(*zip(*stages, strict=True), unit=2)
    assert [warmup.count_at(step) for step in range(12)] == [1 + 3 * step // 10 for step in range(10)] + [4, 4]
    assert warmup.size_at(11) == 8
    assert rising_stages(2, 2, 5) == [(0, 2)]
    assert rising_stages(1, 6, 2) == [(0, 1), (1, 3), (2, 6)]


@pytest.mark.parametrize("micro_batches", [1, 3, 7, 25, 64])
@pytest.mark.parametrize("epochs", [1, 2, 3.5])
def test_the_number_of_steps_is_that_of_drawing_the_windows(micro_batches: int, epochs: float) -> None:
    warmup = BatchWarmup((0, 3, 4, 9), (1, 2, 3, 5), unit=1)
    step, ends = 0, []
    for left in passes_of(epochs, micro_batches):
        while left > 0:
            left -= warmup.count_at(step)
            step += 1
        ends.append(step)
    assert warmup.step_after(0, passes_of(epochs, micro_batches)) == step
    assert warmup.epochs_in(ends[1 if epochs > 1 else 0], micro_batches) == (2 if epochs > 1 else 1)
    assert warmup.total(11) == 3 + 2 + 15 + 10


def test_what_is_left_of_a_run() -> None:
    assert list(passes_of(2.5, 10)) == [10, 10, 5]
    assert list(passes_of(2.5, 10, epoch=1, left=4)) == [4, 5]
    assert list(passes_of(2.5, 10, epoch=2, left=7)) == [2]
    assert list(passes_of(2, 10, epoch=2)) == []


def test_the_plan_counts_the_steps_of_the_warmup() -> None:
    args = arguments(batch_size_warmup=[[0, 2], [4, 4], [6, 8]], num_train_epochs=2)
    plan = resolve(args, micro_batches_per_epoch=25)
    assert plan.max_steps == (4 + 2 + 5) + 7  # 4 x 1 + 2 x 2 + 17 of 25 micro-batches in steps of 4; then 25
    assert plan.updates_per_epoch == 7
    assert plan.num_micro_batches(7) == 4 + 4 + 4
    assert any("2 samples per step at first, 8 after 6 steps" in note for note in plan.notes)
    assert resolve(arguments(batch_size_warmup={"start": 2, "steps": 3}, max_steps=5), micro_batches_per_epoch=None)


def test_lengths() -> None:
    def lengths(value: Any, steps: range) -> list[int | None]:
        warmup = resolve_length_warmup(arguments(sequence_length_warmup=value))
        assert warmup is not None
        return [warmup.length_at(step) for step in steps]

    assert lengths([[0, 3], [2, None]], range(4)) == [3, 3, None, None]
    assert lengths({"start": 10, "end": 32, "steps": 4}, range(6)) == [10, 10, 16, 24, None, None]
    assert lengths({"start": 1, "end": 3, "steps": 4, "multiple": 1}, range(5)) == [1, 1, 2, 2, None]


def test_the_options_of_a_command_line() -> None:
    words = {
        "output_dir": "x",
        "gradient_accumulation_steps": "4",
        "batch_size_warmup": '{"start": 8, "steps": 10}',
        "sequence_length_warmup": "[[0, 16], [5, null]]",
    }
    line = [word for name, value in words.items() for word in (f"--{name}", value)]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert args.batch_size_warmup == {"start": 8, "steps": 10}
    assert args.sequence_length_warmup == [[0, 16], [5, None]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size_warmup": {"start": 2}}, "it needs start, steps"),
        ({"batch_size_warmup": {"start": 2, "step": 3}}, "did you mean 'steps'"),
        ({"batch_size_warmup": {"start": 0, "steps": 3}}, "at least 1"),
        ({"batch_size_warmup": [[1, 2], [3, 8]]}, "from step 0 on"),
        ({"batch_size_warmup": [[0, 2], [0, 8]]}, "from step 0 on"),
        ({"batch_size_warmup": [[0, None]]}, "from step 0 on"),
        ({"batch_size_warmup": 8}, "expected a dict"),
        ({"batch_size_warmup": "{"}, "not valid JSON"),
        ({"sequence_length_warmup": {"start": 8, "end": 4, "steps": 3}}, "end is below start"),
        ({"batch_size_warmup": {"start": 2, "steps": 3}, "gradient_accumulation_steps": 1}, "set it to 2 or more"),
    ],
)
def test_wrong_values(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        arguments(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_tokens": 64, "per_device_train_batch_size": 8},
        {"train_sampling_strategy": "batch_rebalance"},
        {"nonfinite_policy": "rollback"},
        {"packing": "flatten", "sequence_length_warmup": [[0, 4]], "batch_size_warmup": None},
        {"packing": "pack", "sequence_length_warmup": [[0, 4]], "batch_size_warmup": None},
    ],
)
def test_refused_beside_other_options(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match="_warmup"):
        arguments(**{"batch_size_warmup": {"start": 2, "steps": 3}, **options})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"start": 3, "steps": 4}, "a multiple of 2"),
        ({"start": 16, "steps": 4}, "up to 8"),
        ([[0, 2], [4, 4]], "end the warm-up there"),
    ],
)
def test_sizes_that_micro_batches_cannot_make(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(arguments(batch_size_warmup=value), micro_batches_per_epoch=10)
    with pytest.raises(ValueError, match="batch_size_warmup"):  # 2 samples are half a micro-batch of two processes
        resolve(arguments(batch_size_warmup={"start": 2, "steps": 3}), world_size=2, micro_batches_per_epoch=10)
