"""The parser's contract: flags of every type, files, several dataclasses, older names."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from paceline.args.parser import HfArg, HfArgumentParser
from paceline.args.seq2seq import Seq2SeqTrainingArguments
from paceline.args.training import TrainingArguments


class Size(Enum):
    SMALL = "small"
    LARGE = 42


@dataclass
class Data:
    path: str
    num_rows: int = 5
    rate: float = 0.5
    shuffle: bool = True
    cache: bool = False
    strict: bool | None = None
    size: Size | str = Size.SMALL
    mode: Literal["fast", "slow", 3] = "fast"
    columns: list[str] = field(default_factory=lambda: ["text"])
    ids: list[int] = field(default_factory=list)
    limit: Optional[int] = None  # noqa: UP045  As users write it.
    extra: dict[str, Any] | None = None
    either: dict[str, Any] | str | None = None
    where: Path | None = None
    hidden: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.size = Size(self.size)


@dataclass
class Model:
    name: str = HfArg(default="tiny", aliases=["-n", "--model"], help="Which model.")
    layers: int = 2


def parse(kinds: Any, line: str, **keywords: Any) -> Any:
    return HfArgumentParser(kinds).parse_args_into_dataclasses(line.split(), look_for_args_file=False, **keywords)


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("", {"num_rows": 5, "shuffle": True, "cache": False, "size": Size.SMALL, "columns": ["text"], "hidden": 1}),
    ("--num_rows 7 --rate 1e-3", {"num_rows": 7, "rate": 1e-3}),
    ("--num-rows 7", {"num_rows": 7}),
    ("--cache", {"cache": True}),
    ("--cache true --shuffle no", {"cache": True, "shuffle": False}),
    ("--no_shuffle", {"shuffle": False}),
    ("--no-shuffle", {"shuffle": False}),
    ("--strict true", {"strict": True}),
    ("--strict 0", {"strict": False}),
    ("--size 42", {"size": Size.LARGE}),
    ("--mode slow", {"mode": "slow"}),
    ("--mode 3", {"mode": 3}),
    ("--columns a b --ids 1 2", {"columns": ["a", "b"], "ids": [1, 2]}),
    ("--columns a", {"columns": ["a"]}),
    ("--limit 3", {"limit": 3}),
    ('--extra {"a":1}', {"extra": {"a": 1}}),
    ('--either {"a":1}', {"either": {"a": 1}}),
    ("--either file.json", {"either": "file.json"}),
    ("--where a/b", {"where": Path("a/b")}),
]


@pytest.mark.parametrize(("line", "expected"), FLAGS)
def test_flags(line: str, expected: dict[str, Any]) -> None:
    (data,) = parse(Data, f"--path p {line}")
    assert {name: getattr(data, name) for name in expected} == expected


@pytest.mark.parametrize(
    "line", ["", "--path p --num_rows x", "--path p --mode medium", "--path p --cache maybe", "--path p --extra {a"]
)
def test_wrong_lines_exit_with_a_message(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Data, line)
    assert "error" in capsys.readouterr().err


def test_several_dataclasses_a_namespace_and_the_rest() -> None:
    parser = HfArgumentParser([Data, Model])
    parser.add_argument("--by_hand", type=int, default=1)
    line = "--path p -n big --by_hand 4 --stray 5"
    data, model, namespace, rest = parser.parse_args_into_dataclasses(
        line.split(), return_remaining_strings=True, look_for_args_file=False
    )
    assert (data.path, model, namespace.by_hand, rest) == ("p", Model("big"), 4, ["--stray", "5"])
    with pytest.raises(ValueError, match=r"are not used by .*: \['--layer_s', '5'\]; did you mean '--layers'"):
        parse(Model, "--layer_s 5")
    assert parse(Model, "--model huge")[0].name == "huge"


def test_words_from_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--layers", "3"])
    assert HfArgumentParser(Model).parse_args_into_dataclasses() == (Model(layers=3),)
    script.with_suffix(".args").write_text("--name big\n--layers 9")
    assert HfArgumentParser(Model).parse_args_into_dataclasses() == (Model("big", 3),)
    assert HfArgumentParser(Model).parse_args_into_dataclasses(look_for_args_file=False) == (Model(layers=3),)


def test_argument_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.args", tmp_path / "second.args"
    first.write_text("--name one --layers 1")
    second.write_text("--name two")
    parser = HfArgumentParser(Model)
    assert parser.parse_args_into_dataclasses([], args_filename=str(first)) == (Model("one", 1),)
    words = ["--from", str(first), "--from", str(second), "--layers", "7"]
    assert parser.parse_args_into_dataclasses(words, args_file_flag="--from") == (Model("two", 7),)


def test_dicts_and_files(tmp_path: Path) -> None:
    values = {"path": "p", "num_rows": 3, "name": "big"}
    expected = (Data("p", 3), Model("big"))
    parser = HfArgumentParser((Data, Model))
    assert parser.parse_dict(values) == expected
    with pytest.raises(ValueError, match=r"\['lyers'\]; did you mean 'layers'"):
        parser.parse_dict({**values, "lyers": 1})
    assert parser.parse_dict({**values, "lyers": 1}, allow_extra_keys=True) == expected
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("path: p\nnum_rows: 3\nname: big\n")
    assert parser.parse_json_file(tmp_path / "a.json") == expected
    assert parser.parse_yaml_file(tmp_path / "a.yaml") == expected


def test_groups_and_metadata() -> None:
    @dataclass
    class Grouped:
        depth: int = field(default=1, metadata={"help": "How deep.", "metavar": "N", "choices": [1, 2]})

    Grouped._argument_group_name = "shape"  # type: ignore[attr-defined]
    Grouped.__annotations__["depth"] = int  # A local class under postponed annotations.
    text = HfArgumentParser(Grouped).format_help()
    assert "shape:" in text
    assert "How deep. (default: 1)" in text
    with pytest.raises(SystemExit):
        parse(Grouped, "--depth 3")


def test_types_that_one_flag_cannot_tell_apart() -> None:
    Unclear = dataclasses.make_dataclass("Unclear", [("x", int | float, 1)])
    with pytest.raises(ValueError, match=r"'x' has the type int \| float: one flag takes one type"):
        HfArgumentParser(Unclear)
    Lost = dataclasses.make_dataclass("Lost", [("x", "Nowhere", 1)])
    with pytest.raises(RuntimeError, match="types of Lost cannot be resolved"):
        HfArgumentParser(Lost)
    assert HfArgumentParser().parse_args_into_dataclasses([], look_for_args_file=False) == ()


TRAINING: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--output_dir out --learning_rate 1e-4 --bf16", {"output_dir": "out", "learning_rate": 1e-4, "bf16": True}),
    ("--no_dataloader_pin_memory", {"dataloader_pin_memory": False}),
    ("--no-remove-unused-columns", {"remove_unused_columns": False}),
    ("--report_to csv jsonl", {"report_to": ["csv", "jsonl"]}),
    ("--report_to csv", {"report_to": ["csv"]}),
    ("--tf32 true", {"tf32": True}),
    ("--eval_strategy steps --eval_steps 0.1", {"eval_strategy": "steps", "eval_steps": 0.1}),
    ("--include_num_input_tokens_seen true", {"include_num_input_tokens_seen": "all"}),
    ("--include_for_metrics inputs loss", {"include_for_metrics": ["inputs", "loss"]}),
    ("--label_names a b", {"label_names": ["a", "b"]}),
    ('--lr_scheduler_kwargs {"num_cycles":2}', {"lr_scheduler_kwargs": {"num_cycles": 2}}),
    ("--gradient_checkpointing true", {"activation_checkpointing": True}),
    ("--gradient-checkpointing true", {"activation_checkpointing": True}),
    ("--loss_weight tokens --no_stop_signals", {"loss_weight": "tokens", "stop_signals": False}),
    ("--evaluation_strategy epoch", {"eval_strategy": "epoch"}),
    ("--warmup_ratio 0.1 --group_by_length", {"warmup_steps": 0.1, "train_sampling_strategy": "group_by_length"}),
    ("--no_cuda --overwrite_output_dir", {"use_cpu": True}),
    ("--per_gpu_train_batch_size 3", {"per_device_train_batch_size": 3}),
    ("--generation_config folder", {"generation_config": "folder"}),
    ("--resume_from_checkpoint true", {"resume_from_checkpoint": True}),
]


@pytest.mark.parametrize(("line", "expected"), TRAINING)
def test_training_arguments(line: str, expected: dict[str, Any]) -> None:
    (args,) = parse(Seq2SeqTrainingArguments, line)
    assert {name: getattr(args, name) for name in expected} == expected
    assert args == Seq2SeqTrainingArguments(**expected)


def test_dicts_take_older_names_too() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_dict({"output_dir": "x", "evaluation_strategy": "epoch"})
    assert args.eval_strategy == "epoch"


def test_help_shows_every_option_and_no_older_name() -> None:
    text = HfArgumentParser(TrainingArguments).format_help()
    for item in dataclasses.fields(TrainingArguments):
        assert f"--{item.name}" in text
    assert "--evaluation_strategy" not in text
    assert isinstance(HfArgumentParser(TrainingArguments), argparse.ArgumentParser)
