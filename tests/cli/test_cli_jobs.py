"""The folder of a job: what it holds is recognized, nothing is deleted, a stop and an end are told apart."""

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.checkpoint.folders import staged
from paceline.cli.errors import UsageError
from paceline.cli.jobs import Job, is_finished, move_aside, noted_signals, open_job, train_job

IDENTITY = {"model": "small", "shape": {"width": 4}}
LENGTH = {"max_steps": 9, "num_train_epochs": 3.0}


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    with staged(path) as temporary:
        (temporary / "trainer_state.json").write_text(json.dumps({"global_step": step}), encoding="utf-8")
        (temporary / "model.safetensors").write_bytes(b"weights")
    return path


def reopen(folder: Path, identity: dict[str, Any] = IDENTITY, command: str = "demo", **more: Any) -> Job:
    return open_job(folder, command, identity, **{"fresh": False, "say": lambda line: None, **more})


class FakeTrainer:
    """Stands where a Trainer would, and stops as it is told."""

    def __init__(self, steps: int, stop: Any = None) -> None:
        self.state = SimpleNamespace(global_step=0, max_steps=9)
        self.steps, self.stop = steps, stop
        self.was_stopped = steps < 9
        self.resumed_from: Any = "never called"

    def train(self, resume_from_checkpoint: Any = None) -> None:
        self.resumed_from = resume_from_checkpoint
        self.state.global_step = self.steps
        if self.stop is KeyboardInterrupt:
            raise KeyboardInterrupt
        if self.stop is not None:
            os.kill(os.getpid(), self.stop)


def test_an_empty_folder_is_a_new_job(tmp_path: Path):
    job = reopen(tmp_path / "run")
    assert (job.checkpoint, job.finished, job.settings) == (None, None, {})


def test_a_job_is_gone_on_with_from_its_newest_good_checkpoint(tmp_path: Path):
    job = reopen(tmp_path)
    job.settings["max_steps"] = 9
    job.write()
    checkpoint(tmp_path, 3)
    damaged = checkpoint(tmp_path, 6)
    (damaged / "model.safetensors").write_bytes(b"wEights")
    said: list[str] = []
    again = reopen(tmp_path, say=said.append)
    assert again.checkpoint == tmp_path / "checkpoint-3"
    assert again.settings == {"max_steps": 9}
    assert "checkpoint-6 is skipped" in said[0]


@pytest.mark.parametrize(
    ("identity", "command", "message"),
    [
        ({"model": "big", "shape": {"width": 4}}, "demo", 'model was "small", now it is "big"'),
        ({"model": "small"}, "demo", "shape was"),
        (IDENTITY, "train", "holds a job of `paceline demo`"),
    ],
)
def test_another_job_in_the_folder_is_an_error(tmp_path: Path, identity: dict[str, Any], command: str, message: str):
    reopen(tmp_path).write()
    with pytest.raises(UsageError, match=message):
        reopen(tmp_path, identity, command)


def test_checkpoints_of_somebody_else_are_an_error_unless_they_are_asked_for(tmp_path: Path):
    checkpoint(tmp_path, 3)
    with pytest.raises(UsageError, match="holds checkpoint-3 of a run that this command did not start"):
        reopen(tmp_path)
    assert reopen(tmp_path, resume="true").checkpoint is None
    assert reopen(tmp_path, resume=True).checkpoint is None  # what TrainingArguments makes of the word


def test_a_checkpoint_that_was_named_is_looked_at_first(tmp_path: Path):
    damaged = checkpoint(tmp_path, 3)
    (damaged / "model.safetensors").write_bytes(b"wEights")
    none_good, nowhere = "no valid checkpoint", "no folder"
    for resume, message in (
        (True, none_good), ("true", none_good), ("nowhere", nowhere), (str(damaged), "is damaged"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            reopen(tmp_path, resume=resume)
    assert reopen(tmp_path, resume="false").checkpoint is None


@pytest.mark.parametrize("content", ["{", "[]", '{"identity": 3}'])
def test_a_damaged_note_is_an_error(tmp_path: Path, content: str):
    (tmp_path / "job.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"job\.json"):
        reopen(tmp_path)


def test_starting_over_moves_the_earlier_run_aside(tmp_path: Path):
    folder = tmp_path / "run"
    for _ in range(2):
        job = reopen(folder, fresh=True)
        assert job.checkpoint is None
        job.write()
        checkpoint(folder, 3)
    reopen(folder, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-earlier-1", "run-earlier-2"]
    assert (tmp_path / "run-earlier-2" / "checkpoint-3").is_dir()


def test_starting_over_leaves_other_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="was not made by this command"):
        move_aside(tmp_path, print)
    (tmp_path / "job.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="holds the current folder"):
        move_aside(tmp_path, print)
    assert (tmp_path / "thesis.txt").exists()


def test_a_full_disk_names_the_file_and_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = reopen(tmp_path)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left on device: '.*job\.json'"):
        job.write()
    assert not list(tmp_path.iterdir())


def test_a_run_to_its_end_is_noted_with_its_length(tmp_path: Path):
    job = reopen(tmp_path)
    assert train_job(FakeTrainer(9), job, LENGTH, print) == 0  # type: ignore[arg-type]
    job.write()
    for name in ("trainer_state.json", "model.safetensors"):
        assert not is_finished(reopen(tmp_path), LENGTH)
        (tmp_path / name).write_bytes(b"x")
    assert is_finished(reopen(tmp_path), LENGTH)
    assert not is_finished(reopen(tmp_path), {**LENGTH, "max_steps": 12})


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_where_it_goes_on(tmp_path: Path, stop: Any, code: int, capsys: pytest.CaptureFixture[str]):
    job = reopen(tmp_path)
    job.write()
    checkpoint(tmp_path, 4)
    job = reopen(tmp_path)
    trainer = FakeTrainer(5, stop)
    assert train_job(trainer, job, LENGTH, print) == code  # type: ignore[arg-type]
    assert trainer.resumed_from == str(tmp_path / "checkpoint-4")
    output = capsys.readouterr().out
    assert "Resuming from" in output
    assert "Stopped at step 5 of 9:" in output
    assert "checkpoint-4 is complete" in output
    assert reopen(tmp_path).finished is None


def test_a_stop_names_the_options_that_would_start_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = reopen(tmp_path, fresh=True)
    checkpoint(tmp_path, 4)
    train_job(FakeTrainer(5, KeyboardInterrupt), job, LENGTH, print)  # type: ignore[arg-type]
    assert "and the same command without --fresh resumes from there" in capsys.readouterr().out
    again = "the same command without --resume_from_checkpoint"
    assert reopen(tmp_path, resume=str(tmp_path / "checkpoint-4")).again == again
    assert reopen(tmp_path, resume=True).again == "the same command"


def test_without_a_checkpoint_a_stop_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train_job(FakeTrainer(5, KeyboardInterrupt), reopen(tmp_path), LENGTH, print) == 130  # type: ignore[arg-type]
    assert "no checkpoint has been written" in capsys.readouterr().out


def test_a_signal_at_the_very_end_is_no_stop(tmp_path: Path):
    assert train_job(FakeTrainer(9, signal.SIGTERM), reopen(tmp_path), LENGTH, print) == 0  # type: ignore[arg-type]


def test_a_signal_that_cut_the_last_step_short_is_a_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last evaluation and the best model are missing, and the present one is not the result."""
    trainer = FakeTrainer(9, signal.SIGTERM)
    trainer.was_stopped = True
    job = reopen(tmp_path)
    assert train_job(trainer, job, LENGTH, print) == 143  # type: ignore[arg-type]
    assert job.finished is None
    assert "Stopped at step 9 of 9" in capsys.readouterr().out


def test_a_named_checkpoint_wins_over_the_newest(tmp_path: Path):
    reopen(tmp_path).write()
    checkpoint(tmp_path, 4)
    trainer = FakeTrainer(9)
    train_job(trainer, reopen(tmp_path), LENGTH, print, "elsewhere")  # type: ignore[arg-type]
    assert trainer.resumed_from == "elsewhere"


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
