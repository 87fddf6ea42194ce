"""Data workers that are stopped are named."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

from paceline.core import worker_watch
from paceline.core.worker_watch import WorkerWatch, state_of, worker_ids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who is stopped")


class StopsItsWorker(list[Any]):
    def __init__(self, rows: list[Any], main: int) -> None:
        super().__init__(rows)
        self.main = main

    def __getitem__(self, index: Any) -> Any:
        if index == 5 and os.getpid() != self.main:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_stopped_worker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_training: bool
) -> None:
    """By its process id, while the run waits; and the run goes on when the worker does."""
    monkeypatch.setattr(worker_watch, "SECONDS_BETWEEN_LOOKS", 0.05)
    data, stopped, ended = StopsItsWorker(classification(8), os.getpid()), list[int](), threading.Event()

    def go_on() -> None:
        while not ended.wait(0.02):
            for pid in worker_ids():
                if state_of(pid) == "T" and f"Data worker {pid} is stopped" in caplog.text:
                    stopped.append(pid)
                    os.kill(pid, signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    helper.start()
    try:
        trainer = make_trainer(tmp_path, Classifier(), data, eval_dataset=data, dataloader_num_workers=1)
        trainer.train() if is_training else trainer.evaluate()
    finally:
        ended.set()
        helper.join()
    assert stopped
    assert f"`kill -CONT {stopped[0]}` continues it" in caplog.text


def test_each_stop_is_told_once_and_a_moment_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = iter(["S", "T", "S", "T", "T", "T", "S", "T", "T"])
    monkeypatch.setattr(worker_watch, "worker_ids", lambda: [7])
    monkeypatch.setattr(worker_watch, "state_of", lambda pid: next(states))
    watch = WorkerWatch()
    told = []
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            watch.look()
            told.append(len(caplog.records))
    assert told == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_it_ends_at_once() -> None:
    begun = time.monotonic()
    with WorkerWatch():
        pass
    assert time.monotonic() - begun < 2
    assert state_of(2**30) is None
