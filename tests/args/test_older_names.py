"""Every name of the older releases: it works under today's name, or an error says what to use."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.errors import UnsupportedOption
from paceline.args.older_names import OLDER_NAMES, Renamed, Retired
from paceline.args.parser import HfArgumentParser
from paceline.args.sections import Options
from paceline.args.training import TrainingArguments

# Names and defaults of transformers 4.57, less those that 5.23 still has.
DEFAULTS_OF_V4: dict[str, Any] = {
    "overwrite_output_dir": False,
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "warmup_ratio": 0.0,
    "logging_dir": None,
    "save_safetensors": True,
    "no_cuda": False,
    "use_mps_device": False,
    "jit_mode_eval": False,
    "fp16_opt_level": "O1",
    "half_precision_backend": "auto",
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "past_index": -1,
    "fsdp_min_num_params": 0,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "adafactor": False,
    "group_by_length": False,
    "use_legacy_prediction_loop": False,
    "include_inputs_for_metrics": False,
    "fp16_backend": "auto",
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": None,
    "_n_gpu": -1,
    "mp_parameters": "",
    "torchdynamo": None,
    "ray_scope": "last",
    "include_tokens_per_second": False,
    "evaluation_strategy": "no",
    "use_ipex": False,
    "sharded_ddp": "",
    "xpu_backend": None,
    "evaluate_during_training": False,
    "dispatch_batches": None,
    "split_batches": None,
}

RENAMED: list[tuple[str, Any, str, Any]] = [
    ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
    ("evaluate_during_training", True, "eval_strategy", "steps"),
    ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
    ("per_gpu_eval_batch_size", "4", "per_device_eval_batch_size", 4),
    ("warmup_ratio", 0.1, "warmup_steps", 0.1),
    ("fp16_backend", "amp", "half_precision_backend", "auto"),
    ("no_cuda", True, "use_cpu", True),
    ("no_cuda", "true", "use_cpu", True),
    ("adafactor", True, "optim", "adafactor"),
    ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
    ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
    ("include_tokens_per_second", True, "include_num_input_tokens_seen", "all"),
    ("tpu_metrics_debug", True, "debug", ["tpu_metrics_debug"]),
    ("torchdynamo", "inductor", "torch_compile", True),
    ("torchdynamo", "aot_eager", "torch_compile_backend", "aot_eager"),
    ("xpu_backend", "gloo", "ddp_backend", "gloo"),
    ("label_smoothing", 0.1, "label_smoothing_factor", 0.1),
    ("push_to_hub_token", "secret", "hub_token", "secret"),
    ("logging_dir", "runs", "logging_dir", "runs"),
]


KEPT = ("half_precision_backend", "fp16_opt_level", "tpu_num_cores")


def test_every_default_of_v4_asks_for_nothing() -> None:
    assert set(DEFAULTS_OF_V4) <= {*OLDER_NAMES, "logging_dir", *KEPT}
    assert TrainingArguments(**DEFAULTS_OF_V4) == TrainingArguments()


@pytest.mark.parametrize(("old", "value", "new", "expected"), RENAMED)
def test_renamed(old: str, value: Any, new: str, expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = TrainingArguments(**{old: value})
    assert getattr(args, new) == expected
    if old != new:
        assert len([record for record in caplog.records if old in record.getMessage()]) == 1


RETIRED: list[tuple[str, Any, str]] = [
    ("save_safetensors", False, "always written as safetensors"),
    ("jit_mode_eval", True, "torch_compile=True"),
    ("past_index", 2, "keep such a state in the model's forward"),
    ("fsdp_min_num_params", 100, "fsdp_config"),
    ("fsdp_transformer_layer_cls_to_wrap", "Block", "fsdp_config"),
    ("use_legacy_prediction_loop", True, "one prediction loop"),
    ("push_to_hub_organization", "us", "hub_model_id='organization/name'"),
    ("mp_parameters", "a=1", "torchrun"),
    ("ray_scope", "all", "hyperparameter_search"),
    ("use_ipex", True, "torch_compile=True"),
    ("sharded_ddp", "simple", "fsdp"),
    ("_n_gpu", 4, "one process per device"),
]


@pytest.mark.parametrize(("old", "value", "remedy"), RETIRED)
def test_retired(old: str, value: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"{old}=.*{remedy}"):
        TrainingArguments(**{old: value})


@pytest.mark.parametrize(
    ("old", "value"),
    [
        ("fp16_backend", "amp"),
        ("half_precision_backend", "cuda_amp"),
        ("use_mps_device", True),
        ("overwrite_output_dir", True),
        ("save_safetensors", "true"),
        ("past_index", "-1"),
    ],
)
def test_values_that_ask_for_nothing(old: str, value: Any) -> None:
    assert TrainingArguments(**{old: value}) == TrainingArguments()


def test_the_whole_run_as_warmup_is_not_one_step() -> None:
    assert TrainingArguments(warmup_ratio=1.0).get_warmup_steps(200) == 200  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"warmup_ratio=1.5 is invalid"):
        TrainingArguments(warmup_ratio=1.5)  # type: ignore[call-arg]


def test_both_names_at_once() -> None:
    both: Any = TrainingArguments
    assert both(evaluation_strategy="epoch", eval_strategy="epoch").eval_strategy == "epoch"
    assert both(evaluation_strategy="epoch", eval_strategy="no").eval_strategy == "epoch"
    assert both(warmup_ratio=0.1, warmup_steps=0).warmup_steps == 0.1
    assert both(warmup_ratio=0.1, warmup_steps=20).warmup_steps == 20  # As it always was: the number wins.
    assert both(adafactor=True, optim="adamw_torch").optim == "adafactor"
    assert both(include_inputs_for_metrics=True, include_for_metrics=["loss"]).include_for_metrics == ["loss", "inputs"]
    assert both(tpu_metrics_debug=True, debug="underflow_overflow").debug == ["underflow_overflow", "tpu_metrics_debug"]
    with pytest.raises(ValueError, match="are the same option: give eval_strategy only"):
        both(evaluation_strategy="epoch", eval_strategy="steps")
    with pytest.raises(ValueError, match="are the same option: give optim only"):
        both(adafactor=True, optim="sgd")


def test_settings_that_moved_into_a_dict() -> None:
    both: Any = TrainingArguments(split_batches=True, dispatch_batches=True)  # type: ignore[call-arg]
    assert both.accelerator_config.split_batches is both.accelerator_config.dispatch_batches is True
    assert TrainingArguments(split_batches=False) == TrainingArguments()  # type: ignore[call-arg]


def test_the_table_points_to_options_that_exist() -> None:
    fields = set(Options.__dataclass_fields__)
    for name, entry in OLDER_NAMES.items():
        assert name not in fields
        if isinstance(entry, Renamed):
            assert entry.new in fields
        else:
            assert isinstance(entry, Retired)
            assert entry.remedy


def test_overwrite_output_dir_says_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    TrainingArguments(overwrite_output_dir=False)  # type: ignore[call-arg]
    assert not caplog.records
    TrainingArguments(overwrite_output_dir=True)  # type: ignore[call-arg]
    (record,) = caplog.records
    assert "overwrite_output_dir=True has no effect: no file is deleted" in record.getMessage()
    assert "and paceline train unless --fresh is given" in record.getMessage()


def test_scripts_read_retired_options_back() -> None:
    args: Any = TrainingArguments(overwrite_output_dir=True, save_safetensors=None)  # type: ignore[call-arg]
    assert args.overwrite_output_dir is True
    assert args.save_safetensors is True  # what it stands for where it is None
    assert (args.past_index, args.use_ipex, args.ray_scope) == (-1, False, "last")
    parsed = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--overwrite_output_dir"])[0]
    assert parsed.overwrite_output_dir is True
    args.past_index = -1
    with pytest.raises(UnsupportedOption, match="save_safetensors=False"):
        args.save_safetensors = False
    assert copy.deepcopy(args).overwrite_output_dir is True


@pytest.mark.parametrize("name", [name for name, entry in OLDER_NAMES.items() if isinstance(entry, Retired)])
def test_what_a_retired_option_reads_asks_for_nothing(name: str) -> None:
    unset = getattr(TrainingArguments(), name)
    assert getattr(TrainingArguments(**{name: unset}), name) == unset


def test_every_renamed_option_can_be_read() -> None:
    args = TrainingArguments()
    for name, entry in OLDER_NAMES.items():
        if isinstance(entry, Renamed):
            getattr(args, name)


# ---- a subclass's own fields under older names


@dataclass
class OlderFields(TrainingArguments):
    """As libraries declare them for version 4."""

    warmup_ratio: float = 0.1
    evaluation_strategy: str = "steps"
    per_gpu_train_batch_size: int | None = None
    group_by_length: bool = True
    no_cuda: bool = False
    dispatch_batches: bool | None = None
    save_safetensors: bool = True


def test_own_fields_under_older_names_act(tmp_path: Path) -> None:
    args = OlderFields(str(tmp_path))
    assert args.get_warmup_steps(200) == 20
    assert args.eval_strategy == "steps"
    assert args.train_sampling_strategy == "group_by_length"
    assert args.per_device_train_batch_size == 8
    assert args.warmup_ratio == 0.1
    args = OlderFields(str(tmp_path), per_gpu_train_batch_size=3, group_by_length=False, warmup_ratio=0.5, no_cuda=True)
    assert (args.per_device_train_batch_size, args.train_sampling_strategy) == (3, "random")
    assert args.get_warmup_steps(200) == 100
    assert args.use_cpu
    args.warmup_ratio = 0.25
    assert (args.warmup_ratio, args.get_warmup_steps(200)) == (0.25, 50)
    args.per_gpu_train_batch_size = 5
    assert args.train_batch_size == 5


def test_what_was_given_wins_over_the_default_of_an_own_field(tmp_path: Path) -> None:
    args = OlderFields(str(tmp_path), warmup_steps=7, eval_strategy="epoch", dispatch_batches=False)
    assert args.get_warmup_steps(200) == 7
    assert args.eval_strategy == "epoch"
    plain = OlderFields(str(tmp_path), warmup_steps=0, eval_strategy="no", train_sampling_strategy="random")
    assert (plain.get_warmup_steps(200), plain.eval_strategy, plain.train_sampling_strategy) == (0, "no", "random")
    with pytest.raises(ValueError, match="are the same option: give eval_strategy only"):
        OlderFields(str(tmp_path), eval_strategy="epoch", evaluation_strategy="no")
    config = AcceleratorConfig(split_batches=True)
    both = OlderFields(str(tmp_path), accelerator_config=config, dispatch_batches=False)
    assert (both.accelerator_config.split_batches, both.accelerator_config.dispatch_batches) == (True, False)


def test_replace_keeps_what_is_not_replaced_and_acts_on_what_is(tmp_path: Path) -> None:
    args = OlderFields(output_dir=str(tmp_path), warmup_ratio=0.2, evaluation_strategy="epoch")
    assert (args.warmup_steps, str(args.eval_strategy)) == (0.2, "epoch")
    same = dataclasses.replace(args, learning_rate=0.5)
    assert (same.learning_rate, same.warmup_ratio, same.warmup_steps) == (0.5, 0.2, 0.2)
    older = dataclasses.replace(args, warmup_ratio=0.3)
    assert (older.warmup_ratio, older.warmup_steps, str(older.eval_strategy)) == (0.3, 0.3, "epoch")
    newer = dataclasses.replace(args, warmup_steps=7, eval_strategy="no")
    assert (newer.warmup_steps, str(newer.eval_strategy)) == (7, "no")
    again = dataclasses.replace(newer, seed=3)
    assert (again.warmup_steps, str(again.eval_strategy), again.seed) == (7, "no", 3)
    with pytest.raises(ValueError, match="are the same option: give eval_strategy only"):
        dataclasses.replace(args, evaluation_strategy="no", eval_strategy="steps")
    plain = TrainingArguments(output_dir=str(tmp_path), warmup_steps=5)
    assert dataclasses.replace(plain, warmup_ratio=0.25).warmup_steps == 0.25


def test_own_fields_survive_a_file(tmp_path: Path) -> None:
    args = OlderFields(str(tmp_path), warmup_ratio=0.5, dispatch_batches=False)
    args.to_json(tmp_path / "args.json")
    again = OlderFields.from_json(tmp_path / "args.json")
    assert again.to_dict() == args.to_dict()
    line = ["--warmup_ratio", "0.3", "--output_dir", "x"]
    (parsed,) = HfArgumentParser(OlderFields).parse_args_into_dataclasses(line)
    assert parsed.get_warmup_steps(100) == 30


def test_an_own_field_of_a_retired_name_is_told_of_where_it_asks_for_something(tmp_path: Path, caplog: Any) -> None:
    OlderFields(str(tmp_path))
    assert not [record for record in caplog.records if "own field" in record.getMessage()]
    OlderFields(str(tmp_path), save_safetensors=False)
    told = [record.getMessage() for record in caplog.records if "own field" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("OlderFields has its own field save_safetensors: only its own code acts on it.")
    caplog.clear()
    copied = dataclasses.replace(OlderFields(str(tmp_path)), learning_rate=1.0)
    assert not caplog.records
    again = dataclasses.replace(dataclasses.replace(copied, save_safetensors=False), seed=1)
    assert len(caplog.records) == 1
    assert again.save_safetensors is False


def test_our_own_options_have_no_older_names() -> None:
    assert not OLDER_NAMES.keys() & {item.name for item in fields(TrainingArguments)}
