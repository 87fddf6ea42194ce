"""The assignment of checkpoints to runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.folders import get_last_checkpoint, newest_valid, own_checkpoints
from paceline.core.lineage import (
    KEY,
    PROGRESS_FILE,
    RECORD_NAME,
    RunMark,
    at,
    begin_run,
    is_of_run,
    mark_from,
    mark_of,
    new_run,
    run_in,
)


def write(folder: Path, step: int, mark: RunMark | None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if mark is not None:
        (path / PROGRESS_FILE).write_text(json.dumps({KEY: mark.to_json()}))
    return path


def record(folder: Path, mark: RunMark) -> RunMark:
    (folder / RECORD_NAME).write_text(json.dumps({KEY: mark.to_json()}))
    return mark


def begin(folder: Path, checkpoint: Path | None = None) -> RunMark:
    """As a training does at its start."""
    folder.mkdir(exist_ok=True)
    step = 0 if checkpoint is None else int(checkpoint.name.split("-")[1])
    return record(folder, begin_run(folder, checkpoint, step, folder.glob("checkpoint-*")))


def newest(folder: Path) -> int | None:
    found = newest_valid(folder, logging.getLogger(__name__).info)
    return None if found is None else int(found.name.split("-")[1])


def test_newest_is_the_newest_of_the_run_that_was_begun_last(tmp_path: Path) -> None:
    write(tmp_path, 12, begin(tmp_path))
    second = begin(tmp_path)
    assert newest(tmp_path) is None  # nothing of the second run yet
    assert get_last_checkpoint(tmp_path) is None
    write(tmp_path, 4, second)
    os.utime(tmp_path / "checkpoint-4", (1, 1))
    assert newest(tmp_path) == 4
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_a_run_that_is_resumed_keeps_its_id_and_its_checkpoints(tmp_path: Path) -> None:
    first = begin(tmp_path)
    four = write(tmp_path, 4, first)
    again = begin(tmp_path, four)
    assert again.run_id == first.run_id
    write(tmp_path, 8, again)
    assert newest(tmp_path) == 8
    assert [path.name for path in own_checkpoints(tmp_path)[0]] == ["checkpoint-4", "checkpoint-8"]


def test_a_run_that_goes_back_leaves_what_lies_ahead(tmp_path: Path) -> None:
    """Resumed from 4 while 8 and 12 are there, and killed at 6: 4 is where it goes on."""
    first = begin(tmp_path)
    for step in (4, 8, 12):
        write(tmp_path, step, first)
    again = begin(tmp_path, tmp_path / "checkpoint-4")
    assert newest(tmp_path) == 4
    write(tmp_path, 6, again)
    assert newest(tmp_path) == 6
    assert all(is_of_run(again, path.name, mark_of(path)) for path in tmp_path.glob("checkpoint-*"))
    sibling = begin(tmp_path, tmp_path / "checkpoint-8")  # and back to the other way
    assert newest(tmp_path) == 8
    assert not sibling.includes(again, 6)


def test_checkpoints_without_an_id_are_resumable_as_they_are(tmp_path: Path) -> None:
    for step in (4, 8):
        write(tmp_path, step, None)
    assert newest(tmp_path) == 8  # a folder of another trainer
    mine = begin(tmp_path, tmp_path / "checkpoint-8")
    assert is_of_run(mine, "checkpoint-4", None)  # rotation goes on counting them
    write(tmp_path, 12, mine)
    write(tmp_path, 16, None)  # the other trainer has gone on from there
    assert newest(tmp_path) == 16
    assert begin(tmp_path, tmp_path / "checkpoint-16").run_id == mine.run_id


def test_checkpoints_without_an_id_that_were_there_before_are_not_the_new_runs(tmp_path: Path) -> None:
    write(tmp_path, 12, None)
    mine = begin(tmp_path)
    assert newest(tmp_path) is None
    assert not is_of_run(mine, "checkpoint-12", None)
    four = write(tmp_path, 4, mine)
    again = begin(tmp_path, four)
    assert newest(tmp_path) == 4
    assert not is_of_run(again, "checkpoint-12", None)


def test_a_run_from_elsewhere_leaves_what_is_there_alone(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    write(tmp_path / "b", 12, None)
    there = write(tmp_path / "a", 4, begin(tmp_path / "a"))
    moved = begin(tmp_path / "b", there)
    assert moved.run_id == mark_of(there).run_id  # type: ignore[union-attr]
    assert newest(tmp_path / "b") is None


def test_the_time_of_training_adds_up_and_no_clock_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: pytest.fail("the clock of the machine was asked"))
    monkeypatch.setattr("time.monotonic", lambda: 107.0)
    assert at(RunMark((("a", 0),), seconds=10.0), begun=100.0).seconds == 17.0
    assert at(RunMark((("a", 0),), seconds=None), begun=100.0).seconds is None


@pytest.mark.parametrize(
    "break_it",
    [
        lambda good: None,
        lambda good: [],
        lambda good: {**good, "starts": []},
        lambda good: {**good, "starts": [["a"]]},
        lambda good: {**good, "starts": [["a", -1]]},
        lambda good: {**good, "starts": [["a", 10**400]]},
        lambda good: {**good, "starts": [[1, 1]]},
        lambda good: {**good, "starts": {"a": 1}},
        lambda good: {**good, "unnamed": [3]},
    ],
)
def test_what_is_no_mark_is_none(break_it: Callable[[Any], Any], tmp_path: Path) -> None:
    good = new_run(3).to_json()
    assert mark_from(good) is not None
    assert mark_from(break_it(good)) is None
    (tmp_path / RECORD_NAME).write_bytes(b"[" * 100_000)
    assert run_in(tmp_path) is None


def test_a_time_that_cannot_be_is_not_known() -> None:
    for seconds in (-1.0, float("nan"), float("inf"), "1"):
        mark = mark_from({**new_run().to_json(), "seconds": seconds})
        assert mark is not None
        assert mark.seconds is None
