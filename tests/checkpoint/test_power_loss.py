"""Checkpoints after a power cut: published ones are complete, and nothing else is taken for a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lossy_disk import losing
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.checkpoint import manifest
from paceline.checkpoint.folders import list_checkpoints, newest_valid, recover, rotate_checkpoints, staged, verify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def save(final: Path, text: str) -> None:
    with staged(final) as folder:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(text)


def content_after(left: Path) -> str | None:
    """The text in the newest checkpoint after a cut, as the next start finds it; all that are visible are whole."""
    recover(left, lambda _: None)
    assert {path.name: verify(path) for path in list_checkpoints(left) if verify(path)} == {}
    newest = newest_valid(left, lambda _: None)
    if newest is None:
        return None
    texts = {(newest / name).read_text() for name in ("a.txt", "sub/b.txt")}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("has_old", [False, True])
def test_a_cut_at_any_moment_of_a_save(tmp_path: Path, has_old: bool) -> None:
    run, published = tmp_path / "run", []
    run.mkdir()
    if has_old:
        save(run / "checkpoint-1", "old")
    found = set()

    def check(left: Path, what: str) -> None:
        text = content_after(left)
        found.add(text)
        assert text in ({"old", "new"} if has_old else {None, "new"}), what
        assert text == "new" or not published, f"lost after it was published: {what}"

    with losing(run, check) as disk:
        save(run / "checkpoint-1", "new")
        published.append(1)
        disk.cut("at the end")
    assert found == {"old" if has_old else None, "new"}


def test_a_cut_at_any_moment_of_a_rotation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in range(1, 5):
        save(run / f"checkpoint-{step}", str(step))

    def check(left: Path, what: str) -> None:
        recover(left, lambda _: None)
        assert newest_valid(left, lambda _: None) == left / "checkpoint-4", what
        assert verify(left / "checkpoint-2") == [], what

    with losing(run, check) as disk:
        rotate_checkpoints(run, 1, run / "checkpoint-2")
        disk.cut("at the end")


def test_the_folder_of_a_run_is_on_the_disk_too(tmp_path: Path) -> None:
    """Made with its parents, for a checkpoint that is published in it."""
    published: list[int] = []

    def check(left: Path, what: str) -> None:
        run = left / "runs" / "first"
        assert not published or content_after(run) == "new", what

    (tmp_path / "disk").mkdir()
    with losing(tmp_path / "disk", check) as disk:
        save(tmp_path / "disk" / "runs" / "first" / "checkpoint-1", "new")
        published.append(1)
        disk.cut("at the end")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpoint_format": "sharded"}], ids=["full", "sharded"])
def test_a_cut_at_any_moment_of_a_run(tmp_path: Path, options: dict[str, Any]) -> None:
    """From the first `on_save` on there is always a checkpoint to go on from, and never an older one than was told."""
    told = [0]

    class Notes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append(state.global_step)

    def check(left: Path, what: str) -> None:
        recover(left / "runs" / "first", lambda _: None)
        newest = newest_valid(left / "runs" / "first", lambda _: None)
        assert told[-1] <= (0 if newest is None else int(newest.name.removeprefix("checkpoint-"))), what

    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 2, "report_to": "none"}
    (tmp_path / "disk").mkdir()
    with losing(tmp_path / "disk", check) as disk:
        run = tmp_path / "disk" / "runs" / "first"
        make_trainer(run, Classifier(), classification(16), callbacks=[Notes()], **saves, **options).train()
        disk.cut("at the end")
    assert told == [0, 1, 2]


def put_in(patch: pytest.MonkeyPatch, kind: str) -> None:
    """A bug of that kind."""
    real_fsync: Callable[[int], None] = manifest._fsync

    def fsync_of(wanted: Callable[[str], bool]) -> Callable[[int], None]:
        return lambda descriptor: real_fsync(descriptor) if wanted(os.readlink(f"/proc/self/fd/{descriptor}")) else None

    syncs: dict[str, Callable[[str], bool]] = {
        "no file is synced": lambda path: os.path.isdir(path),
        "the manifest is not synced": lambda path: not path.endswith("manifest.json"),
        "no folder is synced": lambda path: not os.path.isdir(path),
        "the folders below are not synced": lambda path: not path.endswith("sub"),
        "the folder around it is not synced": lambda path: not path.endswith("run"),
    }
    patch.setattr(manifest, "_fsync", fsync_of(syncs[kind]))


@pytest.mark.parametrize(
    "kind",
    [
        "no file is synced",
        "the manifest is not synced",
        "no folder is synced",
        "the folders below are not synced",
        "the folder around it is not synced",
    ],
)
def test_the_disk_of_these_tests_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    put_in(monkeypatch, kind)
    with pytest.raises(AssertionError):
        test_a_cut_at_any_moment_of_a_save(tmp_path, has_old=True)
