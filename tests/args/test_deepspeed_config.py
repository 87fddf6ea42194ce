"""DeepSpeed's config: filled from the arguments, never against them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.deepspeed_config import fill_config, finish_schedule, read_config
from paceline.args.errors import UnsupportedOption

AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


def arguments(config: Any, **options: Any) -> TrainingArguments:
    return TrainingArguments("x", deepspeed=config, **options)


def test_auto_is_filled_from_the_arguments() -> None:
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "bf16": True}
    args = arguments(AUTO, learning_rate=0.02, **options)
    filled = fill_config(args, world_size=2, hidden_size=100)
    config = filled.config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (3, 4)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (24, 0.5)
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["zero_optimization"] == {
        "stage": 3, "reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 9_000
    }  # fmt: skip
    assert filled.stage == 3
    assert filled.wants_adam
    assert filled.schedule is not None
    name, settings = filled.schedule
    assert name == "WarmupDecayLR"
    assert finish_schedule(settings, 50, 0) == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 1, "total_num_steps": 50
    }  # fmt: skip
    assert "optimizer" not in config
    assert "scheduler" not in config
    assert args.deepspeed == AUTO, "the arguments are as they were given"


def test_without_a_width_the_buckets_are_deepspeeds_own() -> None:
    assert fill_config(arguments(AUTO)).config["zero_optimization"] == {"stage": 3}


def test_forms_of_a_config(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}}
    text = json.dumps(config)
    path = tmp_path / "ds.json"
    path.write_text(text)
    for form in (config, text, str(path), base64.urlsafe_b64encode(text.encode()).decode()):
        assert read_config(arguments(form).deepspeed) == config


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **section}}


CONTRADICTIONS: list[tuple[Any, dict[str, Any], str]] = [
    ({"gradient_clipping": 0.3}, {}, r"'gradient_clipping'.=0.3 contradicts max_grad_norm=1.0: make them equal"),
    (
        {"train_micro_batch_size_per_gpu": 7},
        {},
        r"'train_micro_batch_size_per_gpu'.=7 contradicts per_device_train_batch_size=8",
    ),
    ({"gradient_accumulation_steps": 2}, {}, "=2 contradicts gradient_accumulation_steps=1"),
    ({"bf16": {"enabled": True}}, {}, r"\['bf16'\]\['enabled'\]=True contradicts bf16=False"),
    ({"fp16": {"enabled": True}}, {}, r"\['fp16'\]\['enabled'\]=True contradicts fp16=False"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, {}, "=0.1 contradicts learning_rate=5e-05"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.5, 0.9]}}}, {}, r"contradicts adam_beta1, adam_beta2=\["),
    ({"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, "'AdamW' contradicts optim='sgd'"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}}, {}, "=1 contradicts learning_rate=5e-05"),
    (
        {"scheduler": {"type": "WarmupLR"}},
        {"lr_scheduler_type": "cosine"},
        "'WarmupLR' and lr_scheduler_type='cosine' are two schedules",
    ),
    (
        {"scheduler": {"type": "WarmupLR"}},
        {"lr_scheduler_kwargs": {"a": 1}},
        "'WarmupLR' and lr_scheduler_kwargs={'a': 1} are two schedules",
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_lr": 0}}},
        {},
        "has no setting 'warmup_min_lr'; did you mean 'warmup_min_ratio'",
    ),
    (zero(), {"fsdp_config": {"min_num_params": 3}}, "deepspeed and fsdp_config={'min_num_params': 3} are two ways"),
    (zero(), {"parallel": "ddp"}, "deepspeed and parallel='ddp' are two ways"),
    (zero(), {"fsdp": True}, "deepspeed and fsdp=True are two ways"),
    (zero(stage=4), {}, r"\['stage'\]=4 is invalid: expected 0, 1, 2 or 3"),
    (zero(offload_param={"device": "cpu"}), {}, "'offload_param'. with stage=2 is invalid: use stage 3"),
    (zero(reduce_scatter="auto"), {}, r"\['reduce_scatter'\]='auto' is invalid"),
    ({"zero_optimisation": {"stage": 1}}, {}, "did you mean 'zero_optimization'"),
    ("nowhere.json", {}, "there is no such file"),
    ("{stage: 2}", {}, "not valid JSON"),
]


@pytest.mark.parametrize(("config", "options", "message"), CONTRADICTIONS)
def test_contradictions_name_both_values(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(config, **options)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (zero(), {"fp16": True}, "fp16=True with deepspeed is not supported: set bf16=True"),
    ({"zero_optimization": {"stage": 0}}, {"bf16": True}, "=0 with bf16=True is not supported: use stage 1"),
    ({"pipeline": {"stages": 2}}, {}, "'pipeline'.=.*is not supported: use ZeRO"),
    ({"tensorboard": {"enabled": True}}, {}, "set report_to='tensorboard'"),
    (zero(offload_optimizer={"device": "nvme"}), {}, "use {'device': 'cpu'}"),
    (zero(zero_quantized_weights=True), {}, "use bf16=True"),
    (zero(cpu_offload=True), {}, "'cpu_offload'.=True is not supported: write offload_optimizer={'device': 'cpu'}"),
    (zero(cpu_offload_param=True), {}, "write offload_param={'device': 'cpu'}"),
    (zero(overlap_com=True), {}, r"\['overlap_com'\]=True is not supported here; did you mean 'overlap_comm'"),
    ({**zero(), "disable_allgather": True}, {}, "'disable_allgather'.=True is not supported here: leave it out"),
    ({**zero(), "zero_force_ds_cpu_optimizer": True}, {}, "leave it out"),
    ({"optimizer": {"type": "OneBitAdam"}}, {}, "'OneBitAdam' is not supported: leave the section out"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, "'adam_w_mode'.=False is not supported"),
    ({"scheduler": {"type": "OneCycle"}}, {}, "'OneCycle' is not supported: use WarmupLR"),
]


@pytest.mark.parametrize(("config", "options", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_with_a_remedy(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        arguments(config, **options)


def test_what_is_off_is_no_request() -> None:
    config = {"amp": {"enabled": False}, "tensorboard": {"enabled": False}, "zero_optimization": {"stage": 1}}
    assert fill_config(arguments(config)).stage == 1


def test_an_old_offload_that_is_off_is_left_out() -> None:
    config = fill_config(arguments(zero(cpu_offload=False, overlap_comm=True))).config
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}


@pytest.mark.parametrize(("kind", "settings", "filled"), [
    ("WarmupLR", {}, {"warmup_num_steps": 6}),
    ("WarmupLR", {"warmup_max_lr": "auto"}, {"warmup_num_steps": 6, "warmup_max_lr": 0.02}),
    ("WarmupDecayLR", {"warmup_min_lr": 0}, {
        "warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 6, "total_num_steps": 50,
    }),
    ("WarmupCosineLR", {"cos_min_ratio": 0.1}, {"cos_min_ratio": 0.1, "warmup_num_steps": 6, "total_num_steps": 50}),
])  # fmt: skip
def test_a_schedule_follows_the_arguments_where_it_says_nothing(
    kind: str, settings: dict[str, Any], filled: dict[str, Any]
) -> None:
    """DeepSpeed's own defaults would be a rate of 1e-3 and 1,000 updates of warmup."""
    args = arguments({**zero(), "scheduler": {"type": kind, "params": settings}}, learning_rate=0.02, warmup_steps=6)
    schedule = fill_config(args).schedule
    assert schedule is not None
    assert finish_schedule(schedule[1], 50, args.get_warmup_steps(50)) == filled


def test_another_length_of_the_schedule_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="=10 contradicts the optimizer steps of the run=20"):
        finish_schedule({"total_num_steps": 10}, 20, 0)


def test_the_host_adds_up_whatever_the_accumulation() -> None:
    """DeepSpeed adds gradients up in host memory only where its config says that there are several micro-batches."""
    config = fill_config(arguments(zero(offload_optimizer={"device": "cpu"})), world_size=2).config
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (2, 32)
