"""Writing in the background: the memory that a copy may take, and the priority of the thread."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.pytorch.checkpoint import background
from paceline.pytorch.checkpoint.background import LOWER_PRIORITY, Writer, available_host_memory

GIB = 2**30
SYSTEM = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"  # 8 GiB


@pytest.mark.parametrize(
    ("system", "limit", "expected"),
    [
        (SYSTEM, None, 8 * GIB),
        (SYSTEM, f"{4 * GIB}", 2 * GIB),  # 3 GiB used, of which 1 GiB are files
        (SYSTEM, f"{32 * GIB}", 8 * GIB),
        (SYSTEM, "max", 8 * GIB),
        ("MemTotal: 1 kB\n", f"{4 * GIB}", 2 * GIB),
        ("MemAvailable: unknown kB\n", f"{4 * GIB}", 2 * GIB),
        ("MemAvailable:\n", f"{4 * GIB}", 2 * GIB),
        (None, None, None),
    ],
)
def test_available_memory_is_that_of_the_system_and_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str | None, limit: str | None, expected: int | None
) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    if system is not None:
        (tmp_path / "proc/meminfo").write_text(system)
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{3 * GIB}\n")
        (group / "memory.stat").write_text(f"anon {2 * GIB}\nfile {GIB}\n")
    monkeypatch.setattr(background, "Path", lambda name: tmp_path / name[1:])
    assert available_host_memory() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has one priority")
def test_a_writer_that_is_waited_for_has_the_priority_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine makes a loop wait that has nothing else to do."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda which, thread, niceness: asked.append((thread, niceness)))
    going, threads = threading.Event(), list[int]()
    writer = Writer()

    def work() -> None:
        threads.append(threading.get_native_id())
        going.wait()

    writer.start(work, lambda error: None)
    while not threads:
        time.sleep(0.001)
    threading.Timer(0.05, going.set).start()
    writer.join()
    assert asked == [(threads[0], LOWER_PRIORITY), (threads[0], os.getpriority(os.PRIO_PROCESS, 0))]
