"""The settings of `accelerate launch` are used for options that the arguments leave unset, and never override them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.args.launch_environment import read_launcher_config
from paceline.args.sharding import read_sharding

TWO = {"WORLD_SIZE": "2"}
# what the launcher sets where it was told `--use_fsdp` and nothing else
FSDP = {
    **TWO,
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}  # fmt: skip
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "none"}
MESH = {f"PARALLELISM_CONFIG_{axis}_SIZE": "1" for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")}
MESH |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_BACKEND": "torch"}
# what the launcher sets in every process
PLAIN = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False", "ACCELERATE_USE_CPU": "False",
}  # fmt: skip


def arguments(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **options: Any) -> TrainingArguments:
    for name, value in {**PLAIN, **environment}.items():
        monkeypatch.setenv(name, value)
    return TrainingArguments("x", **options)


def test_a_plain_launch_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        assert arguments(monkeypatch, {}).to_dict() == TrainingArguments("x").to_dict()
    assert "accelerate launch" not in caplog.text


TAKEN: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"bf16": True, "mixed_precision": "bf16"}),
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"fp16": True, "bf16": False}),
    ({"ACCELERATE_USE_CPU": "True"}, {"use_cpu": True}),
    (
        {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_MODE": "reduce-overhead"},
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": "reduce-overhead"},
    ),
    (
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"},
        {"torch_compile": True, "compile_regions": True},
    ),
    (
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_DYNAMIC": "True"},
        {"torch_compile": True, "compile_regions": None, "torch_compile_dynamic": True},
    ),
    (FSDP, {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}),
    ({**FSDP, "WORLD_SIZE": "1"}, {"fsdp": None, "fsdp_config": None}),
    ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"gradient_checkpointing": True, "fsdp": True}),
    (DEEPSPEED, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    (
        {
            **DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true", "ACCELERATE_GRADIENT_CLIPPING": "0.5",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16",
        },
        {
            "deepspeed": {"zero_optimization": {
                "stage": 3, "offload_param": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": True,
            }},
            "gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "bf16": True,
        },
    ),
    (
        {**MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "2",
         "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather"},
        {"parallelism_config": {"dp_shard_size": 2, "cp_size": 2, "cp_handler": {"cp_comm_strategy": "allgather"}}},
    ),
    ({**MESH, "PARALLELISM_CONFIG_SP_SIZE": "2"}, {"parallelism_config": {"sp_size": 2}}),
    (MESH, {"parallelism_config": None}),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), TAKEN)
def test_what_was_told_is_taken(
    environment: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(monkeypatch, environment)
    assert {name: getattr(args, name) for name in expected} == expected


def test_one_line_says_what_was_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        arguments(monkeypatch, {**FSDP, "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert [record.getMessage() for record in caplog.records] == [
        "From the environment of accelerate launch: bf16=True, fsdp=True, fsdp_config={'cpu_ram_efficient_loading': "
        "True}, FSDP 1 is run as torch's fully_shard."
    ]


SHARDINGS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"reshard": False}),
    ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"reshard": True, "replicas": 0}),
    ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard": True}),  # version 1 does not read it
    ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard": False}),
    ({"FSDP_OFFLOAD_PARAMS": "true", "WORLD_SIZE": "1"}, {"offload": True}),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "50"}, {"least_parameters": 50}),
    (
        {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B"},
        {"layer_classes": ("A", "B"), "least_parameters": 0},
    ),
    ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"}, {"is_whole": True}),
]


@pytest.mark.parametrize(("environment", "expected"), SHARDINGS)
def test_how_parameters_are_sharded(
    environment: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(monkeypatch, {**FSDP, **environment})
    sharding = read_sharding(args.fsdp, args.fsdp_config)
    assert {name: getattr(sharding, name) for name in expected} == expected


def test_a_config_of_deepspeed_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "ds.json", {"zero_optimization": {"stage": 1}}
    path.write_text(json.dumps(config))
    environment = {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    assert arguments(monkeypatch, environment).deepspeed == str(path)
    assert arguments(monkeypatch, environment, deepspeed=config).deepspeed == config
    with pytest.raises(ValueError, match=r"deepspeed=.*'stage': 3.* contradicts ACCELERATE_DEEPSPEED_CONFIG_FILE.*ds"):
        arguments(monkeypatch, environment, deepspeed={"zero_optimization": {"stage": 3}})


AGREED: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"bf16": True}),
    (FSDP, {"fsdp": "full_shard", "fsdp_config": {"cpu_ram_efficient_loading": False, "reshard_after_forward": False}}),
    ({**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, {"fsdp": True, "checkpoint_format": "sharded"}),
    (DEEPSPEED, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    (
        {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
         "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false"},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "options"), AGREED)
def test_what_both_say_stays(
    environment: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(monkeypatch, environment, **options)
    expected = {name: value for name, value in options.items() if name != "fsdp_config"}
    assert {name: getattr(args, name) for name in expected} == expected


CONTRADICTIONS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"fp16": True}, "fp16=True contradicts ACCELERATE_MIXED_PREC.*'bf16'"),
    (FSDP, {"parallel": "ddp"}, "parallel='ddp' contradicts ACCELERATE_USE_FSDP of accelerate launch"),
    (FSDP, {"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed=.* contradicts ACCELERATE_USE_FSDP"),
    (
        {**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
        {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
        r"\['state_dict_type'\]='FULL_STATE_DICT' contradicts FSDP_STATE_DICT_TYPE.*'SHARDED_STATE_DICT'",
    ),
    (DEEPSPEED, {"fsdp": True}, "fsdp=True contradicts ACCELERATE_USE_DEEPSPEED"),
    (
        {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        r"\['stage'\]=2 contradicts ACCELERATE_DEEPSPEED_ZERO_STAGE of accelerate launch, which is 3",
    ),
    (
        {**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps=2 contradicts ACCELERATE_GRADIENT_ACCUMULATION_STEPS.* is 4",
    ),
    ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"max_grad_norm": 0}, "max_grad_norm=0.* is 0.5"),
    (
        {**MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"},
        {"parallel": "ddp"},
        "parallel='ddp' contradicts ACCELERATE_USE_PARALLELISM_CONFIG.*'tp_size': 2",
    ),
    ({**MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"}, {"parallelism_config": {"tp_size": 4}}, "'tp_size': 4}.*tp_size': 2"),
]


@pytest.mark.parametrize(("environment", "options", "message"), CONTRADICTIONS)
def test_contradictions_name_both_values(
    environment: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(monkeypatch, environment, **options)


@pytest.mark.parametrize(("environment", "message"), [
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION=fp8 .*use bf16, fp16 or no"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM=true .*use parallelism_config or fsdp"),
    ({"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"}, "FULLGRAPH=True .*leave it"),
    ({**FSDP, "FSDP_VERSION": "3"}, "FSDP_VERSION=3 .*use 1 or 2"),
    ({**FSDP, "FSDP_USE_ORIG_PARAMS": "false"}, "'use_orig_params'.='false' is not supported"),
    ({**FSDP, "FSDP_IGNORED_MODULES": "head"}, "'ignored_modules'.='head' is not supported"),
    ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "use {'device': 'cpu'}"),
    ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A"}, "MOE_LAYER_CLS_NAMES=A .*leave it out"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        arguments(monkeypatch, environment)


def test_a_rule_that_breaks_says_where_the_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        arguments(monkeypatch, {**FSDP, "FSDP_FORWARD_PREFETCH": "true"})
    assert "From the environment of accelerate launch" in caught.value.__notes__[0]


def test_a_switch_that_is_neither_on_nor_off() -> None:
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP='perhaps' is invalid"):
        read_launcher_config({"ACCELERATE_USE_FSDP": "perhaps"})


def test_the_names_are_those_that_accelerate_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable of a real launch with FSDP 2 and a mesh is known, and gives these options."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--use_fsdp", "--fsdp_version=2", "--num_processes=4", "--mixed_precision=bf16"]
    words += ["--use_parallelism_config"]
    words += ["--parallelism_config_dp_shard_size=2", "--parallelism_config_tp_size=2", "--main_process_port=0"]
    words += ["--fsdp_reshard_after_forward=false", "--num_machines=1", "--dynamo_backend=no", "train.py"]
    parsed: SimpleNamespace = launch.launch_command_parser().parse_args(words)
    parsed.num_cpu_threads_per_process = 1
    environment = {**prepare_multi_gpu_env(parsed), "WORLD_SIZE": "4"}
    told = read_launcher_config(environment)
    assert {name: value for name, (value, _) in told.values.items()} == {
        "bf16": True, "fsdp": True, "parallelism_config": {"dp_shard_size": 2, "tp_size": 2}
    }  # fmt: skip
    assert {name: value for name, (value, _) in told.fsdp_config.items()} == {
        "reshard_after_forward": "false", "cpu_ram_efficient_loading": True
    }  # fmt: skip
