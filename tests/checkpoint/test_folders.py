import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import folders, manifest
from paceline.checkpoint.folders import (
    checkpoint_name,
    get_last_checkpoint,
    list_checkpoints,
    newest_valid,
    recover,
    rotate_checkpoints,
    sort_checkpoints,
    staged,
    verify,
)


def save(final: Path, text: str) -> None:
    with staged(final) as folder:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(text)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def make(output_dir: Path, *steps: int) -> None:
    for step in steps:
        (output_dir / f"checkpoint-{step}").mkdir(parents=True)


def steps_of(output_dir: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in list_checkpoints(output_dir)]


def test_an_output_folder_that_cannot_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError, match=r"output_dir='.*file.run' cannot be written to"):
        folders.make_output_folder(tmp_path / "file" / "run")
    folders.make_output_folder(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run").is_dir()


class TestNames:
    def test_names_and_order(self, tmp_path: Path) -> None:
        make(tmp_path, 10, 9, 100)
        for other in ("checkpoint-12-copy", "checkpoint-best", "my-checkpoint-200", ".checkpoint-300.incomplete-1"):
            (tmp_path / other).mkdir()
        (tmp_path / "checkpoint-400").write_text("a file")
        assert checkpoint_name(9) == "checkpoint-9"
        assert steps_of(tmp_path) == [9, 10, 100]
        assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert get_last_checkpoint(tmp_path) is None
        assert list_checkpoints(tmp_path / "none") == []
        assert newest_valid(tmp_path / "none", print) is None
        with pytest.raises(FileNotFoundError):
            get_last_checkpoint(tmp_path / "none")

    def test_by_time_unless_times_are_not_kept(self, tmp_path: Path) -> None:
        make(tmp_path, 1, 2, 3)
        for step, seconds in ((1, 300), (2, 100), (3, 200)):
            os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
        by_time = [Path(path).name for path in sort_checkpoints(tmp_path, use_mtime=True)]
        assert by_time == ["checkpoint-2", "checkpoint-3", "checkpoint-1"]
        for spread, order in ((0.9, "123"), (1.5, "321")):  # seconds
            for step in (1, 2, 3):
                seconds = 100 - spread * step / 2
                os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
            assert [Path(path).name[-1] for path in sort_checkpoints(tmp_path, use_mtime=True)] == list(order)

    def test_best_is_last_but_one(self, tmp_path: Path) -> None:
        make(tmp_path, 1, 2, 3, 4)
        ordered = sort_checkpoints(tmp_path, best_model_checkpoint=tmp_path / "checkpoint-1")
        assert [Path(path).name[-1] for path in ordered] == ["2", "3", "1", "4"]
        ordered = sort_checkpoints(tmp_path, best_model_checkpoint=tmp_path / "checkpoint-4")
        assert [Path(path).name[-1] for path in ordered] == ["1", "2", "3", "4"]


class TestRotation:
    @pytest.mark.parametrize(
        ("limit", "best", "left"),
        [
            (None, None, [1, 2, 3, 4, 5]),
            (0, None, [1, 2, 3, 4, 5]),
            (5, None, [1, 2, 3, 4, 5]),
            (2, None, [4, 5]),
            (1, None, [5]),
            (2, 1, [1, 5]),
            (1, 1, [1, 5]),
            (3, 5, [3, 4, 5]),
        ],
    )
    def test_keeps_newest_and_best(self, tmp_path: Path, limit: int | None, best: int | None, left: list[int]) -> None:
        make(tmp_path, 1, 2, 3, 4, 5)
        path = None if best is None else str(tmp_path / f"checkpoint-{best}")
        deleted = rotate_checkpoints(tmp_path, limit, path)
        assert steps_of(tmp_path) == left
        assert len(deleted) == 5 - len(left)
        assert hidden(tmp_path) == []

    def test_best_by_any_spelling(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make(tmp_path / "run", 1, 2, 3)
        monkeypatch.chdir(tmp_path)
        rotate_checkpoints(str(tmp_path / "run"), 1, "./run/../run/checkpoint-1/")
        assert steps_of(tmp_path / "run") == [1, 3]
        rotate_checkpoints("run", 1, str(tmp_path / "run" / "checkpoint-1"))
        assert steps_of(tmp_path / "run") == [1, 3]

    def test_best_of_a_run_that_was_moved(self, tmp_path: Path) -> None:
        make(tmp_path, 1, 2, 3)
        rotate_checkpoints(tmp_path, 1, "/elsewhere/before/checkpoint-1")
        assert steps_of(tmp_path) == [1, 3]

    def test_copies_beside_checkpoints_are_not_touched(self, tmp_path: Path) -> None:
        make(tmp_path, 1, 2)
        (tmp_path / "checkpoint-1-keep").mkdir()
        rotate_checkpoints(tmp_path, 1)
        assert (tmp_path / "checkpoint-1-keep").is_dir()
        assert steps_of(tmp_path) == [2]

    def test_what_cannot_be_deleted_is_logged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        make(tmp_path, 1, 2)

        def refuse(*_: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "rename", refuse)
        assert rotate_checkpoints(tmp_path, 1) == []
        assert "checkpoint-1 cannot be deleted" in caplog.text
        assert steps_of(tmp_path) == [1, 2]


class TestStaging:
    def test_appears_whole_with_a_manifest(self, tmp_path: Path) -> None:
        final = tmp_path / "out" / "checkpoint-1"
        with staged(final) as folder:
            assert folder.parent == final.parent
            assert folder.name.startswith(".checkpoint-1.incomplete-")
            (folder / "a.txt").write_text("x")
            assert not final.exists()
            assert list_checkpoints(final.parent) == []
        assert verify(final) == []
        assert hidden(final.parent) == []

    def test_replaces_a_folder_of_the_same_name(self, tmp_path: Path) -> None:
        save(tmp_path / "checkpoint-1", "old")
        save(tmp_path / "checkpoint-1", "new")
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "new"
        assert hidden(tmp_path) == []

    @staticmethod
    def save_half(final: Path) -> None:
        with staged(final) as folder:
            (folder / "a.txt").write_text("new")
            raise KeyboardInterrupt

    def test_an_exception_leaves_the_old_one(self, tmp_path: Path) -> None:
        save(tmp_path / "checkpoint-1", "old")
        with pytest.raises(KeyboardInterrupt):
            self.save_half(tmp_path / "checkpoint-1")
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "old"
        assert verify(tmp_path / "checkpoint-1") == []
        assert hidden(tmp_path) == []

    def test_a_file_in_the_way_is_not_removed(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint-1").write_text("mine")
        with pytest.raises(NotADirectoryError, match="checkpoint-1 exists"), staged(tmp_path / "checkpoint-1"):
            pass
        assert (tmp_path / "checkpoint-1").read_text() == "mine"

    @pytest.mark.skipif(os.name == "nt", reason="links need rights there")
    def test_a_link_is_replaced_and_its_target_kept(self, tmp_path: Path) -> None:
        save(tmp_path / "target", "old")
        (tmp_path / "checkpoint-1").symlink_to(tmp_path / "target")
        save(tmp_path / "checkpoint-1", "new")
        assert (tmp_path / "target" / "a.txt").read_text() == "old"
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "new"
        assert hidden(tmp_path) == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
    @pytest.mark.parametrize("where", ["mkdir", "rename", "fsync"])
    def test_a_refusing_disk_raises_and_leaves_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
    ) -> None:
        save(tmp_path / "checkpoint-1", "old")

        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, where, refuse)
            with pytest.raises(OSError) as caught:
                save(tmp_path / "checkpoint-1", "new")
        assert caught.value.errno == number
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "old"
        assert verify(tmp_path / "checkpoint-1") == []
        assert hidden(tmp_path) == []

    def test_a_failed_last_rename_puts_the_old_one_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path / "checkpoint-1", "old")
        rename = os.rename

        def refuse(source: Any, target: Any) -> None:
            if "incomplete" in Path(source).name:
                raise OSError(errno.EIO, "gone")
            rename(source, target)

        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="gone"):
            save(tmp_path / "checkpoint-1", "new")
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "old"


class Died(BaseException):
    """The process ended here: nothing after it runs, cleaning up included."""


class DyingSystem:
    """Stands for `os`, `shutil` and `open` in the code under test, and dies at the call with a given number.

    After that every call dies. fsync is not really done (test_power_loss.py is about disks). Deleting a tree dies
    half-way through.
    """

    changing = ("rename", "replace", "mkdir", "makedirs", "fsync", "unlink", "listdir", "stat")

    def __init__(self, calls_left: int) -> None:
        self.calls_left = calls_left
        self.died = False
        self.thread = threading.get_ident()

    def count(self) -> None:
        if threading.get_ident() != self.thread:  # of a test before this: the mirror of a run's folder still watches it
            return
        self.died = self.died or self.calls_left == 0
        if self.died:
            raise Died
        self.calls_left -= 1

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count()
            return None if function is os.fsync else function(*args, **options)

        return call

    def rmtree(self, folder: Path, ignore_errors: bool = False) -> None:
        try:
            self.count()
        except Died:
            if folder.exists():
                (folder / "a.txt").unlink(missing_ok=True)
            raise
        shutil.rmtree(folder, ignore_errors=ignore_errors)


@contextmanager
def dying(calls_left: int) -> Iterator[DyingSystem]:
    system = DyingSystem(calls_left)
    with pytest.MonkeyPatch.context() as patch:
        real = {name: getattr(os, name) for name in system.changing}

        class System:
            def __getattr__(self, name: str) -> Any:
                return system.wrap(real[name]) if name in real else getattr(os, name)

        class Tree:
            rmtree = staticmethod(system.rmtree)

        for module in (folders, manifest):
            patch.setattr(module, "os", System())
            patch.setattr(module, "open", system.wrap(open), raising=False)
        patch.setattr(folders, "shutil", Tree)
        try:
            yield system
        except Died:
            pass


class TestCrashes:
    @pytest.mark.parametrize("has_old", [True, False])
    def test_death_at_any_step_of_a_save(self, tmp_path: Path, has_old: bool) -> None:
        outcomes = set()
        for calls in range(200):
            run = tmp_path / str(calls)
            run.mkdir()
            final = run / "checkpoint-1"
            if has_old:
                save(final, "old")
            with dying(calls) as system:
                save(final, "new")
            recover(run, lambda _: None)
            assert hidden(run) == [], f"died at call {calls}"
            assert final.exists() or not has_old, f"died at call {calls}"
            if final.exists():
                assert verify(final) == [], f"died at call {calls}"
                assert (final / "a.txt").read_text() in ({"old", "new"} if has_old else {"new"})
            outcomes.add((final / "a.txt").read_text() if final.exists() else None)
            if not system.died:
                break
        else:
            pytest.fail("a save has fewer steps than that")
        assert outcomes == {"old" if has_old else None, "new"}

    def test_death_at_any_step_of_the_recovery_too(self, tmp_path: Path) -> None:
        for calls in range(4, 200, 2):
            is_over = False
            for recovery_calls in range(60):
                run = tmp_path / f"{calls}-{recovery_calls}"
                run.mkdir()
                save(run / "checkpoint-1", "old")
                with dying(calls) as system:
                    save(run / "checkpoint-1", "new")
                is_over = not system.died
                with dying(recovery_calls) as recovery:
                    recover(run, lambda _: None)
                recover(run, lambda _: None)
                assert hidden(run) == []
                assert verify(run / "checkpoint-1") == []
                shutil.rmtree(run)
                if not recovery.died:
                    break
            if is_over:
                return
        pytest.fail("a save has fewer steps than that")

    def test_death_at_any_step_of_a_rotation(self, tmp_path: Path) -> None:
        for calls in range(100):
            run = tmp_path / str(calls)
            for step in (1, 2, 3, 4):
                save(run / f"checkpoint-{step}", str(step))
            with dying(calls) as system:
                rotate_checkpoints(run, 1, run / "checkpoint-2")
            assert {2, 4} <= set(steps_of(run))
            assert all(verify(folder) == [] for folder in list_checkpoints(run))
            recover(run, lambda _: None)
            assert hidden(run) == []
            if not system.died:
                assert steps_of(run) == [2, 4]
                return
        pytest.fail("a rotation has fewer steps than that")

    def test_recovery_tells_what_it_did(self, tmp_path: Path) -> None:
        save(tmp_path / "checkpoint-1", "one")
        os.rename(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-1.replaced-99999999")
        (tmp_path / ".checkpoint-2.incomplete-99999999").mkdir()
        (tmp_path / ".checkpoint-3.deleted-99999999-1").mkdir()
        (tmp_path / ".git").mkdir()
        (tmp_path / ".run.json.incomplete-99999999").write_text("{")
        (tmp_path / ".gitignore").touch()
        reports: list[str] = []
        recover(tmp_path, reports.append)
        assert [Path(report.split(" is ")[0]).name for report in reports] == [
            "checkpoint-1",
            ".checkpoint-2.incomplete-99999999",
            ".checkpoint-3.deleted-99999999-1",
            ".run.json.incomplete-99999999",
        ]
        assert hidden(tmp_path) == [".git", ".gitignore"]
        assert (tmp_path / "checkpoint-1" / "a.txt").read_text() == "one"

    @pytest.mark.skipif(os.name != "posix", reason="asks for processes by signal 0")
    def test_the_folder_of_a_living_process_is_left_alone(self, tmp_path: Path) -> None:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            folder = tmp_path / f".checkpoint-2.incomplete-{other.pid}"
            folder.mkdir()
            reports: list[str] = []
            recover(tmp_path, reports.append)
            assert folder.is_dir()
            assert str(other.pid) in reports[0]
        finally:
            other.communicate(b"\n")
        recover(tmp_path, reports.append)
        assert not folder.exists()

    def test_a_folder_that_cannot_be_cleared_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / ".checkpoint-2.incomplete-99999999").mkdir()

        def refuse(*_: Any) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "rename", refuse)
        reports: list[str] = []
        recover(tmp_path, reports.append)
        assert "cannot be removed" in reports[0]


class TestNewestValid:
    def test_passes_over_damaged_ones_and_says_so(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(tmp_path / f"checkpoint-{step}", "x" * step)
        (tmp_path / "checkpoint-3" / "a.txt").write_text("xx")
        (tmp_path / "checkpoint-2" / "sub" / "b.txt").write_text("zz")
        reports: list[str] = []
        assert newest_valid(tmp_path, reports.append) == tmp_path / "checkpoint-1"
        assert len(reports) == 2
        assert "checkpoint-3 is skipped: a.txt has 2 bytes instead of 3" in reports[0]
        assert "sub/b.txt is damaged" in reports[1]

    def test_problems_beyond_three_are_counted(self, tmp_path: Path) -> None:
        with staged(tmp_path / "checkpoint-1") as folder:
            for name in "abcde":
                (folder / name).write_text("x")
        for name in "abcde":
            (tmp_path / "checkpoint-1" / name).write_text("xx")
        reports: list[str] = []
        assert newest_valid(tmp_path, reports.append) is None
        assert reports[0].count("has 2 bytes instead of 1") == 3
        assert reports[0].endswith("(and 2 more)")

    def test_extra_files_are_told_not_refused(self, tmp_path: Path) -> None:
        save(tmp_path / "checkpoint-1", "x")
        (tmp_path / "checkpoint-1" / "notes.txt").write_text("hello")
        reports: list[str] = []
        assert newest_valid(tmp_path, reports.append) == tmp_path / "checkpoint-1"
        assert "notes.txt" in reports[0]

    def test_none_when_all_are_damaged(self, tmp_path: Path) -> None:
        make(tmp_path, 1)
        reports: list[str] = []
        assert newest_valid(tmp_path, reports.append) is None
        assert "trainer_state.json is missing" in reports[0]
