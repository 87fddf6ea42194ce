"""How tests run several processes: `tests/support/processes.py`."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import processes
import pytest

TALKATIVE = """
import os, sys, time
from pathlib import Path
done = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    sys.stderr.write("x" * 1_000_000)
    done.touch()
while not done.exists():
    time.sleep(0.01)
"""
FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no such file")
time.sleep(100)
"""


def test_a_process_that_writes_more_than_a_pipe_holds_is_read(tmp_path: Path) -> None:
    script = tmp_path / "talkative.py"
    script.write_text(TALKATIVE)
    texts = processes.finish(processes.start(str(script), 2, str(tmp_path / "done")), timeout=60)
    assert [len(text) for text in texts] == [0, 1_000_000]


def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="process 1 ended with 1:\nno such file"):
        processes.finish(processes.start(str(script), 2))
    assert time.monotonic() - began < 50


def test_processes_that_take_too_long_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    started = processes.start(str(script), 1)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.finish(started, timeout=0.5)
    assert started[0].poll() is not None
