"""`fsdp` and `fsdp_config`: values read as what they say, and nothing accepted that would be left undone."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.args.sharding import Sharding, is_xla_asked, read_sharding

# what `accelerate config` writes for either version of FSDP
WRITTEN: dict[str, Any] = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_use_orig_params": True,
    "fsdp_version": 2,
}


def test_a_file_that_accelerate_wrote_is_read() -> None:
    assert read_sharding(True, WRITTEN) == Sharding(layer_classes=("Block",), from_first=True)


@pytest.mark.parametrize("name", ["cpu_offload", "offload_params"])
@pytest.mark.parametrize(("value", "is_on"), [("false", False), ("False", False), ("true", True), (1, True), (None, 0)])
def test_off_in_words_is_off(name: str, value: Any, is_on: bool) -> None:
    assert read_sharding(True, {name: value}).offload == is_on


@pytest.mark.parametrize(("name", "value"), [
    ("use_orig_params", True), ("limit_all_gathers", "true"), ("forward_prefetch", "false"),
    ("backward_prefetch", "backward_pre"), ("activation_checkpointing", False), ("mixed_precision_policy", None),
    ("ignored_modules", None), ("xla_fsdp_settings", {}), ("forward_prefetch", 0),
])  # fmt: skip
def test_what_happens_anyway_may_be_said(name: str, value: Any) -> None:
    assert read_sharding(True, {name: value}) == Sharding()


@pytest.mark.parametrize(("name", "value"), [
    ("use_orig_params", False), ("limit_all_gathers", "false"), ("forward_prefetch", True),
    ("backward_prefetch", "BACKWARD_POST"), ("activation_checkpointing", "true"), ("ignored_modules", "head"),
    ("activation_checkpointing_offload", True), ("sharding_strategy", "NO_SHARD"),
])  # fmt: skip
def test_what_cannot_be_told_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedOption, match=rf"\['{name}'\]={value!r} is not supported: .*leave"):
        read_sharding(True, {name: value})


@pytest.mark.parametrize(("config", "message"), [
    ({"auto_wrap_policy": "nonsense"}, "expected one of TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "needs fsdp_config\\['min_num_params'\\]"),
    ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 5}, "contradict each other"),
    ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "contradict each other"),
    ({"offload_params": "none"}, "expected True or False"),
    ({"xla": "perhaps"}, "expected True or False"),
    ({"sharding_strategy": "HALF"}, "expected one of FULL_SHARD"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "contradict each other: keep one"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_said(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_sharding(True, config)


def test_a_word_and_a_strategy_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"fsdp='full_shard' and fsdp_config\['sharding_strategy'\]='SHARD_GRAD_OP'"):
        read_sharding("full_shard", {"sharding_strategy": "SHARD_GRAD_OP"})


@pytest.mark.parametrize(("value", "reshard", "replicas"), [
    ("FULL_SHARD", True, 1), (2, False, 1), ("HYBRID_SHARD", True, 0), ("hybrid_shard_zero2", False, 0),
])  # fmt: skip
def test_the_strategies_of_fsdp_1(value: Any, reshard: bool, replicas: int) -> None:
    sharding = read_sharding(True, {"sharding_strategy": value})
    assert (sharding.reshard, sharding.replicas) == (reshard, replicas)


def test_units_by_name_and_by_size() -> None:
    assert read_sharding(True, {"transformer_layer_cls_to_wrap": "A, B"}).layer_classes == ("A", "B")
    assert read_sharding(True, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 9}).least_parameters == 9
    assert read_sharding(True, {"auto_wrap_policy": "NO_WRAP"}).is_whole


def test_xla_that_is_off_in_words_is_off() -> None:
    assert not is_xla_asked(None, True, {"xla": "false"})
    assert not read_sharding(True, {"xla": "false", "xla_fsdp_grad_ckpt": "false"}).is_xla


def test_shards_beside_deepspeed_are_refused_for_one_reason(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedOption, match="its shards are consolidated"):
        TrainingArguments(str(tmp_path), deepspeed={"zero_optimization": {"stage": 2}}, checkpoint_format="sharded")
