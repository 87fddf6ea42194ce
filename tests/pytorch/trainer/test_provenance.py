"""The record of a run: code, data, packages, hardware, its parent, and how it ended."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from small_models import Classifier, classification, make_trainer, scored

from paceline import TrainerCallback
from paceline.core import provenance
from paceline.core.lineage import PACKAGES_FILE
from paceline.core.machine import describe_hardware, installed_packages
from paceline.core.record import update_record
from paceline.hub.contents import files_of_output


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text("rate = 1\n")
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "trial"], ["add", "."], [*names, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    monkeypatch.chdir(folder)
    return folder


def test_a_record_holds_what_made_a_run(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("rate = 2\n")
    data = classification(26)
    options = {"max_steps": 4, **scored([0.5, 0.4], data[:10])}
    make_trainer(tmp_path / "a", Classifier(), data, **{**options, "save_strategy": "steps", "save_steps": 2}).train()
    record = record_of(tmp_path / "a")
    assert record["git"]["branch"] == "trial"
    assert record["git"]["dirty"] is True
    diff = (tmp_path / "a" / "uncommitted.diff").read_bytes()
    assert b"-rate = 1\n+rate = 2\n" in diff
    assert record["git"]["diff"]["sha256"] == hashlib.sha256(diff).hexdigest()
    assert record["data"]["train"]["length"] == 26
    assert record["data"]["eval"]["rows"].items() >= {("0", record["data"]["train"]["rows"]["0"])}
    packages = (tmp_path / "a" / PACKAGES_FILE).read_text().splitlines()
    assert f"torch=={importlib.metadata.version('torch')}" in packages
    assert record["packages"]["count"] == len(packages)
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert record["hardware"]["cores"] == os.cpu_count()
    assert record["extra"]["parameter_dtypes"] == ["torch.float32"]
    assert record["parent"] is None
    assert (record["end"]["state"], record["end"]["step"], record["end"]["best_metric"]) == ("finished", 4, 0.5)


def test_a_resumed_run_names_its_parent_and_keeps_its_files(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("rate = 2\n")
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path / "a", Classifier(), classification(), max_steps=4, **options).train()
    first = record_of(tmp_path / "a")
    (repository / "train.py").write_text("rate = 3\n")
    again = make_trainer(tmp_path / "a", Classifier(), classification(), max_steps=6, **options)
    again.train(resume_from_checkpoint=True)
    record = record_of(tmp_path / "a")
    assert record["parent"] == {"run": first["run"]["id"], "start": first["run"]["starts"][0][0], "step": 4}
    assert "+rate = 3" in (tmp_path / "a" / "uncommitted.diff").read_text()
    assert "+rate = 2" in (tmp_path / "a" / "uncommitted.1.diff").read_text()
    assert not (tmp_path / "a" / "packages.1.txt").exists()
    assert record["history"][0]["end"]["state"] == "finished"
    subprocess.run(["git", "checkout", "-q", "train.py"], cwd=repository, check=True)
    again.train()
    assert record_of(tmp_path / "a")["git"]["diff"] is None
    assert not (tmp_path / "a" / "uncommitted.diff").exists()


class Edit(TrainerCallback):
    """Edits the code while the run is going on."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            time.sleep(0.3)
            Path("train.py").write_text("rate = 9\n")


def test_the_diff_is_that_of_the_beginning(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("rate = 2\n")
    make_trainer(tmp_path / "a", Classifier(), classification(), max_steps=4, callbacks=[Edit()]).train()
    assert "+rate = 2" in (tmp_path / "a" / "uncommitted.diff").read_text()


class Raise(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise self.error


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("a bad batch\nmore"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(3), "interrupted")],
)
def test_an_error_is_recorded_and_goes_on(tmp_path: Path, error: BaseException, state: str) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(), max_steps=4, callbacks=[Raise(error)])
    with pytest.raises(type(error)):
        trainer.train()
    end = record_of(tmp_path)["end"]
    assert (end["state"], end["step"]) == (state, 2)
    assert end["error"].splitlines() == [end["error"]]
    assert record_of(tmp_path)["packages"]["count"] > 10
    assert not [name for name in trainer.callback_handler.callback_list.splitlines() if "Record" in name]


def test_the_numbers_of_a_run_do_not_depend_on_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples draw random numbers of the process when they are read, in the middle of which they are fingerprinted."""

    class Noisy(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return {**row, "x": row["x"] + torch.rand(8)}

    found = []
    for place in range(2):
        data = Noisy(classification(26))
        trainer = make_trainer(tmp_path / str(place), Classifier(dropout=0.3), data, num_train_epochs=2)
        trainer.train()
        found.append([row.get("loss") for row in trainer.state.log_history])
        monkeypatch.setattr(provenance, "fingerprints", lambda datasets, **options: {})
    assert found[0] == found[1]
    assert "random" in record_of(tmp_path / "0")["data"]["train"]["note"]


def test_what_fails_in_the_record_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        raise RuntimeError("no such luck")

    for name in ("read_changes", "fingerprints"):
        monkeypatch.setattr(provenance, name, fail)
    with caplog.at_level(logging.WARNING, "paceline"):
        make_trainer(tmp_path, Classifier(), classification(), max_steps=3).train()
    record = record_of(tmp_path)
    assert record["provenance_error"] == "RuntimeError: no such luck"
    assert record["end"]["state"] == "finished"
    assert "no such luck" in caplog.text


def test_only_the_record_of_the_same_start_is_changed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(), max_steps=2)
    trainer.train()
    mark = trainer.run_mark
    assert mark is not None
    path = tmp_path / "run.json"
    update_record(path, mark, {"git": {"note": "x"}, "new": [1]})
    record = record_of(tmp_path)
    assert record["git"]["note"] == "x"
    assert "branch" in record["git"]
    assert record["new"] == [1]
    before = path.read_bytes()
    update_record(path, mark.resumed(1), {"new": [2]})
    assert path.read_bytes() == before
    path.write_text("{")
    update_record(path, mark, {"new": [2]})
    assert path.read_text() == "{"


def test_packages_and_hardware() -> None:
    packages = installed_packages()
    assert packages == sorted(packages, key=lambda line: line.split("==")[0])
    assert len({line.split("==")[0] for line in packages}) == len(packages)
    assert any(line.startswith("pyyaml==") for line in packages)
    hardware = describe_hardware()
    assert hardware["processor"]
    assert hardware["memory_gib"] > 0


@pytest.mark.slow
def test_of_two_processes_the_first_writes(tmp_path: Path) -> None:
    processes.finish(processes.start("provenance_job.py", 2, str(tmp_path)))
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["1", "0"]
    record = record_of(tmp_path / "out")
    assert record["end"]["state"] == "finished"
    assert record["data"]["train"]["length"] == 48
    assert record["plan"]["world_size"] == 2


def test_code_and_packages_are_not_pushed(tmp_path: Path) -> None:
    for name in ("uncommitted.diff", "uncommitted.1.diff", "packages.txt", "run.json", "other.diff"):
        (tmp_path / name).write_text("x")
    assert sorted(files_of_output(tmp_path)) == ["other.diff", "run.json"]
