"""The command line: every way to write an option, and what is said to a wrong one."""

import pytest

from paceline.args.coercion import own_hints
from paceline.cli.errors import UsageError
from paceline.cli.options import Given, Known, argument_fields, parse_options

KNOWN = Known(("CONFIG.yaml",), {"fresh": True, "prompt": False}, ("model", "data"))


def parse(*words: str) -> Given:
    return parse_options(words, KNOWN)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--learning_rate", "3e-4"], {"learning_rate": "3e-4"}),
        (["--learning-rate=3e-4"], {"learning_rate": "3e-4"}),
        (["--max_steps", "-1"], {"max_steps": "-1"}),
        (["--bf16"], {"bf16": True}),
        (["--bf16", "false"], {"bf16": "false"}),
        (["--bf16", "--fp16", "no"], {"bf16": True, "fp16": "no"}),
        (["--no_dataloader_pin_memory"], {"dataloader_pin_memory": False}),
        (["--tf32"], {"tf32": True}),
        (["--label_names", "a", "b"], {"label_names": ["a", "b"]}),
        (["--report_to", "jsonl"], {"report_to": "jsonl"}),
        (["--lr_scheduler_kwargs", '{"num_cycles": 2}'], {"lr_scheduler_kwargs": '{"num_cycles": 2}'}),
        (["--evaluation_strategy", "epoch"], {"evaluation_strategy": "epoch"}),
        (["--group_by_length"], {"group_by_length": True}),
        (["--max_steps", "1", "--max_steps", "2"], {"max_steps": "2"}),
    ],
)
def test_arguments_are_read(words: list[str], arguments: dict[str, object]):
    assert parse(*words).arguments == arguments


def test_a_switch_does_not_swallow_what_follows_it():
    given = parse("--bf16", "job.yaml", "--fresh")
    assert given.positional == ["job.yaml"]
    assert given.arguments == {"bf16": True}
    assert given.own == {"fresh": True}


def test_types_replaced_by_the_parser_of_transformers_change_nothing(monkeypatch: pytest.MonkeyPatch):
    for name in ("bf16", "label_names"):  # HfArgumentParser sets `field.type` to the resolved hint
        monkeypatch.setattr(argument_fields()[name], "type", own_hints()[name])
    assert parse("--bf16", "--label_names", "a", "b").arguments == {"bf16": True, "label_names": ["a", "b"]}


def test_sections_are_told_apart_from_arguments():
    given = parse("--model.n_layer", "2", "--data=other.txt", "--data.block-size", "64")
    assert given.sections == [("model", "n_layer", "2"), ("data", "", "other.txt"), ("data", "block_size", "64")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learnin_rate", "1"], "no option --learnin_rate; did you mean '--learning_rate'"),
        (["--modle.x", "1"], "no option --modle.x; did you mean '--model'"),
        (["--frsh"], "did you mean '--fresh'"),
        (["--max_steps"], "--max_steps needs a value"),
        (["--prompt", "--fresh"], "--prompt needs a value"),
        (["--fresh=yes"], "--fresh takes no value"),
        (["--no_bf16=1"], "write --no_bf16 alone"),
        (["--model"], "--model needs a value"),
        (["a.yaml", "b.yaml"], "'b.yaml' is one value too many"),
        (["-x", "-y"], "'-y' is one value too many"),
        (["a.yaml", "learning_rate=1"], "options begin with --; did you mean '--learning_rate'"),
        (["a.yaml", "-lr", "1"], "options begin with --; did you mean '--learning_rate'"),
        (["--no_learning_rate"], "no option --no_learning_rate"),
    ],
)
def test_a_wrong_option_is_said(words: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        parse(*words)
