"""Every rule between options: what is refused, in which words, and what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.args.errors import UnsupportedOption
from paceline.args.rules import LIMITS
from paceline.args.sections import Options
from paceline.args.training import TrainingArguments

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
ACCUMULATE = {"gradient_accumulation_kwargs": {"num_steps": 4}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True, "bf16": True}, "exclude each other: keep one"),
    ({"fp16_full_eval": True, "bf16_full_eval": True}, "exclude each other: keep one"),
    ({"max_steps": 0}, "max_steps=0 is invalid"),
    ({"learning_rate": -1}, "learning_rate=-1 is invalid: it must be at least 0"),
    ({"per_device_train_batch_size": 0}, "must be at least 1"),
    ({"gradient_accumulation_steps": 0}, "must be at least 1"),
    ({"adam_beta2": 1.0}, r"adam_beta2=1.0 is invalid: it must be below 1"),
    ({"label_smoothing_factor": 1}, "must be below 1"),
    ({"warmup_steps": -1}, "must be at least 0"),
    ({"torch_empty_cache_steps": 0}, "must be at least 1"),
    ({"learning_rate": math.inf}, "learning_rate=inf is invalid: expected a finite number[.]"),
    ({"warmup_steps": math.inf}, "warmup_steps=inf is invalid: expected a finite number"),
    ({"num_train_epochs": math.inf}, "num_train_epochs=inf is invalid: expected a finite number; set max_steps"),
    ({"logging_steps": math.inf}, "logging_steps=inf is invalid: .*; logging_strategy='no' turns the logs off"),
    ({"eval_steps": math.inf, "eval_strategy": "steps"}, "eval_steps=inf is invalid: .*; eval_strategy='no'"),
    ({"eval_delay": "inf", "eval_strategy": "epoch"}, "eval_delay=inf is invalid: .*; eval_strategy='no'"),
    ({"save_steps": math.inf}, "save_steps=inf is invalid: .*; save_strategy='no' turns checkpoints off"),
    ({"keep_every_hours": math.inf}, "keep_every_hours=inf is invalid: .*; 0 turns it off"),
    ({"seed": -1}, "seed=-1 is invalid: it must be at least 0"),
    ({"data_seed": 2**63}, "data_seed=9223372036854775808 is invalid: it must be at most 9223372036854775807"),
    ({"logging_steps": 0}, "logging_steps=0 is invalid with logging_strategy='steps'"),
    ({"save_steps": 0}, "save_strategy='no' turns it off"),
    ({"logging_steps": 1.5}, "above 1 it must be a whole number"),
    ({"eval_steps": 10.5, "eval_strategy": "steps"}, "above 1 it must be a whole number"),
    ({"save_steps": 2.5}, "above 1 it must be a whole number"),
    (
        {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
        "eval_steps=0 is invalid with eval_strategy='steps'",
    ),
    ({"save_strategy": "best"}, "save_strategy='best' needs evaluations"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end=True needs evaluations"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "epoch"},
        "eval_strategy='epoch' and save_strategy='steps' differ",
    ),
    ({**BEST, "eval_steps": 200}, "save_steps=500 to be a multiple of eval_steps=200"),
    ({**BEST, "eval_steps": 0.1}, "mixing ratio and absolute steps"),
    ({**BEST, "eval_steps": 0.2, "save_steps": 0.3}, "save_steps=0.3 to be a multiple of eval_steps=0.2"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau requires an eval strategy"),
    ({"lr_scheduler_type": "greedy"}, "greedy requires an eval strategy: it follows the evaluations"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2 needs worker processes"),
    ({"dataloader_persistent_workers": True}, "needs worker processes"),
    ({"dataloader_multiprocessing_context": "spawn"}, "needs worker processes"),
    ({"compile_regions": True}, "set torch_compile=True too"),
    ({"torch_compile_dynamic": False}, "torch_compile_dynamic=False requires torch_compile"),
    ({"compile_cache_dir": "x"}, "compile_cache_dir='x' requires torch_compile"),
    ({"activation_memory_budget": 0.5}, "activation_memory_budget=0.5 requires torch_compile"),
    ({"activation_memory_budget": 1.5, "torch_compile": True}, "activation_memory_budget=1.5 is invalid: .* at most 1"),
    ({"activation_memory_budget": 0.5, "torch_compile": True, "gradient_checkpointing": True}, "leave one of them out"),
    ({"torch_compile_mode": "reduce-overhead", "torch_compile_dynamic": True}, "CUDA graphs are recorded for one"),
    ({"activation_offload": True, "torch_compile": True, "compile_regions": False}, "exclude each other"),
    ({"fp8": True}, "fp8=True requires bf16=True"),
    ({"packing_length": 64}, "packing_length=64 is the length of packed rows, and packing=None"),
    ({"packing": "flatten", "packing_length": 64}, "set packing='pack', or leave packing_length out"),
    ({"packing": "pack", "packing_length": 1}, "packing_length=1 is invalid: it must be at least 2"),
    ({"packing": "rows"}, "packing"),
    ({"packing": "group", "train_sampling_strategy": "sequential"}, "two orders of the same samples"),
    ({"packing": "pack", "loss_weight": "samples"}, "a mean over their targets"),
    ({"keep_best": 2}, "keep_best=2 needs evaluations"),
    ({"keep_best_metric": "loss", "eval_strategy": "epoch"}, "set keep_best to a number"),
    ({"enable_jit_checkpoint": True, "stop_signals": False}, "leave stop_signals at True"),
    ({"optim_target_modules": ["attention"]}, "GaLore and APOLLO"),
    (
        {"accelerator_config": ACCUMULATE, "gradient_accumulation_steps": 3},
        "gradient_accumulation_steps=3 and num_steps=4 in gradient_accumulation_kwargs",
    ),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 0}}}, "a whole number of at least 1"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"steps": 2}}}, "no setting .'steps'.; it has"),
    ({"accelerator_config": {"even_batches": [1]}}, "'even_batches': .1.. is invalid: expected True or False"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TrainingArguments("x", **options)
    assert not isinstance(caught.value, UnsupportedOption)


ALLOWED: list[dict[str, Any]] = [
    {**BEST, "eval_steps": 250},
    {**BEST, "eval_steps": 0.1, "save_steps": 0.3},
    {**BEST, "logging_steps": 100},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best"},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
    {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True},
    {"torch_compile": True, "compile_regions": True},
    {"compile_regions": True, "torch_compile_mode": "default"},
    {"compile_regions": False},
    {"activation_memory_budget": 0, "torch_compile_backend": "aot_eager", "torch_compile_dynamic": False},
    {"activation_offload": True, "gradient_checkpointing": True, "torch_compile": True},
    {"fp8": True, "bf16": True, "parallel": {"dp_shard": 2}},
    {"optim": "galore_adamw", "optim_target_modules": ["attention"]},
    {"logging_strategy": "epoch", "logging_steps": 0, "save_strategy": "no", "save_steps": 0},
    {"fp16": True, "bf16_full_eval": True},
    {"enable_jit_checkpoint": True},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"fsdp": "", "fsdp_config": {"min_num_params": 0, "xla": False}, "deepspeed": None, "debug": []},
    {"hub_token": "secret"},
    {"push_to_hub": True, "hub_model_id": "owner/name", "hub_strategy": "all_checkpoints", "hub_always_push": True},
    {"hub_model_id": "name", "hub_strategy": "end", "hub_private_repo": False, "hub_revision": "main"},
    {"project": "mine"},
    {"debug": "underflow_overflow"},
    {"skip_memory_metrics": False},
    {"save_total_limit": 0},
    {"max_grad_norm": float("inf")},
    {"eval_spill_gb": float("inf")},
    {"accelerator_config": {**ACCUMULATE, "use_configured_state": True}, "gradient_accumulation_steps": 4},
]


UNSUPPORTED_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"activation_memory_budget": 0.5, "torch_compile_backend": "eager"}, "'eager' is not supported: use one of induc"),
    ({"compile_cache_dir": "x", "torch_compile_backend": "aot_eager"}, "only inductor has a cache"),
    ({"activation_offload": True, "use_cpu": True}, "activation_offload=True with use_cpu is not supported"),
    ({"activation_offload": True, "parallel": {"pp": 2}}, "activation_offload=True with parallel=.* leave"),
    ({"fp8": True, "bf16": True, "use_cpu": True}, "fp8=True with use_cpu is not supported"),
    ({"fp8": True, "bf16": True, "parallel": {"tp": 2}}, "fp8=True with parallel=.* leave fp8 out"),
]


@pytest.mark.parametrize(("options", "message"), UNSUPPORTED_TOGETHER)
def test_what_does_not_go_together_yet(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        TrainingArguments("x", **options)


@pytest.mark.parametrize("options", ALLOWED)
def test_allowed(options: dict[str, Any]) -> None:
    TrainingArguments("x", **options)


LATER: list[tuple[str, Any]] = [
    ("parallelism_config", {"sp_size": 2, "sp_handler": {"sp_attn_implementation": "flash_attention_2"}}),
    ("parallelism_config", {"cp_size": 2, "cp_handler": {"cp_comm_strategy": "alltoall"}}),
    ("accelerator_config", {"gradient_accumulation_kwargs": {"adjust_scheduler": True}}),
    ("accelerator_config", {"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}),
]


@pytest.mark.parametrize(("name", "value"), LATER)
def test_what_comes_later_is_refused_by_name_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedOption, match=rf"^{name}=.+ is not supported: .*leave (it|out)"):
        TrainingArguments("x", **{name: value})


def test_the_table_names_options_that_exist() -> None:
    assert set(LIMITS) <= set(Options.__dataclass_fields__)


def test_an_interval_of_zero_is_said_to_be_that_of_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    quiet: list[dict[str, Any]] = [
        {"eval_steps": 0},
        {"eval_strategy": "steps"},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"eval_strategy": "epoch", "eval_steps": 0},
    ]
    for options in quiet:
        TrainingArguments(**options)
    assert not caplog.records
    args = TrainingArguments(eval_strategy="steps", eval_steps=0, logging_steps=7)
    assert args.eval_steps == 7
    assert "eval_steps=0 with eval_strategy='steps': evaluations are made every logging_steps=7" in caplog.text


def test_an_error_that_is_maximized_by_default_is_said(caplog: pytest.LogCaptureFixture) -> None:
    right = (
        "accuracy",
        "f1_loss",
        "eval_loss",
        "centimeter",
        "permae",
        "eval_neg_rmse",
        "error_correction_f1",
        "wer_drop",
        "distance_correlation",
        "error_detection_auroc",
        "token_error_recall@5",
    )
    for metric in right:
        TrainingArguments(metric_for_best_model=metric)
    TrainingArguments(metric_for_best_model="wer", greater_is_better=True)
    assert not caplog.records
    for metric in (
        "eval_wer",
        "MAE",
        "perplexity",
        "valid_rmse",
        "error_rate",
        "set/wer",
        "eval_Loss",
        "wer_clean",
        "eval_kl_div",
        "error_wer",
    ):
        TrainingArguments(metric_for_best_model=metric)
        assert f"metric_for_best_model={metric!r}: the model with the highest value counts as the best" in caplog.text
    TrainingArguments(keep_best=2, eval_strategy="epoch", keep_best_metric="error_detection_auroc")
    for metric in ("eval_wer", "eval_error_rate"):
        kept = {"keep_best": 2, "eval_strategy": "epoch", "keep_best_metric": metric}
        with pytest.raises(ValueError, match=f"keep_best_metric='{metric}': the checkpoints with the highest values"):
            TrainingArguments(**kept)
    TrainingArguments(**kept, metric_for_best_model="error_rate", greater_is_better=False)


def test_a_plateau_of_an_error_asks_for_its_direction() -> None:
    options = {"eval_strategy": "epoch", "phases": [{"name": "a", "until": "plateau of eval_wer_clean"}, {"name": "b"}]}
    with pytest.raises(ValueError, match="'eval_wer_clean' looks like one whose smaller values are better"):
        TrainingArguments(**options)


def test_a_direction_that_contradicts_its_metric_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """As in a dict of arguments whose metric was replaced, and not the direction of the one before."""
    for metric, is_greater in (("eval_loss", False), ("accuracy", True), ("wer", False), ("f1_loss", None)):
        TrainingArguments(metric_for_best_model=metric, greater_is_better=is_greater)
    assert not caplog.records
    TrainingArguments(metric_for_best_model="eval_f1", greater_is_better=False)
    assert "greater_is_better=False with metric_for_best_model='eval_f1': the model with the lowest" in caplog.text
    TrainingArguments(metric_for_best_model="loss", greater_is_better=True)
    assert "greater_is_better=True with metric_for_best_model='loss': the model with the highest" in caplog.text


@pytest.mark.parametrize("options", [{"learning_rate": -1}, {"lr_scheduler_type": "lin"}, {"fsdp": {"no": 1}}])
def test_an_error_says_where_its_option_is_described(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        TrainingArguments("x", **options)
    (name,) = options
    assert caught.value.__notes__ == [
        f"`paceline train --help {name}` describes this option; docs/options.md has all of them."
    ]
