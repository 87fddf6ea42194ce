"""The plan: every derived number, in tables; what halving keeps; what is told."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.args.plan import Plan, UnsupportedOption, resolve
from paceline.args.training import TrainingArguments


def plan_of(micro_batches: int | None = 100, world_size: int = 1, **options: Any) -> Plan:
    return resolve(TrainingArguments("x", **options), world_size=world_size, micro_batches_per_epoch=micro_batches)


# options, micro-batches per epoch -> updates per epoch, max_steps, num_epochs, num_train_epochs
DURATIONS: list[tuple[dict[str, Any], int | None, tuple[int | None, int, int, float]]] = [
    ({}, 100, (100, 300, 3, 3.0)),
    ({"gradient_accumulation_steps": 8}, 100, (13, 39, 3, 3.0)),
    ({"gradient_accumulation_steps": 8}, 3, (1, 3, 3, 3.0)),
    ({"num_train_epochs": 0.5}, 101, (101, 51, 1, 0.5)),
    ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 4}, 10, (3, 5, 2, 1.5)),
    ({"num_train_epochs": 0}, 10, (10, 0, 0, 0.0)),
    ({"max_steps": 25}, 10, (10, 25, 3, 2.5)),
    ({"max_steps": 20}, 10, (10, 20, 2, 2.0)),
    ({"max_steps": 5, "num_train_epochs": 7}, 10, (10, 5, 1, 0.5)),
    ({"max_steps": 25}, None, (None, 25, sys.maxsize, float(sys.maxsize))),
    ({"max_steps": -7}, 10, (10, 30, 3, 3.0)),
]


@pytest.mark.parametrize(("options", "micro_batches", "expected"), DURATIONS)
def test_duration(
    options: dict[str, Any], micro_batches: int | None, expected: tuple[int | None, int, int, float]
) -> None:
    plan = plan_of(micro_batches, **options)
    assert (plan.updates_per_epoch, plan.max_steps, plan.num_epochs, plan.num_train_epochs) == expected
    assert plan.micro_batches_per_epoch == micro_batches


# options, updates of the run -> logging_steps, eval_steps, save_steps
INTERVALS: list[tuple[dict[str, Any], int, tuple[int, int, int]]] = [
    ({}, 100, (500, 500, 500)),
    ({"logging_steps": 20}, 100, (20, 20, 500)),
    ({"logging_steps": 20, "eval_steps": 30, "save_steps": 40}, 100, (20, 30, 40)),
    ({"logging_steps": 0.1, "eval_steps": 0.25, "save_steps": 0.5}, 101, (11, 26, 51)),
    ({"logging_steps": 0.001, "save_steps": 0.001}, 100, (1, 1, 1)),
    ({"logging_steps": 0.1}, 50, (5, 5, 500)),
    ({"logging_steps": 1.0, "save_steps": 2.0}, 50, (1, 1, 2)),
    ({"logging_strategy": "no", "logging_steps": 0}, 50, (1, 1, 500)),
]


@pytest.mark.parametrize(("options", "updates", "expected"), INTERVALS)
def test_intervals(options: dict[str, Any], updates: int, expected: tuple[int, int, int]) -> None:
    plan = plan_of(None, max_steps=updates, **options)
    assert (plan.logging_steps, plan.eval_steps, plan.save_steps) == expected


def test_rounded_shares_still_fall_on_evaluations() -> None:
    options: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    plan = plan_of(25, num_train_epochs=1, eval_steps=0.1, save_steps=0.2, **options)
    assert (plan.eval_steps, plan.save_steps) == (3, 6)  # Alone, 0.2 of 25 would be 5: between two evaluations.
    assert any("each coincides with an evaluation" in note for note in plan.notes)


@given(st.integers(1, 3000), st.integers(1, 9), st.integers(1, 9))
def test_best_model_always_has_its_checkpoint(updates: int, parts: int, multiple: int) -> None:
    eval_share = round(1 / (parts * 10), 3)
    save_share = round(eval_share * multiple, 3)
    plan = plan_of(
        updates,
        num_train_epochs=1,
        load_best_model_at_end=True,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=eval_share,
        save_steps=save_share,
    )
    assert plan.save_steps % plan.eval_steps == 0


@pytest.mark.parametrize(
    ("warmup", "updates", "expected"),
    [(0, 100, 0), (10, 100, 10), (0.1, 100, 10), (0.101, 100, 11), (1, 100, 1), (1.0, 100, 1), (500, 100, 500)],
)
def test_warmup(warmup: float, updates: int, expected: int) -> None:
    assert plan_of(None, max_steps=updates, warmup_steps=warmup).warmup_steps == expected


def test_batches() -> None:
    plan = plan_of(
        100, world_size=4, per_device_train_batch_size=3, gradient_accumulation_steps=5, per_device_eval_batch_size=7
    )
    assert (plan.micro_batch_size, plan.accumulation_steps, plan.world_size, plan.eval_batch_size) == (3, 5, 4, 7)
    assert plan.global_batch_size == 60


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"precision": "full", "max_grad_norm": 1.0, "seed": 42, "data_seed": 42}),
    ({"bf16": True}, {"precision": "bf16"}),
    ({"fp16": True}, {"precision": "fp16"}),
    ({"seed": 1, "data_seed": 0}, {"seed": 1, "data_seed": 0}),
    ({"max_grad_norm": 0}, {"max_grad_norm": 0}),
    ({}, {"metric_for_best_model": None, "greater_is_better": None}),
    (
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"metric_for_best_model": "loss", "greater_is_better": False, "eval_strategy": "epoch"},
    ),
    (
        {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "f1"},
        {"metric_for_best_model": "f1", "greater_is_better": True, "save_strategy": "best"},
    ),
    (
        {"eval_on_start": True, "auto_find_batch_size": True},
        {"eval_on_start": True, "auto_find_batch_size": True},
    ),
    ({"average_tokens_across_devices": False}, {"average_tokens_across_devices": False}),
]


@pytest.mark.parametrize(("options", "expected"), FIELDS)
def test_fields(options: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = plan_of(**options)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_arguments_are_read_as_they_are_now_and_never_changed() -> None:
    args = TrainingArguments("x", eval_strategy="steps")
    before = args.to_dict()
    assert resolve(args, micro_batches_per_epoch=10).max_steps == 30
    assert args.to_dict() == before
    args.num_train_epochs = 1
    assert resolve(args, micro_batches_per_epoch=10).max_steps == 10
    args.deepspeed = {"amp": {"enabled": True}}
    with pytest.raises(UnsupportedOption):
        resolve(args, micro_batches_per_epoch=10)


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps=-1 is not possible here: the training data has no length"):
        plan_of(None)
    with pytest.raises(ValueError, match=r"gives no batch.*dataloader_drop_last=True"):
        plan_of(0, dataloader_drop_last=True)


@given(st.integers(1, 64), st.integers(1, 16))
def test_halving_keeps_every_sample_of_an_update(size: int, accumulation: int) -> None:
    plan = plan_of(100, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    half = plan
    while half.micro_batch_size > 1:
        smaller = half.halved()
        assert 2 * (smaller.micro_batch_size - 1) < half.micro_batch_size <= 2 * smaller.micro_batch_size
        assert smaller.accumulation_steps == 2 * half.accumulation_steps
        assert smaller.global_batch_size == plan.global_batch_size
        assert len(smaller.notes) == len(half.notes) + 1
        half = smaller
    assert (half.max_steps, half.updates_per_epoch) == (plan.max_steps, plan.updates_per_epoch)
    with pytest.raises(ValueError, match="cannot be halved"):
        half.halved()


NOTES: list[tuple[dict[str, Any], int | None, str]] = [
    ({"gradient_accumulation_steps": 8}, 100, "The last optimizer step of each epoch takes 4 of 8 micro-batches"),
    ({"max_steps": 25}, 10, "max_steps=25 decides the length of the run, 2.50 epochs"),
    ({"logging_steps": 0.1}, 100, "logging_steps=0.1 of 300 steps: every 30."),
    ({}, 10, "logging_steps=500 is more than the 30 steps of the run"),
    ({"warmup_steps": 0.5}, 10, "warmup_steps=0.5 of 30 steps: 15."),
    ({"warmup_steps": 100}, 10, "still rising when the run ends"),
    ({"num_train_epochs": 0}, 10, "no optimizer step is run"),
    ({"eval_strategy": "epoch", "eval_delay": 5}, 10, "eval_delay=5 is more than the 3 epochs of the run"),
    ({"eval_strategy": "steps", "eval_delay": 31}, 10, "eval_delay=31 is more than the 30 steps of the run"),
    (
        {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_delay": 5, "load_best_model_at_end": True},
        10,
        "load_best_model_at_end then keeps the last weights",
    ),
]


@pytest.mark.parametrize(("options", "micro_batches", "note"), NOTES)
def test_notes(options: dict[str, Any], micro_batches: int | None, note: str) -> None:
    assert any(note in line for line in plan_of(micro_batches, **options).notes)


def test_nothing_to_tell_of_a_plain_run() -> None:
    assert plan_of(1000).notes == ()
    assert plan_of(1000, eval_strategy="epoch", eval_delay=3).notes == ()
    assert plan_of(1000, eval_strategy="steps", eval_delay=3000).notes == ()


def test_frozen_and_plain() -> None:
    plan = plan_of(None, max_steps=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_steps = 5  # type: ignore[misc]
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["max_steps"] == 10
    assert {type(getattr(plan, f"{kind}_strategy")) for kind in ("logging", "eval", "save")} == {str}
    assert set(values) == {item.name for item in dataclasses.fields(Plan)}
    assert not any(isinstance(item, float) and math.isnan(item) for item in values.values())


def test_description() -> None:
    args = TrainingArguments("x", eval_strategy="epoch", gradient_accumulation_steps=2, data_seed=7, max_grad_norm=0)
    text = resolve(args, world_size=2, micro_batches_per_epoch=100, samples_per_epoch=1600).describe()
    for part in (
        "150 (3 epochs, 1,600 samples each), 50 per epoch",
        "32 per step = 8 x 2 micro-batches x 2 processes",
        "gradients not clipped, seed 42, data seed 7",
        "log        every 500 steps\n",
        "save       every 500 steps and after the last",
        "at each end of an epoch",
    ):
        assert part in text
    assert "unknown length" in plan_of(None, max_steps=5).describe()
    assert "best yet" in plan_of(save_strategy="best", eval_strategy="epoch", metric_for_best_model="loss").describe()
    assert "never" in plan_of().describe()


@pytest.mark.parametrize(
    ("setting", "on_several"),
    [
        ({"even_batches": False}, True),
        ({"non_blocking": True}, True),
        ({"split_batches": True}, True),
        ({"dispatch_batches": True}, True),
        ({"gradient_accumulation_kwargs": {"sync_each_batch": True}}, False),
    ],
)
def test_settings_of_accelerate_that_change_nothing_are_told(setting: dict[str, Any], on_several: bool) -> None:
    name, value = next(iter(setting.get("gradient_accumulation_kwargs", setting).items()))
    assert any(f"{name}={value} changes nothing here" in note for note in plan_of(accelerator_config=setting).notes)
    if on_several:
        plan_of(world_size=2, accelerator_config=setting)
    else:
        with pytest.raises(UnsupportedOption, match=rf"{name}': True.* with 2 processes: .*leave it out"):
            plan_of(world_size=2, accelerator_config=setting)


def test_batches_that_are_split_over_processes() -> None:
    plan = plan_of(
        world_size=3, accelerator_config={"split_batches": True}, gradient_accumulation_steps=2, save_strategy="no"
    )
    assert (plan.global_batch_size, plan.micro_batch_size, plan.eval_batch_size) == (16, 3, 3)
    assert "split_batches=True: 8 samples in a micro-batch of all processes, at most 3 on each." in plan.notes
    with pytest.raises(ValueError, match=r"per_device_train_batch_size=8 .*over 16 processes.* to 16 or more"):
        plan_of(world_size=16, accelerator_config={"split_batches": True})
    assert "16 per step = at most 3 x 2 micro-batches x 3 processes" in plan.describe()
    split = {"accelerator_config": {"split_batches": True}, "per_device_eval_batch_size": 2, "world_size": 4}
    with pytest.raises(ValueError, match=r"per_device_eval_batch_size=2 .*over 4 processes"):
        plan_of(**split, eval_strategy="steps")
    plan_of(**split)
    rebalanced = {"train_sampling_strategy": "batch_rebalance", "dataloader_drop_last": True}
    with pytest.raises(UnsupportedOption, match=r"batch_rebalance.*dispatch_batches.* on 2 processes"):
        plan_of(world_size=2, accelerator_config={"dispatch_batches": True}, **rebalanced)


def test_the_micro_batches_of_an_update_in_accelerates_settings() -> None:
    args = TrainingArguments("x", accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})
    assert args.gradient_accumulation_steps == 4
    assert resolve(args, micro_batches_per_epoch=8).accumulation_steps == 4
    assert TrainingArguments(**args.to_dict()).gradient_accumulation_steps == 4
    args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 and num_steps=4"):
        resolve(args, micro_batches_per_epoch=8)
