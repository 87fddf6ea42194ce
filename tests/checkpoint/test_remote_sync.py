"""The store follows the folder: through rotation, outages, restarts; newest first, and nothing raised."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import make_checkpoint

from paceline.checkpoint import folders
from paceline.checkpoint.remote_sync import RemoteSync
from paceline.checkpoint.retention import Retention, unwanted
from paceline.checkpoint.stores import ObjectStore, StoreError
from paceline.core.lineage import RunMark


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


def make_mirror(store: ObjectStore, folder: Path, limit: int | None = None, best: str | None = None) -> RemoteSync:
    folder.mkdir(exist_ok=True)
    remote_sync = RemoteSync(store, folder, lambda: (Retention(last=limit), [], best, None))
    remote_sync.close()  # the tests look themselves
    return remote_sync


def names(store: ObjectStore) -> list[str]:
    return sorted(store.checkpoints(), key=folders.step_of)


def test_the_newest_goes_first_and_rotation_follows(store: Store, tmp_path: Path) -> None:
    remote_sync = make_mirror(store, tmp_path, limit=2)
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    assert remote_sync.look()
    assert store.uploads == ["checkpoint-2", "checkpoint-1"]
    make_checkpoint(tmp_path, 3)
    folders.rotate_checkpoints(tmp_path, 2)
    assert remote_sync.look()
    assert names(store) == ["checkpoint-2", "checkpoint-3"]
    assert remote_sync.look()
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
    remote_sync = make_mirror(store, tmp_path, limit=1)
    store.failures = 3
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
        folders.rotate_checkpoints(tmp_path, 1)
        assert not remote_sync.look()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert remote_sync.look()
    assert names(store) == ["checkpoint-3"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "cannot be reached. Training continues" in warnings[0]
    assert "can be reached again" in warnings[1]


def test_an_upload_that_breaks_off_leaves_no_whole_checkpoint(store: Store, tmp_path: Path) -> None:
    remote_sync = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    original, calls = store.upload, list[str]()

    def upload(path: Path, name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise StoreError("gone")
        original(path, name)

    store.upload = upload  # type: ignore[method-assign]
    assert not remote_sync.look()
    assert names(store) == []
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    fresh = make_mirror(store, tmp_path)  # of the next run, on the same disk
    assert fresh.look()
    assert names(store) == ["checkpoint-1"]
    assert not any("incomplete" in name for name in store.names())


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_left_out(store: Store, tmp_path: Path) -> None:
    remote_sync = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path, 2)
    original = store.upload_checkpoint

    def upload(folder: Path, name: str) -> None:
        shutil.rmtree(tmp_path / "checkpoint-1", ignore_errors=True)
        shutil.rmtree(tmp_path / name)  # its files are held
        original(folder, name)

    store.upload_checkpoint = upload  # type: ignore[method-assign]
    assert remote_sync.look()
    assert names(store) == ["checkpoint-2"]


def test_files_beside_go_when_they_have_changed(store: Store, tmp_path: Path) -> None:
    remote_sync = make_mirror(store, tmp_path)
    (tmp_path / "log.jsonl").write_text("1\n")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events").write_text("x")
    assert remote_sync.look()
    assert store.names() == ["log.jsonl", "runs/events"]
    (tmp_path / "log.jsonl").write_text("1\n2\n")
    assert remote_sync.look()  # not yet: it is no minute ago
    assert store.read("log.jsonl") == b"1\n"
    assert remote_sync.finish()
    assert store.read("log.jsonl") == b"1\n2\n"


def test_the_end_tells_what_is_missing(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote_sync = make_mirror(store, tmp_path)
    make_checkpoint(tmp_path, 1)
    store.failures = 10**6
    assert not remote_sync.finish(patience=0.0)
    assert "the next start with this output_dir uploads the rest" in caplog.text
    store.failures = 0
    assert remote_sync.finish()


@pytest.mark.parametrize(
    ("steps", "policy", "best", "expected"),
    [
        ((1, 2, 3), {"last": 2}, None, ["checkpoint-1"]),
        ((1, 2, 3), {"last": 2}, "checkpoint-1", ["checkpoint-2"]),
        ((1, 2), {}, None, []),
        ((2, 3, 5), {"every_steps": 2}, None, ["checkpoint-3"]),
        ((2, 3, 9), {"last": 1}, None, ["checkpoint-2"]),  # checkpoint-9 is of another run
        ((), {"last": 1}, None, []),
    ],
)
def test_unwanted(steps: tuple[int, ...], policy: dict[str, Any], best: str | None, expected: list[str]) -> None:
    own, other = RunMark((("own", 0),)), RunMark((("other", 0),))
    marks = {f"checkpoint-{step}": other if step == 9 else own for step in steps}
    assert unwanted(marks, Retention(**policy), [], best, run=own) == expected
