"""`paceline runs`: the runs below a folder, whatever state they are in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer, scored

from paceline import TrainerCallback
from paceline.checkpoint.lock import acquire
from paceline.cli.main import main
from paceline.report.run_table import list_runs, varying
from paceline.report.status import read_status
from paceline.report.write import write_report


class Fail(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("the token hf_" + "A1b2" * 6 + " is not accepted")


class Terminate(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


class FailLate(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("broken")


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def train(folder: Path, **options: Any) -> None:
    make_trainer(folder, Classifier(), classification(), **{"max_steps": 6, **options}).train()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs in every state, and files that are none."""
    runs = tmp_path / "runs"
    train(
        runs / "a", learning_rate=1e-3, **scored([0.1, 0.5, 0.3], classification()), save_strategy="steps", save_steps=2
    )
    with pytest.raises(RuntimeError):
        train(runs / "group" / "b", callbacks=[Fail()], learning_rate=2e-3)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        train(runs / "c", callbacks=[Terminate()], save_strategy="steps", save_steps=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    train(runs / "d", callbacks=[StopEarly()])
    for name, content in (("broken", '{"format": 1, "argu'), ("foreign", '[{"name": "a run of another program"}]')):
        (runs / name).mkdir()
        (runs / name / "run.json").write_text(content)
    (runs / "newer").mkdir()
    (runs / "newer" / "run.json").write_text('{"format": 2}')
    return runs


def test_states_steps_and_problems(folder: Path) -> None:
    table = list_runs(folder)
    rows = {row.name: row for row in table.rows}
    assert {name: row.state for name, row in rows.items()} == {
        "a": "finished",
        "c": "interrupted",
        "d": "finished",
        "group/b": "failed",
    }
    assert (rows["a"].metric, rows["a"].best, rows["a"].step, rows["a"].max_steps) == ("score", 0.5, 6, 6)
    assert rows["group/b"].error is not None
    assert "RuntimeError: the token" in rows["group/b"].error
    assert "A1b2" not in rows["group/b"].error
    assert all(row.seconds is not None and row.seconds > 0 for row in rows.values())
    assert (rows["c"].step, rows["group/b"].step) == (3, 3)
    assert len(table.problems) == 3
    for name, text in (("broken", "not valid JSON"), ("foreign", "not the record"), ("newer", "format 2")):
        assert any(name in problem and text in problem for problem in table.problems)
    changed = dict(zip(rows, varying(table.rows), strict=True))
    assert changed["a"]["learning_rate"] == 1e-3
    assert "use_cpu" not in changed["a"]  # the same in all
    assert "learning_rate" not in changed["d"]


def test_table_sort_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["runs", str(folder), "--sort", "-name"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["name", "state", "step", "best", "time", "changed"]
    assert [line.split()[0] for line in lines[1:5]] == ["group/b", "d", "c", "a"]
    assert "score 0.5" in lines[4]
    assert "warning: " in out
    assert main(["runs", str(folder), "--json", "--sort=best"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"][0]["name"] == "a"
    assert len(told["problems"]) == 3
    assert main(["runs", str(folder), "--sort", "loss"]) == 2
    assert "there is no such column" in capsys.readouterr().err
    assert main(["runs", str(folder / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["runs"]) == 2
    (folder / "empty").mkdir()
    assert main(["runs", str(folder / "empty")]) == 0
    assert "There are no runs in" in capsys.readouterr().out


def test_a_run_whose_process_trains_is_running_and_one_that_was_killed_is_not(folder: Path) -> None:
    record = json.loads((folder / "d" / "run.json").read_text())
    del record["end"]
    record["plan"]["max_steps"] = 100
    (folder / "d" / "run.json").write_text(json.dumps(record))
    assert next(row.state for row in list_runs(folder).rows if row.name == "d") == "interrupted"
    lock = acquire(folder / "d")
    try:
        assert next(row.state for row in list_runs(folder).rows if row.name == "d") == "running"
    finally:
        lock.release()


def test_a_run_resumed_elsewhere_names_its_parent(folder: Path) -> None:
    checkpoint = str(folder / "c" / "checkpoint-2")
    trainer = make_trainer(folder / "e", Classifier(), classification(), max_steps=6)
    trainer.train(resume_from_checkpoint=checkpoint)
    again = make_trainer(folder / "c", Classifier(), classification(), max_steps=6, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=checkpoint)
    rows = {row.name: row for row in list_runs(folder).rows}
    assert rows["e"].parent == "c"
    assert rows["c"].parent is None
    assert rows["c"].state == "finished"


@pytest.mark.parametrize("before", [4, 8])
def test_a_run_that_was_resumed_with_more_steps_and_killed_is_not_finished(tmp_path: Path, before: int) -> None:
    """Its checkpoint and its page are of the start before, which was shorter, or went on to steps that do not count."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    train(tmp_path, max_steps=before, **options)
    page = (tmp_path / "report.html").read_bytes()
    options |= {"max_steps": 12, "callbacks": [FailLate()]}
    with pytest.raises(RuntimeError):
        make_trainer(tmp_path, Classifier(), classification(), **options).train(str(tmp_path / "checkpoint-4"))
    record = json.loads((tmp_path / "run.json").read_text())
    del record["end"]  # as after a kill, which leaves no new page either
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "report.html").write_bytes(page)
    (row,) = list_runs(tmp_path).rows
    status = read_status(tmp_path)
    for found in (row, status):
        assert (found.state, found.step, found.max_steps) == ("interrupted", 5, 12)
    text = re.sub(r"<[^>]*>", " ", write_report([tmp_path]).read_text("utf-8"))
    assert re.search(r"interrupted\s+optimizer steps\s+5 of 12", text)


def test_a_single_run_is_a_folder_too(folder: Path) -> None:
    table = list_runs(folder / "a")
    assert [row.name for row in table.rows] == ["a"]
    assert not table.problems


@pytest.mark.slow
def test_neither_command_imports_torch(folder: Path) -> None:
    code = "import sys\nfrom paceline.cli.main import main\nmain(sys.argv[1:])\nassert 'torch' not in sys.modules"
    for words in (["runs", str(folder)], ["compare", str(folder / "a"), str(folder / "d")]):
        subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)


def test_numbers_and_text_of_a_foreign_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"format": 1, "end": {"state": "failed", "seconds": %s, "best_metric": %s, "error": "\\u001b[2Jgone"}}'
    for name, number in (("a", "1e999"), ("b", "1" + "0" * 400), ("c", "NaN")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text % (number, number))
    assert [(row.seconds, row.best) for row in list_runs(tmp_path).rows] == [(None, None)] * 3
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "gone" in out
