"""Goodput over restarts, from what `run.json` and the marks of checkpoints hold."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.core.goodput import Goodput, goodput
from paceline.core.lineage import KEY, RECORD_NAME, RunMark, new_run

START = 1_700_000_000.0


def entry(mark: RunMark, seconds: float) -> dict[str, Any]:
    started = datetime.datetime.fromtimestamp(START + seconds, datetime.UTC).isoformat(timespec="seconds")
    return {"started": started, KEY: mark.to_json()}


def test_useful_time_over_the_time_since_the_first_start_of_the_same_run(tmp_path: Path) -> None:
    other, first = new_run(), new_run()
    second = RunMark((*first.starts, ("b", 40)), seconds=400.0)  # 400 s led to the checkpoint at step 40, and here
    history = [entry(other, -5000), entry(first, 0)]
    (tmp_path / RECORD_NAME).write_text(json.dumps({**entry(second, 700), "history": history}))
    found = goodput(tmp_path, second, now=START + 1000)
    assert found == Goodput(useful=400.0, wall=1000.0, num_starts=2)
    assert found.describe() == (
        "Goodput 40 %: 400 s of training led to these weights, in 1000 s since the first of 2 starts."
    )


def test_nothing_is_made_up(tmp_path: Path) -> None:
    mark = new_run()
    assert goodput(tmp_path, mark) is None, "no record"
    (tmp_path / RECORD_NAME).write_text("{")
    assert goodput(tmp_path, mark) is None, "a damaged one"
    (tmp_path / RECORD_NAME).write_text(json.dumps(entry(new_run(), 0)))
    assert goodput(tmp_path, mark) is None, "of another run"
    (tmp_path / RECORD_NAME).write_text(json.dumps(entry(mark, 0)))
    assert goodput(tmp_path, RunMark(mark.starts, seconds=None)) is None, "another trainer has continued it in between"
    assert goodput(tmp_path, mark, now=START + 10) == Goodput(0.0, 10.0, 1)
    later = RunMark((*mark.starts, ("b", 40)), seconds=3600.0)
    (tmp_path / RECORD_NAME).write_text(json.dumps(entry(later, 0)))
    assert goodput(tmp_path, later) is None, "resumed from another folder, which has the first start"
    (tmp_path / RECORD_NAME).write_text(json.dumps({KEY: mark.to_json()}))
    assert goodput(tmp_path, mark) is None, "without a time"


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def test_a_resumed_run_tells_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    make_trainer(tmp_path, Classifier(), classification(64), callbacks=[Stop()], **options).train()
    assert "Goodput" not in caplog.text, "there was one start"
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, Classifier(), classification(64), **options).train(resume_from_checkpoint=True)
    assert "since the first of 2 starts." in caplog.text
