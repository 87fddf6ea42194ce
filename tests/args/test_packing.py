"""Options that packing is refused together with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.args.adopt import adopt
from paceline.args.errors import UnsupportedOption
from paceline.args.packing import packing_of
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


@pytest.mark.parametrize("axis", ["cp", "sp", "tp", "pp", "dp_shard"])
@pytest.mark.parametrize("packing", ["pack", "flatten"])
def test_meshes_that_divide_rows_or_the_model_are_refused(axis: str, packing: str) -> None:
    args = TrainingArguments("x", packing=packing, parallel={axis: 2}, use_cpu=True)
    with pytest.raises(UnsupportedOption, match=f"packing='{packing}' with parallel={{'{axis}': 2}} is not supported"):
        resolve(args, world_size=2, micro_batches_per_epoch=8)


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
        assert type(args).__name__ == "TrainingArguments"
