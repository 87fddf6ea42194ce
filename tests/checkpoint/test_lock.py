"""One training at a time in a folder."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import lock
from paceline.checkpoint.lock import LOCK_NAME, FolderInUse, Holder, acquire, holder_in, is_held


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "GRACE", 0.05)
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_SIGNS", 0.02)


def take(folder: Path) -> lock.FolderLock:
    taken = acquire(folder)
    assert taken is not None
    return taken


def leave(folder: Path, **changes: Any) -> Path:
    """The lock of another process, as it lies there."""
    taken = take(folder)
    holder = dataclasses.replace(taken.holder, **changes)
    taken.release()
    folder.mkdir(exist_ok=True)
    (folder / LOCK_NAME).write_text(json.dumps(dataclasses.asdict(holder)))
    return folder / LOCK_NAME


def test_it_is_there_while_it_is_held_and_gone_afterwards(tmp_path: Path) -> None:
    taken = take(tmp_path / "new")
    assert json.loads((tmp_path / "new" / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert holder_in(tmp_path / "new") is None  # nobody else
    taken.release()
    assert list((tmp_path / "new").iterdir()) == []
    take(tmp_path / "new").release()


def test_another_process_is_refused_by_name_and_gets_it_when_that_is_killed(tmp_path: Path) -> None:
    """And at once: a lock that SIGKILL left holds up nobody on the same machine."""
    code = "import sys, time; from pathlib import Path; from paceline.checkpoint.lock import acquire"
    code += "; held = acquire(Path(sys.argv[1])); print(held.holder.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(FolderInUse, match=f"in use: process {process.pid} on .*set another output_dir"):
            acquire(tmp_path)
        assert f"process {process.pid} on" in str(holder_in(tmp_path))
        process.kill()  # not waited for: it stays as a zombie
        begun = time.monotonic()
        while True:
            try:
                taken = take(tmp_path)
                break
            except FolderInUse:
                assert time.monotonic() - begun < 10
    assert taken.holder.pid == os.getpid()
    taken.release()


def test_another_process_with_the_same_id_is_not_the_holder(tmp_path: Path) -> None:
    leave(tmp_path, pid=os.getppid(), started="1")
    take(tmp_path).release()


def test_a_holder_elsewhere_is_gone_when_it_gives_no_sign(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(tmp_path, host="elsewhere")
    begun = time.monotonic()
    take(tmp_path).release()
    assert time.monotonic() - begun >= 0.3
    assert "no heartbeat from process" in caplog.text


def test_a_holder_elsewhere_that_lives_is_seen_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = take(tmp_path)
    os.utime(tmp_path / LOCK_NAME, (1, 1))  # its clock is half a century late
    monkeypatch.setattr(lock.platform, "node", lambda: "another host")
    with pytest.raises(FolderInUse, match=f"process {os.getpid()} on {taken.holder.host}"):
        acquire(tmp_path)
    monkeypatch.undo()
    taken.release()


def test_the_same_process_may_train_again_and_inside_a_training(tmp_path: Path) -> None:
    outer = take(tmp_path)
    inner = take(tmp_path)
    inner.release()
    assert (tmp_path / LOCK_NAME).exists()  # the outer training goes on
    outer.release()
    leave(tmp_path)  # of a training of this process that ended without giving it up
    take(tmp_path).release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_is_the_same_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    outer = take(Path("run"))
    monkeypatch.chdir("/")
    for name in ("run", "link"):
        take(tmp_path / name).release()
    time.sleep(0.1)
    outer.check()  # nobody has taken it over
    outer.release()
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_the_lock_in_a_copy_of_a_folder_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = take(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    monkeypatch.setattr(lock.Holder, "is_this_process", property(lambda self: False))
    assert holder_in(tmp_path / "run") is not None
    assert holder_in(tmp_path / "copy") is None
    take(tmp_path / "copy").release()  # though the process that it names is alive
    with pytest.raises(FolderInUse):
        acquire(tmp_path / "run")
    taken.release()


def test_a_forked_process_leaves_its_parents_lock_alone(tmp_path: Path) -> None:
    taken = take(tmp_path)
    taken.holder = dataclasses.replace(taken.holder, pid=taken.holder.pid + 1)  # as a child sees it
    taken.release()
    assert (tmp_path / LOCK_NAME).exists()
    assert taken._signs is not None
    taken._signs.end()


def test_who_was_taken_for_gone_learns_that_the_folder_is_anothers(tmp_path: Path) -> None:
    taken = take(tmp_path)
    taken.check()
    (tmp_path / LOCK_NAME).write_text(json.dumps({**dataclasses.asdict(taken.holder), "pid": 1, "token": "b"}))
    begun = time.monotonic()
    while taken.lost_to is None and time.monotonic() - begun < 10:
        time.sleep(0.01)
    with pytest.raises(FolderInUse, match="taken over by process 1 on"):
        taken.check()
    taken.release()
    assert (tmp_path / LOCK_NAME).exists()


def test_of_many_at_once_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a lock that was left: whoever takes that away does not take away the new one."""
    monkeypatch.setattr(lock.Holder, "is_this_process", property(lambda self: False))
    for _ in range(20):
        leave(tmp_path, pid=os.getppid(), started="1")
        taken: list[lock.FolderLock] = []

        def attempt(taken: list[lock.FolderLock] = taken) -> None:
            try:
                taken.append(take(tmp_path))
            except FolderInUse:
                pass

        threads = [threading.Thread(target=attempt) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        taken[0].release()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff" * 100, b"[" * 60_000])
def test_a_lock_that_names_nobody_is_waited_for_and_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    take(tmp_path).release()


def test_where_no_file_can_be_made_there_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        assert acquire(tmp_path) is None
    assert "cannot be locked" in caplog.text


def test_holders_elsewhere_are_not_looked_for_here() -> None:
    assert not Holder("elsewhere", "", os.getpid(), "", "", "", "").is_here
    assert lock.describe(None) == "an unknown process"


def test_a_process_that_the_system_hides_is_alive_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hidepid`, /proc shows no process of another user, which trains all the same."""
    parent, read = os.getppid(), lock._stat

    def hidden(pid: int) -> str:
        if pid == parent:
            raise FileNotFoundError(pid)
        return read(pid)

    def refused(pid: int, signal: int) -> None:
        raise PermissionError(pid)

    path = leave(tmp_path, pid=parent, started=str(lock._started(parent)))
    monkeypatch.setattr(lock, "_stat", hidden)
    with monkeypatch.context() as of_another_user:
        of_another_user.setattr(os, "kill", refused)
        assert is_held(tmp_path)
        assert f"process {parent} on " in str(holder_in(tmp_path))
        with pytest.raises(FolderInUse, match=f"process {parent} on "):
            acquire(tmp_path)
        old = time.time() - 60
        os.utime(path, (old, old))
        assert not is_held(tmp_path)
        take(tmp_path).release()  # there is no heartbeat


def test_a_hidden_process_that_does_not_exist_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int, *signal: int) -> str:
        raise ProcessLookupError(pid)

    leave(tmp_path, pid=2**22 + 1)
    with monkeypatch.context() as gone:
        gone.setattr(os, "kill", missing)
        assert not is_held(tmp_path)
        assert holder_in(tmp_path) is None


def test_the_time_of_the_lock_file_is_that_of_the_last_heartbeat(tmp_path: Path) -> None:
    """`is_held` reads it for a process on another machine: it fell behind by 3 s in each 5 s."""
    taken = take(tmp_path)
    os.utime(taken.path, (0, 0))
    limit = time.monotonic() + 10
    while lock._age(taken.path) > 60 and time.monotonic() < limit:
        time.sleep(0.02)
    assert lock._age(taken.path) < 60
    taken.release()
