"""`paceline replay`: one update of a run again, from its folder alone."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.demo import text
from paceline.cli.demo.corpus import Corpus
from paceline.cli.demo.language_model import Shape
from paceline.cli.main import main
from paceline.cli.replay_options import read_replay_options
from paceline.core.journal import JOURNAL_FILE, read_rows

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x, y=None):
        guess = self.last(self.drop(torch.tanh(self.first(x))))
        return {"guess": guess} if y is None else {"loss": nn.functional.mse_loss(guess, y), "guess": guess}


def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": value, "y": value.sum()[None]} for value in x]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from data() * 3


def stream():
    return Endless()
"""

CONFIG = """
model: {module}:Net
data: {module}:{data}
arguments:
  output_dir: {folder}/run
  max_steps: 15
  per_device_train_batch_size: 4
  learning_rate: 3e-2
  save_steps: 5
  logging_steps: 4
  label_names: [y]
  report_to: jsonl
  disable_tqdm: true
  use_cpu: true
"""


def make_run(folder: Path, module: str, data: str = "data", content: str = MODULE) -> Path:
    (folder / f"{module}.py").write_text(content, encoding="utf-8")
    (folder / "job.yaml").write_text(CONFIG.format(module=module, data=data, folder=folder), encoding="utf-8")
    assert main(["train", str(folder / "job.yaml")]) == 0
    return folder / "run"


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.parametrize("step", [3, 5, 6, 12])
def test_a_job_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int) -> None:
    folder = make_run(tmp_path, f"replay_own_{step}")
    before = contents(folder)
    capsys.readouterr()
    moved = folder.rename(tmp_path / "moved")
    assert main(["replay", str(moved), "--step", str(step), "--show", "2", "--trust"]) == 0
    out = capsys.readouterr().out
    row = read_rows(moved / JOURNAL_FILE)[step - 1]
    start = "checkpoint-10" if step > 10 else "checkpoint-5" if step > 5 else "the beginning"
    assert f"to {step} from {start}." in out
    assert f"loss           {row.loss!r}\n" in out
    assert f"gradient norm  {row.grad_norm!r}\n" in out
    assert f"learning rate  {row.learning_rate!r}\n" in out
    assert "bit-exact      yes" in out
    assert "4 (indices in the training set)" in out
    assert len(re.findall(r"  sample \d+\n  \| x: float32 \(4,\): .+\n  \| y: float32 \(1,\)", out)) == 2
    if step == 12:
        assert main(["replay", str(moved), "--step", "12", "--json", "--trust"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["is_exact"], found["loss"], found["recorded"]["loss"]) == (True, row.loss, row.loss)
        assert len(found["sample_ids"]) == 4
    moved.rename(folder)
    assert contents(folder) == before


def test_json_is_alone_in_the_output_of_a_job_that_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = MODULE.replace("def data():\n", "def data():\n    print('data')\n")
    content = content.replace("        guess = ", "        print('forward')\n        guess = ")
    folder = make_run(tmp_path, "replay_loud", content=content)
    capsys.readouterr()
    assert main(["replay", str(folder), "--step", "3", "--json", "--trust"]) == 0
    output, other = capsys.readouterr()
    assert json.loads(output)["is_exact"]
    assert {"data", "forward"} <= set(other.splitlines())


def test_what_has_changed_is_not_called_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "replay_changed")
    job = json.loads((folder / "job.json").read_text())
    job["settings"]["given"]["arguments"]["learning_rate"] = 0.02
    (folder / "job.json").write_text(json.dumps(job))
    assert main(["replay", str(folder), "--step", "3", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit-exact      no" in out
    assert "(recorded: " in out


def test_a_stream_has_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "replay_stream", "stream")
    assert main(["replay", str(folder), "--step", "7", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit-exact      yes" in out
    assert "positions in the epoch" in out
    assert "24 25 26 27" in out


def test_wrong_steps_and_damaged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "replay_wrong")
    run = str(folder)

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["replay", *words, "--trust"]) == 2
        return capsys.readouterr().err

    assert "holds steps 1 to 15" in refused(run, "--step", "16")
    assert "a whole number, 1 or more" in refused(run, "--step", "0")
    assert "a whole number" in refused(run, "--step", "last")
    assert "needs a run and a step" in refused(run)
    assert "needs a run and a step" in refused("--step", "3")
    assert "--step, --show, --blame, --json and --trust, not --learning_rate" in refused(
        run, "--step", "3", "--learning_rate", "1"
    )
    assert "there is no folder" in refused(str(tmp_path / "none"), "--step", "3")
    assert "paceline.replay(trainer, step)" in refused(str(tmp_path), "--step", "3")
    good = (folder / "job.json").read_text()
    for damaged in ("{", "[]", "{}", good.replace('"train"', '"other"'), good.replace('"given"', '"taken"')):
        (folder / "job.json").write_text(damaged)
        assert "job.json" in refused(run, "--step", "3")
    (folder / "job.json").write_text(good)
    (tmp_path / "replay_wrong.py").rename(tmp_path / "elsewhere.py")
    import sys

    del sys.modules["replay_wrong"]
    assert "replay_wrong" in refused(run, "--step", "3")
    (folder / JOURNAL_FILE).unlink()
    assert "missing or empty" in refused(run, "--step", "3")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "replay_damaged")
    path = folder / "checkpoint-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert main(["replay", str(folder), "--step", "12", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "from checkpoint-5." in out
    assert "bit-exact      yes" in out


def test_the_demonstration_shows_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "log"]
    corpus = Corpus("a rhyme", tuple(" ".join(words[i % 7 :]) * 6 for i in range(8)), (" ".join(words) * 9,))
    small: dict[str, Any] = {
        "load_corpus": lambda: corpus,
        "VOCABULARY": 270,
        "CONTEXT": 16,
        "SAMPLE_TOKENS": 4,
        "MEASURE_SECONDS": 0.0,
        "choose_shape": lambda vocabulary: Shape(vocabulary, context=16, width=16, layers=1, heads=2),
    }
    for name, value in small.items():
        monkeypatch.setattr(text, name, value)
    folder = tmp_path / "run"
    assert main(["demo", "--output_dir", str(folder), "--disable_tqdm", "--use_cpu", "--max_steps", "16"]) == 0
    capsys.readouterr()
    assert main(["replay", str(folder), "--step", "11", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit-exact      yes" in out
    assert re.search(r"  \| .*(cat|mat|dog|log|sat)", out)
    monkeypatch.setattr(text, "load_corpus", lambda: Corpus("a rhyme", corpus.train[1:], corpus.held_out))
    assert main(["replay", str(folder), "--step", "11", "--trust"]) == 2
    assert "text_sha256 was" in capsys.readouterr().err


@pytest.mark.slow
def test_digits_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "run"
    words = ["--output_dir", str(folder), "--disable_tqdm", "--use_cpu", "--max_steps", "6", "--save_steps", "3"]
    assert main(["demo", "digits", "--save_strategy", "steps", "--eval_strategy", "no", *words]) == 0
    capsys.readouterr()
    assert main(["replay", str(folder), "--step", "5", "--show", "1", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit-exact      yes" in out
    assert re.search(r"  \| digit \d\n(  \| [ .:+*#@]{16}\n){7}", out)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    assert "--step N" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["variables.index", "checkpoint-2/variables.index", "job.json"])
def test_a_run_of_tensorflow_is_said_to_be_one(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text('{"command": "train --framework tf", "identity": {}, "settings": {}}')
    assert main(["replay", str(tmp_path), "--step", "1", "--trust"]) == 2
    assert "holds a run of TensorFlow: replay supports runs of torch only" in capsys.readouterr().err


def folder_of(tmp_path: Path, command: str = "train") -> Path:
    (tmp_path / "run").mkdir()
    given = {
        "path": str(tmp_path / "job.yaml"),
        "sections": {"model": {"factory": "evil_module:make", "n": 1}, "callbacks": [{"factory": "evil_other:Call"}]},
        "arguments": {},
    }
    content = {"command": command, "identity": {}, "settings": {"given": given}}
    (tmp_path / "run" / "job.json").write_text(json.dumps(content))
    for name in ("evil_module", "evil_other", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    return tmp_path / "run"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["", "n\n", "\n", None])
def test_nothing_that_a_job_names_is_imported_unasked(
    tmp_path: Path, answer: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer))
    assert main(["replay", str(folder_of(tmp_path)), "--step", "1"]) == 2
    shown = capsys.readouterr().err
    assert "job.json makes Python import evil_module:make, evil_other:Call, with" in shown
    assert ("give --trust" if answer is None else "nothing was run") in shown
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_who_trusts_a_job_says_so(tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert read_replay_options([str(folder_of(tmp_path)), "--step", "1"]).step == 1
    monkeypatch.setattr(sys, "stdin", None)
    assert read_replay_options([str(tmp_path / "run"), "--step", "1", "--trust"]).step == 1


def test_a_demonstration_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read_replay_options([str(folder_of(tmp_path, "demo")), "--step", "1"]).module == "demo.text"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"command":' * 50_000, "5", "null", '{"command": "train"}'])
def test_a_damaged_job_is_told_as_one(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text(content)
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "job.json" in capsys.readouterr().err
