"""The options that select XLA devices, and the settings that contradict them."""

from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.plan import resolve
from paceline.args.sharding import read_sharding

BOTH = {"xla": True, "xla_fsdp_v2": True}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_config": {"xla": True}, "fsdp": True}, r"first FSDP.*set fsdp_config=\{'xla': True, 'xla_fsdp_v2': True\}"),
    ({"fsdp_config": {"xla_fsdp_v2": True}, "fsdp": True}, r"set fsdp_config\['xla'\]=True too"),
    ({"fsdp_config": {"xla_fsdp_grad_ckpt": True}, "fsdp": True}, r"set fsdp_config\['xla'\]=True too"),
    ({"fsdp_config": {**BOTH, "xla_fsdp_settings": {"a": 1}}, "fsdp": True}, "xla_fsdp_settings"),
    ({"fsdp_config": {**BOTH, "reshard_after_forward": False}, "fsdp": True}, "reshard_after_forward.*leave it out"),
    ({"fsdp_config": BOTH, "fsdp": "full_shard offload"}, "fsdp='offload' is not supported on XLA"),
    ({"fsdp_config": BOTH}, "set fsdp=True too"),
    ({"fsdp_config": BOTH, "fsdp": True, "use_cpu": True}, "PJRT_DEVICE=CPU"),
    ({"parallel": "xla", "use_cpu": True}, "PJRT_DEVICE=CPU"),
    ({"parallel": "xla", "fsdp": True}, "set fsdp_config="),
    ({"fsdp_config": BOTH, "fsdp": True, "tpu_num_cores": 1}, "tpu_num_cores=1 and fsdp"),
    ({"parallel": "xla", "tpu_num_cores": 0}, "tpu_num_cores=0 is invalid"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_contradictions_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingArguments("x", **options)


@pytest.mark.parametrize("options", [{"parallel": "xla"}, {"fsdp": True, "fsdp_config": {"fsdp_xla": True, **BOTH}}])
def test_the_plan_says_xla_and_is_of_one_process(options: dict[str, Any]) -> None:
    plan = resolve(TrainingArguments("x", **options), micro_batches_per_epoch=4)
    assert plan.parallel == "xla"
    assert "XLA devices" in plan.describe()
    assert not any("parallel" in note for note in plan.notes)


def test_units_are_chosen_as_for_processes() -> None:
    sharding = read_sharding(True, {**BOTH, "xla_fsdp_grad_ckpt": True, "transformer_layer_cls_to_wrap": "Block"})
    assert sharding.is_xla
    assert sharding.checkpoints_units
    assert sharding.layer_classes == ("Block",)
