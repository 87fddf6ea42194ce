"""Checks of the free space and of the mount before a checkpoint is written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.checkpoint.space import SMALL_FILES_BYTES, Place


def test_room_is_checked_with_some_slack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path / "not" / "yet")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SMALL_FILES_BYTES + 100))
    place.check(100)
    with pytest.raises(OSError, match=r"65\.6 kB are needed \(101 bytes of tensors, .*65\.6 kB are free") as caught:
        place.check(101)
    assert caught.value.errno == errno.ENOSPC


def test_another_file_system_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.check(0)
    place.device += 1
    with pytest.raises(OSError, match="is its disk mounted") as caught:
        place.check(0)
    assert caught.value.errno == errno.ENODEV


def test_a_folder_that_was_deleted_on_the_same_disk_is_no_problem(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    place = Place(folder)
    folder.rmdir()
    place.check(0)
