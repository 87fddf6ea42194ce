"""Options that packing is refused together with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.args.adopt import adopt
from paceline.args.errors import UnsupportedOption
from paceline.args.packing import TokenBudget, budget_of, packing_of
from paceline.args.plan import resolve
from paceline.args.training import TrainingArguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "pack", "use_cache": True}, "a cache of keys belongs to one text"),
        ({"packing": "flatten", "auto_find_batch_size": True}, "one row cannot be split"),
        ({"packing": "pack", "deepspeed": {"zero_optimization": {"stage": 1}}}, "packing='pack' with deepspeed"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        TrainingArguments("x", **options)


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize("packing", ["pack", "flatten"])
def test_meshes_that_divide_matrices_or_layers_are_refused(axis: str, packing: str) -> None:
    args = TrainingArguments("x", packing=packing, parallel={axis: 2}, use_cpu=True)
    with pytest.raises(UnsupportedOption, match=f"packing='{packing}' with parallel={{'{axis}': 2}} is not supported"):
        resolve(args, world_size=2, micro_batches_per_epoch=8)


@pytest.mark.parametrize("axis", ["cp", "sp", "dp_shard", "dp_replicate"])
def test_meshes_of_data_and_sequences_take_packed_rows(axis: str) -> None:
    args = TrainingArguments("x", packing="pack", parallel={axis: 2}, use_cpu=True)
    assert getattr(resolve(args, world_size=2, micro_batches_per_epoch=8).mesh, axis) == 2


def test_grouping_is_an_order_of_samples_and_goes_with_any_mesh() -> None:
    args = TrainingArguments("x", packing="group", parallel={"tp": 2}, use_cpu=True)
    assert resolve(args, world_size=2, micro_batches_per_epoch=8).mesh.tp == 2


def test_a_field_of_a_subclass_means_what_its_class_says() -> None:
    @dataclasses.dataclass
    class Config(TrainingArguments):
        packing: bool = False  # as TRL's SFTConfig

    for value in (False, True):
        args = Config("out", packing=value)
        assert args.packing is value
        assert packing_of(args) is None
    assert packing_of(TrainingArguments("out", packing="pack")) == "pack"


def test_a_field_of_a_class_for_transformers_means_what_that_says() -> None:
    transformers = pytest.importorskip("transformers")

    @dataclasses.dataclass
    class Config(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
        packing: bool = False

    for value in (False, True):
        args = adopt(Config("out", use_cpu=True, packing=value))
        assert isinstance(args, TrainingArguments)
        assert args.packing is value
        assert packing_of(args) is None
        assert type(args).__name__ == "Config"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"per_device_train_batch_size": 4}, ValueError, "two sizes of the same micro-batches"),
        ({"train_sampling_strategy": "sequential"}, ValueError, "two orders of the same samples"),
        ({"packing": "pack", "packing_length": 128}, ValueError, "packing_length=128 is above per_device_train_tok"),
        ({"dataloader_drop_last": True}, ValueError, "Leave dataloader_drop_last out"),
        ({"auto_find_batch_size": True}, UnsupportedOption, "lower per_device_train_tokens"),
        ({"accelerator_config": {"split_batches": True}}, UnsupportedOption, "leave split_batches out"),
        ({"accelerator_config": {"dispatch_batches": True}}, UnsupportedOption, "leave dispatch_batches out"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, UnsupportedOption, "deepspeed with per_device_train_tok"),
    ],
)
def test_a_token_budget_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingArguments("x", per_device_train_tokens=64, use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, None),
        ({"per_device_train_tokens": 64}, TokenBudget(64)),
        ({"per_device_train_tokens": 64, "packing": "group"}, TokenBudget(64)),
        ({"per_device_train_tokens": 64, "packing": "flatten"}, TokenBudget(64, 64)),
        ({"per_device_train_tokens": 64, "packing": "pack"}, TokenBudget(64, 64)),
        ({"per_device_train_tokens": 64, "packing": "pack", "packing_length": 16}, TokenBudget(64, 16)),
    ],
)
def test_the_budget_and_its_rows(options: dict[str, Any], budget: TokenBudget | None) -> None:
    assert budget_of(TrainingArguments("x", **options)) == budget


def test_the_plan_counts_samples_by_their_mean() -> None:
    args = TrainingArguments("x", per_device_train_tokens=64, gradient_accumulation_steps=3, use_cpu=True)
    plan = resolve(args, world_size=2, micro_batches_per_epoch=10, samples_per_epoch=141)
    assert (plan.updates_per_epoch, plan.update_size, plan.micro_batch_size, plan.global_batch_size) == (4, 6, 7, 42)
    assert "about 42 per step = at most 64 tokens x 3 micro-batches x 2 processes" in plan.describe()
