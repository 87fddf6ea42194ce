"""The configuration file: what it may say, what the command line changes, and what is said to a wrong key."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.config import JobConfig, read_job
from paceline.cli.errors import UsageError

FULL = """
model: {factory: "mine:Net", width: 16}
data: {train: a.jsonl, eval_fraction: 0.1, block_size: 64}
preprocess: mine:prepare
callbacks: [mine:Callback]
compute_metrics: mine:metrics
learning_rate: 3e-4
arguments:
  max_steps: 10
  report_to: none
"""


def read(folder: Path, text: str, *words: str) -> JobConfig:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return read_job([str(path), *words])[0]


def test_sections_and_arguments_are_sorted(tmp_path: Path):
    config = read(tmp_path, FULL)
    assert config.folder == tmp_path
    assert config.get("model") == {"factory": "mine:Net", "width": 16}
    assert config.arguments == {"learning_rate": 3e-4, "max_steps": 10, "report_to": "none"}
    assert set(config.sections) == {"model", "data", "preprocess", "callbacks", "compute_metrics"}


def test_json_is_read_too(tmp_path: Path):
    path = tmp_path / "job.json"
    path.write_text('{"model": "gpt", "data": "a.txt", "max_steps": 3}', encoding="utf-8")
    config, fresh = read_job(["--fresh", str(path)])
    assert fresh
    assert config.arguments == {"max_steps": 3}


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["--model.width", "32"], "model", {"factory": "mine:Net", "width": 32}),
        (["--model.inner.depth", "2"], "model", {"factory": "mine:Net", "width": 16, "inner": {"depth": 2}}),
        (["--model", "other:Net"], "model", "other:Net"),
        (["--data", "[b.jsonl, c.jsonl]"], "data", ["b.jsonl", "c.jsonl"]),
        (["--preprocess.num_proc", "2"], "preprocess", {"factory": "mine:prepare", "num_proc": 2}),
        (["--tokenizer.path", "tok"], "tokenizer", {"path": "tok"}),
        (["--processing_class", "tok"], "tokenizer", "tok"),
    ],
)
def test_the_command_line_wins(tmp_path: Path, words: list[str], name: str, expected: Any):
    assert read(tmp_path, FULL, *words).get(name) == expected


def test_arguments_of_the_command_line_win(tmp_path: Path):
    config = read(tmp_path, FULL, "--learning_rate", "1e-2", "--bf16")
    assert config.arguments == {"learning_rate": "1e-2", "max_steps": 10, "report_to": "none", "bf16": True}


def test_a_section_that_is_a_name_becomes_a_mapping(tmp_path: Path):
    text = "model: gpt\ndata: a.txt"
    assert read(tmp_path, text, "--model.n_layer", "2").get("model") == {"path": "gpt", "n_layer": 2}
    assert read(tmp_path, text, "--data.block_size", "8").get("data") == {"train": "a.txt", "block_size": 8}


def test_the_framework_is_of_the_file_or_the_command_line(tmp_path: Path):
    assert read(tmp_path, FULL).framework == "torch"
    text = f"{FULL}framework: tf\n"
    config = read(tmp_path, text, "--xla", "--poly_power", "2")
    assert (config.framework, config.arguments["xla"], config.arguments["poly_power"]) == ("tf", True, "2")
    assert read(tmp_path, text, "--framework", "torch").framework == "torch"
    assert read(tmp_path, FULL + "xla: true\n", "--framework=tf").framework == "tf"
    with pytest.raises(UsageError, match="poly_power is an option of TensorFlow: give --framework tf"):
        read(tmp_path, FULL + "poly_power: 2\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("framework: jax", "framework: jax: expected one of torch, tf"),
        ("framwork: tf", "unknown key 'framwork'; did you mean 'framework'"),
        ("modle: x", "unknown key 'modle'; did you mean 'model'"),
        ("learning_rat: 1", "did you mean 'learning_rate'"),
        ("arguments: {max_stps: 1}", "arguments: unknown key 'max_stps'; did you mean 'max_steps'"),
        ("arguments: 3", "arguments: expected a mapping, not an int"),
        ("data: {trian: a.txt}", "data: unknown key 'trian'; did you mean 'train'"),
        ("data: {train: a.txt, eval: b.txt, eval_fraction: 0.1}", "exclude each other"),
        ("data: {train: a.txt, eval_fraction: 2}", "not between 0 and 1"),
        ("max_steps: 1\narguments: {max_steps: 2}", "is given twice"),
        ("max_steps: 1\nmax_steps: 2", "'max_steps' is given twice"),
        ("tokenizer: a\nprocessing_class: b", "are the same"),
        ("callbacks: mine:Callback", "callbacks: expected a list"),
        ("compute_metrics: [1]", "compute_metrics: expected text or a mapping"),
        ("preprocess: {num_proc: 2}", "'factory' is missing"),
        ("a: [", "cannot be read"),
        ("- a", "holds a list"),
    ],
)
def test_a_wrong_file_is_said_with_its_name(tmp_path: Path, text: str, message: str):
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path, text)
    assert "job.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--callbacks.x", "1"], "no option --callbacks.x"),
        (["--model.factory.x", "1"], "'factory' holds text and has no keys"),
        (["--model.", "1"], "a name is missing"),
        (["--data.trian", "x"], "did you mean 'train'"),
        (["--model", "[1"], "is not valid YAML"),
    ],
)
def test_a_wrong_override_is_said(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, FULL, *words)


def test_a_missing_file_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match=r"nothing\.yaml cannot be read: No such file"):
        read_job([str(tmp_path / "nothing.yaml")])
    with pytest.raises(UsageError, match="train needs a file"):
        read_job(["--max_steps", "3"])


def test_what_is_no_file_or_empty_is_said_with_the_nearest_name(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("model: a")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    with pytest.raises(UsageError, match=r"jbo\.yaml cannot be read: .*did you mean 'job\.yaml'"):
        read_job([str(tmp_path / "jbo.yaml")])
    with pytest.raises(UsageError, match=r"is a folder; expected a file, YAML or JSON \(empty\.yaml, job\.yaml\)"):
        read_job([str(tmp_path)])
    with pytest.raises(UsageError, match=r"empty\.yaml is empty; expected 'name: value' lines"):
        read_job([str(tmp_path / "empty.yaml")])
    with pytest.raises(UsageError, match="null byte"):
        read_job(["a\0.yaml"])


def test_a_file_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*values: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)  # the superuser may read every file
    with pytest.raises(UsageError, match=r"job\.yaml cannot be read: Permission denied"):
        read_job([str(tmp_path / "job.yaml")])


def test_a_file_that_is_no_text_is_said(tmp_path: Path):
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UsageError, match=r"job\.yaml"):
        read_job([str(tmp_path / "job.yaml")])
