"""`fsdp_config["mixed_precision_policy"]`: every form that accelerate takes, and what it contradicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from paceline import TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.args.plan import resolve
from paceline.args.shard_precision import ShardPrecision, read_policy
from paceline.args.sharding import read_sharding

BF16 = ShardPrecision("bfloat16", "bfloat16", "bfloat16")
WIDE = ShardPrecision("bfloat16", "float32")


@pytest.mark.parametrize(("value", "expected"), [
    ("bf16", BF16), ("torch.bfloat16", BF16), (torch.bfloat16, BF16),
    ("fp32", ShardPrecision("float32", "float32", "float32")),
    ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, WIDE),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": "float32"}, WIDE),
    (MixedPrecisionPolicy(torch.bfloat16, torch.float32), WIDE),
    (MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
     ShardPrecision("bfloat16", casts_inputs=False)),
    ("no", None), (None, None), ({}, None), (MixedPrecisionPolicy(), None), ({"cast_forward_inputs": False}, None),
])  # fmt: skip
def test_a_policy_is_read(value: Any, expected: ShardPrecision | None) -> None:
    assert read_policy(value) == expected
    assert read_sharding(True, {"fsdp_mixed_precision_policy": value}).precision == expected


@pytest.mark.parametrize(("value", "message"), [
    ("bf8", "'bf8' is invalid; expected one of bf16, fp16, fp32"),
    ({"params_dtype": "bf16"}, "has no 'params_dtype'; it takes param_dtype, reduce_dtype"),
    ({"param_dtype": torch.float64}, "float64 is invalid"),
    ({"param_dtype": "bf16", "cast_forward_inputs": "yes"}, "expected True or False for cast_forward_inputs"),
    (16, "expected 'bf16', 'fp16', 'fp32', a dict of"),
    ("fp8", "is not supported: fp8 is not a dtype for full weights"),
    ({"param_dtype": "bf16", "buffer_dtype": "bf16"}, "does not cast buffers; leave 'buffer_dtype' out"),
])  # fmt: skip
def test_what_is_no_policy_is_said(value: Any, message: str) -> None:
    with pytest.raises((ValueError, UnsupportedOption), match=message):
        read_policy(value)


def arguments(folder: Path, policy: Any, **options: Any) -> TrainingArguments:
    options = {"fsdp": True, "use_cpu": True, **options}
    return TrainingArguments(str(folder), fsdp_config={"mixed_precision_policy": policy}, **options)


@pytest.mark.parametrize(("policy", "options", "message"), [
    ("bf16", {"fp16": True}, r"\['mixed_precision_policy'\]='bf16' and fp16=True contradict"),
    ("fp16", {"bf16": True}, r"\['mixed_precision_policy'\]='fp16' and bf16=True contradict"),
    ("fp16", {}, "and fp16=False contradict each other: gradients underflow in fp16 without loss scaling"),
    ({"param_dtype": "bf16", "reduce_dtype": "fp16"}, {"bf16": True}, "without loss scaling"),
    ("bf16", {"bf16_full_eval": True}, "and bf16_full_eval=True contradict each other"),
    ("fp32", {"fp16_full_eval": True}, "and fp16_full_eval=True contradict each other"),
    ("bf16", {"fsdp": None, "parallel": "xla"}, "."),
])  # fmt: skip
def test_a_contradiction_names_both(tmp_path: Path, policy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UnsupportedOption), match=message):
        resolve(arguments(tmp_path, policy, **options), world_size=2, micro_batches_per_epoch=4)


@pytest.mark.parametrize(("policy", "options", "numbers"), [
    ("bf16", {}, "mixed_precision_policy (weights are gathered in bf16, gradients reduced in bf16, outputs returned"),
    ({"param_dtype": "bf16", "cast_forward_inputs": False}, {"bf16": True},
     "bf16 precision, mixed_precision_policy (weights are gathered in bf16, gradients reduced in bf16, inputs not"),
    ({"reduce_dtype": "bf16"}, {}, "mixed_precision_policy (gradients reduced in bf16)"),
    ("fp16", {"fp16": True}, "fp16 precision, mixed_precision_policy (weights are gathered in fp16"),
])  # fmt: skip
def test_the_plan_names_it(tmp_path: Path, policy: Any, options: dict[str, Any], numbers: str) -> None:
    plan = resolve(arguments(tmp_path, policy, **options), world_size=2, micro_batches_per_epoch=4)
    assert f"numbers    {numbers}" in plan.describe()


@pytest.mark.parametrize("size", [1, 2])
def test_a_mesh_without_shards_has_no_use_for_it(tmp_path: Path, size: int) -> None:
    parallel = {"dp_shard": -1, **({"tp": 2} if size == 2 else {})}
    with pytest.raises(ValueError, match=r"sets dtypes of shards, and parallel=.* shards nothing"):
        resolve(arguments(tmp_path, "bf16", parallel=parallel), world_size=size, micro_batches_per_epoch=4)


def test_shards_that_lie_over_parts_of_sequences_have_a_use_for_it(tmp_path: Path) -> None:
    for axis in ("cp", "sp"):
        args = arguments(tmp_path, "bf16", parallel={axis: 2})
        assert resolve(args, world_size=2, micro_batches_per_epoch=4).shard_precision


def test_one_process_is_told_that_it_is_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsdp needs several processes, and there is one"):
        resolve(arguments(tmp_path, "bf16", parallel="fsdp"), world_size=1, micro_batches_per_epoch=4)


def test_arguments_with_a_policy_of_torch_are_written_and_read(tmp_path: Path) -> None:
    args = arguments(tmp_path, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    written = json.loads(json.dumps(args.to_dict()))
    assert read_sharding(True, written["fsdp_config"]).precision == WIDE
