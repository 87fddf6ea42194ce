"""Whatever ends a run leaves checkpoints that load, and an error that says what happened; going on is bit-exact."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import crash_job
import pytest
import torch
from small_models import weights

from paceline import Trainer, TrainerCallback
from paceline.checkpoint.folders import begin, list_checkpoints, verify


class Boom(RuntimeError):
    pass


class RaisesAt(TrainerCallback):
    reads_checkpoint = False

    def __init__(self, event: str, step: int) -> None:
        setattr(self, event, self.maybe_raise)
        self.step = step

    def maybe_raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            raise Boom(f"in a callback at {state.global_step}")


class Reporter(RaisesAt):
    may_fail = True


class Fails(crash_job.WithBase):
    error: BaseException | None = None

    def forward(self, x: Any, labels: Any = None) -> Any:
        if self.error is not None and self.training:
            raise self.error
        return super().forward(x, labels)


def steps_of(folder: Path) -> list[int]:
    assert [problem for path in list_checkpoints(folder) for problem in verify(path)] == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-checkpoint"]
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = crash_job.make(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return trainer


def goes_on(folder: Path, whole: Trainer, **options: Any) -> None:
    trainer = crash_job.make(folder, **options)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights(trainer.model), weights(whole.model))
    assert trainer.state.best_metric == whole.state.best_metric
    steps_of(folder)


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_evaluate", "on_log", "on_epoch_end", "on_save"])
def test_an_error_in_a_callback(event: str, tmp_path: Path, whole: Trainer) -> None:
    trainer = crash_job.make(tmp_path, callbacks=[RaisesAt(event, 8)])
    with pytest.raises(Boom, match="in a callback at" if event == "on_save" else "in a callback at 8"):
        trainer.train()  # on_save comes when the checkpoint is there, some updates later
    assert 6 in steps_of(tmp_path)
    goes_on(tmp_path, whole)


def test_an_error_in_a_metric(tmp_path: Path, whole: Trainer) -> None:
    calls = []

    def metric(prediction: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 4:
            raise Boom("no such class")
        return crash_job.accuracy(prediction)

    with pytest.raises(Boom, match="no such class"):
        crash_job.make(tmp_path, compute_metrics=metric).train()
    assert steps_of(tmp_path)[-1] == 6
    goes_on(tmp_path, whole)


def test_an_error_in_a_reporter_ends_nothing(tmp_path: Path, whole: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = crash_job.make(tmp_path, callbacks=[Reporter("on_log", 8)])
    trainer.train()
    assert torch.equal(weights(trainer.model), weights(whole.model))
    assert "in a callback at 8" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "message"), [("raises", "sample 17 cannot be read"), ("killed", "worker")])
def test_an_error_in_a_worker(kind: str, message: str, tmp_path: Path) -> None:
    """Also a worker that the system kills: for its memory, most often.

    In a process of its own: torch then raises in a signal handler, at any line, which may leave a lock taken.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=crash_job.run_with_failing_data, args=(tmp_path, kind))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert message in (tmp_path / "error.txt").read_text()
    assert steps_of(tmp_path)
    resumed = crash_job.make(tmp_path, dataloader_num_workers=1, save_steps=1, eval_steps=1)
    resumed.train(resume_from_checkpoint=True)
    plain = crash_job.make(tmp_path / "whole", save_steps=1, eval_steps=1)
    plain.train()
    assert torch.equal(weights(resumed.model), weights(plain.model))


@pytest.mark.slow
def test_out_of_memory(tmp_path: Path, whole: Trainer) -> None:
    class FailsAt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                model.error = torch.OutOfMemoryError("Tried to allocate 3 GiB")

    trainer = crash_job.make(tmp_path, callbacks=[FailsAt()])
    trainer.model.__class__ = Fails
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        trainer.train()
    assert steps_of(tmp_path)[-1] == 4
    goes_on(tmp_path, whole)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_two_saves(number: int, tmp_path: Path, whole: Trainer) -> None:
    class Sends(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    trainer = crash_job.make(tmp_path, callbacks=[Sends()])
    try:
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt, match="stopped at step 7"):
                trainer.train()
        else:
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps_of(tmp_path)[-1] == 7
    resumed = crash_job.make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_an_error_in_the_middle_of_beginning_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when torch raises in its signal handler because a worker died: at any line, before anything could clean up."""

    def begin_and_fail(final: Path) -> Path:
        monkeypatch.undo()
        begin(final)
        raise Boom("a worker died")

    trainer = crash_job.make(tmp_path)
    monkeypatch.setattr("paceline.checkpoint.folders.begin", begin_and_fail)
    with pytest.raises(Boom):
        trainer.train()
    assert steps_of(tmp_path) == []
