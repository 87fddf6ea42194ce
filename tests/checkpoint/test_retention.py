"""The checkpoints that a retention policy keeps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.folders import list_checkpoints
from paceline.checkpoint.retention import Retention, pinned_by, retention_of, rotate, scores_of
from paceline.core.lineage import KEY, PROGRESS_FILE, RunMark

HISTORY = [{"step": step, "eval_score": score} for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.9), (5, 0.1))]


RUN = RunMark((("run", 0),))


def make(folder: Path, *steps: int, mark: RunMark | None = RUN) -> None:
    """Checkpoints, an hour of training between each step and the next; the clock of the machine goes back."""
    for step in steps:
        path = folder / f"checkpoint-{step}"
        path.mkdir(parents=True)
        if mark is not None:
            values = dataclasses.replace(mark, seconds=3600.0 * step).to_json()
            (path / PROGRESS_FILE).write_text(json.dumps({KEY: values}))
        os.utime(path, (1e9 - step, 1e9 - step))


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"last": 2}, [4, 5]),
        ({"best": 1}, [2, 5]),  # of two that are equally good the earlier; and the newest always
        ({"best": 3, "last": 1}, [2, 3, 4, 5]),
        ({"best": 1, "greater_is_better": False}, [5]),  # the newest is the best one
        ({"every_steps": 2}, [2, 4, 5]),
        ({"every_steps": 2, "last": 2}, [2, 4, 5]),
        ({"every_hours": 2.0}, [1, 3, 5]),
        ({"every_hours": 100.0, "best": 1}, [1, 2, 5]),
    ],
)
def test_what_stays(tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    retention = Retention(**{"metric": "score", "greater_is_better": True, **options})
    rotate(tmp_path, retention, HISTORY, run=RUN)
    assert steps_of(tmp_path) == kept


def test_only_those_of_the_run_are_counted_and_deleted(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    make(tmp_path, 12, 14, mark=RunMark((("earlier", 0),)))
    make(tmp_path, 20, mark=None)  # of another trainer, there before this run
    run = dataclasses.replace(RUN, unnamed=frozenset({"checkpoint-20"}))
    rotate(tmp_path, Retention(last=1), run=run)
    assert steps_of(tmp_path) == [3, 12, 14, 20]


def test_of_a_way_that_was_left_the_oldest_go_first_and_the_one_just_written_stays(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6, 8)
    again = RUN.resumed(4)
    make(tmp_path, 5, mark=again)
    rotate(tmp_path, Retention(last=2, every_steps=4), run=again)
    assert steps_of(tmp_path) == [4, 5]  # 8 is at a multiple of 4, but this run is not there yet


def test_where_nobody_timed_a_checkpoint_time_deletes_none(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, mark=None)
    rotate(tmp_path, Retention(every_hours=1.0))
    assert steps_of(tmp_path) == [1, 2, 3]


def test_the_runs_best_stays_whatever_the_policies_say(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    rotate(tmp_path, Retention(last=1), HISTORY, str(tmp_path / "checkpoint-2"))
    assert steps_of(tmp_path) == [2, 5]


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
    last=st.one_of(st.none(), st.integers(1, 4)),
    best=st.integers(0, 4),
    every=st.integers(0, 7),
    hours=st.sampled_from([0.0, 0.05, 0.3]),
    scores=st.lists(st.floats(allow_infinity=False), min_size=41, max_size=41),
)
def test_each_policy_gets_what_it_wants(
    steps: list[int], last: int | None, best: int, every: int, hours: float, scores: list[float]
) -> None:
    known = {step: scores[step] for step in steps if not math.isnan(scores[step])}
    times: dict[str, float | None] = {f"/run/checkpoint-{step}": 60.0 * step for step in steps}
    pinned = {int(p.split("-")[1]) for p in pinned_by(Retention(last, best, every, hours), times, known)}
    assert pinned >= {step for step in steps if every and step % every == 0}
    lowest = sorted(known.values())[:best]
    assert sorted(known[step] for step in pinned if step in known)[: len(lowest)] == lowest
    if hours:
        for step in steps:  # within each span of so many hours there is one
            assert any(step - 60 * hours < other <= step for other in pinned)
    if not every and not hours:
        assert len(pinned) == min(best, len(known))


def test_scores_come_from_evaluations_only() -> None:
    history = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "eval_loss": 2.0},
        {"step": 4, "eval_loss": math.nan},
        {"step": 6, "eval_loss": 1.0},
        {"step": 6, "train_loss": 9.0},
    ]
    assert scores_of(history, "loss") == {2: 2.0, 6: 1.0}


def test_the_direction_of_the_metric() -> None:
    options = {"save_total_limit": None, "keep_best": 1, "keep_every_steps": 0, "keep_every_hours": 0.0}

    def of(**given: Any) -> Retention:
        base = {"metric_for_best_model": None, "greater_is_better": None, "keep_best_metric": None}
        return retention_of(SimpleNamespace(**{**options, **base, **given}))

    assert (of().metric, of().greater_is_better) == ("loss", False)
    assert of(metric_for_best_model="f1").greater_is_better
    assert not of(metric_for_best_model="wer", greater_is_better=False).greater_is_better
    assert not of(keep_best_metric="eval_wer", metric_for_best_model="wer", greater_is_better=False).greater_is_better
    assert of(keep_best_metric="f1", metric_for_best_model="loss", greater_is_better=False).greater_is_better
