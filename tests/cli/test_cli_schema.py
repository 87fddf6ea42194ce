"""`paceline schema`: a schema that accepts what `paceline train` reads, and names what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.args.older_names import OLDER_NAMES
from paceline.cli.config import SECTIONS, read_config
from paceline.cli.errors import UsageError
from paceline.cli.main import main
from paceline.cli.options import argument_fields
from paceline.cli.schema import make_schema
from paceline.tensorflow.arguments import TFTrainingArguments

GOOD: list[dict[str, Any]] = [
    {"model": "folder", "data": "a.txt", "learning_rate": 3e-4, "max_steps": 10, "bf16": True},
    {"model": {"factory": "mine:Net", "width": 3}, "data": {"factory": "mine:data", "size": 4}, "metrics": ["f1"]},
    {"data": {"train": ["a.jsonl"], "eval_fraction": 0.1}, "metrics": {"names": "accuracy", "task": "multi_label"}},
    {"arguments": {"eval_strategy": "no", "save_strategy": False, "report_to": ["jsonl", "csv"], "warmup_steps": 0.1}},
    {"arguments": {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "resume_from_checkpoint": True}},
    {"arguments": {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 1}, "lr_scheduler_kwargs": {"a": 1}}},
    {"arguments": None, "callbacks": ["mine:Callback", {"factory": "mine:Other"}], "framework": "tf", "xla": True},
    {"model": "mine:net", "members": [{"learning_rate": 1e-3}, {"learning_rate": 1e-2, "seed": 1}]},
    {"processing_class": "folder", "evaluation_strategy": "steps", "run_name": 7},
    {"model": "mine:net", "augmentation": ["shift_left"], "calibration": None},
    {"model": "mine:net", "augmentation": {"transforms": ["shift_left"], "reduce": "vote"}},
    {"model": "mine:net", "ensemble": {"members": ["a", "b"], "weights": "fit"}},
    {"model": "mine:net", "calibration": "vector", "ensemble": "runs/*"},
]
BAD: list[dict[str, Any]] = [
    {"learning_rat": 1},
    {"arguments": {"max_stps": 1}},
    {"max_steps": "many"},
    {"lr_scheduler_type": "cosin"},
    {"bf16": 1.5},
    {"framework": "jax"},
    {"metrics": ["acuracy"]},
    {"data": {"trian": "a.txt"}},
    {"callbacks": "mine:Callback"},
    {"members": [{"learning_rate": 1e-3}]},
    {"members": [{"learning_rate": 1e-3}, {"rate": 1e-2}]},
    {"calibration": "temprature"},
    {"augmentation": {"reduce": "vote"}},
    {"ensemble": []},
]


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(make_schema()))
    assert main(["schema", "extra"]) == 2


def test_every_key_of_a_configuration_is_in_it() -> None:
    schema = make_schema()
    assert {*SECTIONS, "callbacks", "framework", "arguments", *argument_fields(), *OLDER_NAMES} <= {
        *schema["properties"]
    }
    for name, item in argument_fields().items():
        assert schema["$defs"][name]["description"].startswith(item.metadata["help"])
    assert schema["$defs"]["learning_rate"]["default"] == 5e-5


def test_searches_are_checked() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(make_schema())
    search = {"space": {"learning_rate": {"low": 1e-5, "high": 1e-3}}, "n_trials": 4}
    assert check.is_valid({"model": "mine:Net", "search": search})
    assert not check.is_valid({"model": "mine:Net", "search": {**search, "trials": 4}})


def test_files_are_checked(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(json.dumps(make_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for content in GOOD:
        assert not [error.message for error in validator.iter_errors(content)], content
        path = tmp_path / "job.json"
        path.write_text(json.dumps(content))
        config = read_config(path)
        TFTrainingArguments(output_dir="x", **{k: v for k, v in config.arguments.items() if not k.startswith("fsdp")})
    for content in BAD:
        assert list(validator.iter_errors(content)), content


def test_the_defaults_are_accepted() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for schema in make_schema()["$defs"].values():
        if "default" in schema:
            jsonschema.validate(schema["default"], schema)


@pytest.mark.parametrize("content", [{"learning_rat": 1}, {"framework": "jax"}, {"data": {"trian": "a.txt"}}])
def test_the_command_refuses_what_the_schema_refuses(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "job.json").write_text(json.dumps(content))
    with pytest.raises(UsageError):
        read_config(tmp_path / "job.json")
