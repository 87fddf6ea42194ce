"""The store follows the folder: through rotation, outages, restarts; newest first, and nothing raised."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import make_checkpoint

from paceline.core import folders
from paceline.core.mirror import Mirror
from paceline.core.retention import Retention, unwanted
from paceline.core.stores import ObjectStore, StoreError


class Store(ObjectStore):
    """Of memory, with outages; `uploads` are the checkpoints in the order in which they went up."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.failures, self.uploads, self.least_writes = 0, list[str](), -1

    def write(self, name: str, content: bytes) -> None:
        self._fail()
        super().write(name, content)

    def upload(self, path: Path, name: str) -> None:
        self._fail()
        super().upload(path, name)

    def upload_checkpoint(self, folder: Path, name: str) -> None:
        super().upload_checkpoint(folder, name)
        self.uploads.append(name)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the store cannot be reached")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"memory://{tmp_path.name}/run")


def make_mirror(store: ObjectStore, folder: Path, limit: int | None = None, best: str | None = None) -> Mirror:
    folder.mkdir(exist_ok=True)
    mirror = Mirror(store, folder, lambda: (Retention(last=limit), [], best))
    mirror.close()  # the tests look themselves
    return mirror


def names(store: ObjectStore) -> list[str]:
    return sorted(store.checkpoints(), key=folders.step_of)


def test_the_newest_goes_first_and_rotation_follows(store: Store, tmp_path: Path) -> None:
    mirror = make_mirror(store, tmp_path, limit=2)
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    assert mirror.look()
    assert store.uploads == ["checkpoint-2", "checkpoint-1"]
    make_checkpoint(tmp_path, 3)
    folders.rotate_checkpoints(tmp_path, 2)
    assert mirror.look()
    assert names(store) == ["checkpoint-2", "checkpoint-3"]
    assert mirror.look()
    assert store.uploads == ["checkpoint-2", "checkpoint-1", "checkpoint-3"]


def test_a_lost_folder_deletes_nothing_until_the_policy_does(store: Store, tmp_path: Path) -> None:
    first = make_mirror(store, tmp_path / "a", limit=2)
    for step in (1, 2):
        make_checkpoint(tmp_path / "a", step)
    assert first.look()
    second = make_mirror(store, tmp_path / "b", limit=2, best="/elsewhere/checkpoint-1")
    assert second.look()
    assert names(store) == ["checkpoint-1", "checkpoint-2"]
    make_checkpoint(tmp_path / "b", 3)
    assert second.look()
    assert names(store) == ["checkpoint-1", "checkpoint-3"]


def test_an_outage_is_said_once_and_lost_is_nothing(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = make_mirror(store, tmp_path, limit=1)
    store.failures = 3
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
        folders.rotate_checkpoints(tmp_path, 1)
        assert not mirror.look()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert mirror.look()
    assert names(store) == ["checkpoint-3"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "cannot be reached. Training goes on" in warnings[0]
    assert "can be reached again" in warnings[1]


def test_an_upload_that_breaks_off_leaves_no_whole_checkpoint(store: Store, tmp_path: Path) -> None:
    mirror = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    original, calls = store.upload, list[str]()

    def upload(path: Path, name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise StoreError("gone")
        original(path, name)

    store.upload = upload  # type: ignore[method-assign]
    assert not mirror.look()
    assert names(store) == []
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    fresh = make_mirror(store, tmp_path)  # of the next run, on the same disk
    assert fresh.look()
    assert names(store) == ["checkpoint-1"]
    assert not any("incomplete" in name for name in store.names())


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_left_out(store: Store, tmp_path: Path) -> None:
    mirror = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path, 2)
    original = store.upload_checkpoint

    def upload(folder: Path, name: str) -> None:
        shutil.rmtree(tmp_path / "checkpoint-1", ignore_errors=True)
        shutil.rmtree(tmp_path / name)  # its files are held
        original(folder, name)

    store.upload_checkpoint = upload  # type: ignore[method-assign]
    assert mirror.look()
    assert names(store) == ["checkpoint-2"]


def test_files_beside_go_when_they_have_changed(store: Store, tmp_path: Path) -> None:
    mirror = make_mirror(store, tmp_path)
    (tmp_path / "log.jsonl").write_text("1\n")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events").write_text("x")
    assert mirror.look()
    assert store.names() == ["log.jsonl", "runs/events"]
    (tmp_path / "log.jsonl").write_text("1\n2\n")
    assert mirror.look()  # not yet: it is no minute ago
    assert store.read("log.jsonl") == b"1\n"
    assert mirror.finish()
    assert store.read("log.jsonl") == b"1\n2\n"


def test_the_end_tells_what_is_missing(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirror = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    store.failures = 10**6
    assert not mirror.finish(patience=0.0)
    assert "the next start with this output_dir uploads what is missing" in caplog.text
    store.failures = 0
    assert mirror.finish()


@pytest.mark.parametrize(
    ("times", "policy", "best", "expected"),
    [
        ({"checkpoint-1": 1, "checkpoint-2": 2, "checkpoint-3": 3}, {"last": 2}, None, ["checkpoint-1"]),
        ({"checkpoint-1": 1, "checkpoint-2": 2, "checkpoint-3": 3}, {"last": 2}, "checkpoint-1", ["checkpoint-2"]),
        ({"checkpoint-9": 1, "checkpoint-2": 2}, {"last": 1}, None, ["checkpoint-9"]),
        ({"checkpoint-1": 1, "checkpoint-2": 2}, {}, None, []),
        ({"checkpoint-2": 1, "checkpoint-3": 2, "checkpoint-5": 3}, {"every_steps": 2}, None, ["checkpoint-3"]),
        ({}, {"last": 1}, None, []),
    ],
)
def test_unwanted(times: dict[str, float], policy: dict[str, Any], best: str | None, expected: list[str]) -> None:
    assert unwanted(times, Retention(**policy), [], best) == expected
