"""Raw values become the values options hold, or an error that names option, value and what would be right."""

from __future__ import annotations

import json
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import IntervalStrategy
from paceline.args.training import TrainingArguments


class Foreign(str, Enum):  # noqa: UP042  As that library writes it.
    """A member of another library's enum."""

    STEPS = "steps"
    COSINE = "cosine"


class Wrong(StrEnum):
    SOMETIMES = "sometimes"


RIGHT: list[tuple[str, Any, Any]] = [
    ("learning_rate", "1e-4", 1e-4),
    ("learning_rate", np.float32(0.5), 0.5),
    ("learning_rate", 1, 1),
    ("learning_rate", " 2 ", 2),
    ("max_steps", "10_000", 10000),
    ("max_steps", 1e4, 10000),
    ("max_steps", "1e4", 10000),
    ("max_steps", np.int64(5), 5),
    ("max_grad_norm", "inf", float("inf")),
    ("bf16", "true", True),
    ("bf16", "No", False),
    ("bf16", 1, True),
    ("bf16", np.bool_(True), True),
    ("tf32", None, None),
    ("tf32", "1", True),
    ("eval_strategy", "STEPS", "steps"),
    ("eval_strategy", Foreign.STEPS, "steps"),
    ("eval_strategy", IntervalStrategy.EPOCH, "epoch"),
    ("eval_strategy", False, "no"),
    ("lr_scheduler_type", Foreign.COSINE, "cosine"),
    ("include_num_input_tokens_seen", False, "no"),
    ("include_num_input_tokens_seen", "non_padding", "non_padding"),
    ("log_level", "INFO", "info"),
    ("run_name", 2024, "2024"),
    ("run_name", Foreign.STEPS, "steps"),
    ("label_names", "labels", ["labels"]),
    ("label_names", "a, b", ["a", "b"]),
    ("label_names", '["a", "b"]', ["a", "b"]),
    ("label_names", ("a",), ["a"]),
    ("label_names", None, None),
    ("include_for_metrics", "inputs,loss", ["inputs", "loss"]),
    ("lr_scheduler_kwargs", '{"num_cycles": "2", "x": {"y": "true", "z": "0.5", "w": "word"}}', None),
    ("liger_kernel_config", {"rope": True}, {"rope": True}),
    ("liger_kernel_config", '{"rope": true}', {"rope": True}),
    ("resume_from_checkpoint", True, True),
    ("resume_from_checkpoint", "true", True),
    ("resume_from_checkpoint", "out/checkpoint-5", "out/checkpoint-5"),
    ("trackio_static_space_id", False, False),
    ("fsdp", [], []),
    ("fsdp", False, False),
    ("debug", [], []),
    ("accelerator_config", {"split_batches": False}, AcceleratorConfig()),
]


@pytest.mark.parametrize(("name", "raw", "kept"), RIGHT)
def test_right(name: str, raw: Any, kept: Any) -> None:
    value = getattr(TrainingArguments(**{name: raw}), name)
    if name == "lr_scheduler_kwargs":
        kept = {"num_cycles": 2, "x": {"y": True, "z": 0.5, "w": "word"}}
    assert value == kept
    assert isinstance(value, type(kept))


WRONG: list[tuple[str, Any, str]] = [
    ("learning_rate", "fast", "learning_rate='fast' is invalid: expected a number"),
    ("learning_rate", None, "learning_rate=None is invalid"),
    ("max_steps", "5k", "max_steps='5k' is invalid: expected a number; did you mean 5000?"),
    ("warmup_ratio", "10%", "did you mean 0.1?"),
    ("ddp_timeout", "1.5h", "did you mean 5400?"),
    ("learning_rate", True, "learning_rate=True is invalid: expected a number"),
    ("learning_rate", float("nan"), "learning_rate=nan is invalid"),
    ("learning_rate", [1], "expected a number"),
    ("max_steps", 1.5, "max_steps=1.5 is invalid: expected a whole number"),
    ("max_steps", "1.5", "expected a whole number"),
    ("bf16", "perhaps", "bf16='perhaps' is invalid: expected true or false"),
    ("bf16", 2, "expected true or false"),
    ("eval_strategy", "step", r"eval_strategy='step' is invalid: expected one of no, steps, epoch; did you mean"),
    ("eval_strategy", True, "expected one of no, steps, epoch"),
    ("eval_strategy", Wrong.SOMETIMES, "eval_strategy='sometimes'"),
    ("optim", "adamw_tosch", "optim='adamw_tosch' is invalid: expected one of .*; did you mean 'adamw_torch'"),
    ("lr_scheduler_type", "cosin", "did you mean 'cosine'"),
    ("train_sampling_strategy", "grouped_by_length", "did you mean 'group_by_length'"),
    ("log_level", "loud", "expected one of detail, debug, info"),
    ("loss_weight", "token", "loss_weight='token' is invalid: .*did you mean 'tokens'"),
    ("include_for_metrics", ["input"], "did you mean 'inputs'"),
    ("include_num_input_tokens_seen", "some", "expected one of no, all, non_padding"),
    ("ddp_backend", "ncll", "did you mean 'nccl'"),
    ("dataloader_multiprocessing_context", "thread", "expected one of fork, spawn, forkserver"),
    ("label_names", 5, "label_names=5 is invalid: expected a list"),
    ("label_names", "[1", "not valid JSON"),
    ("run_name", ["a"], "run_name=.* is invalid: expected text"),
    ("lr_scheduler_kwargs", "{bad", "lr_scheduler_kwargs='{bad' is invalid: it is not valid JSON"),
    ("lr_scheduler_kwargs", "num_cycles=2", "expected a dict, a JSON object, or the path of a JSON file"),
    ("accelerator_config", {"split_batch": True}, "no setting .*split_batch"),
    ("accelerator_config", AcceleratorConfig, "expected an instance"),
    ("accelerator_config", 5, "expected a dict"),
    ("report_to", ["none", "csv"], "'none' and 'all' cannot be combined"),
    ("debug", "overflow", "expected one of underflow_overflow"),
]


@pytest.mark.parametrize(("name", "raw", "message"), WRONG)
def test_wrong(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**{name: raw})


def test_settings_from_files(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"num_cycles": 3}))
    assert TrainingArguments(lr_scheduler_kwargs=str(file)).lr_scheduler_kwargs == {"num_cycles": 3}
    file.write_text(json.dumps({"even_batches": True}))
    assert TrainingArguments(accelerator_config=str(file)).accelerator_config == AcceleratorConfig()
    assert AcceleratorConfig.from_json_file(file) == AcceleratorConfig()
    file.write_text("[1]")
    with pytest.raises(ValueError, match=r"settings\.json holds a list"):
        TrainingArguments(lr_scheduler_kwargs=str(file))
