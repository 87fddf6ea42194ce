"""The line about a run that Ctrl-C has stopped."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.interrupts import describe_stop, interrupts_described
from paceline.core.lineage import KEY, PROGRESS_FILE, begin_run
from paceline.core.signals import StopSignals


def checkpoint(folder: Path, step: int, run_id: str) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / PROGRESS_FILE).write_text(json.dumps({KEY: {"starts": [[run_id, 0]]}}))
    return path


def test_the_newest_checkpoint_of_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-of-mine").mkdir()
    checkpoint(tmp_path, 300, "another")
    run = begin_run(tmp_path, None, 0, tmp_path.glob("checkpoint-*"))
    assert "Stopped at step 7. This run has no checkpoint in" in describe_stop(tmp_path, run, 7)
    for step in (9, 10):
        newest = checkpoint(tmp_path, step, run.run_id)
    line = describe_stop(tmp_path, run, 1010)
    assert (
        line == f"Stopped at step 1,010. {newest} is complete: train(resume_from_checkpoint=True) resumes from there."
    )
    assert "before the first step" in describe_stop(tmp_path, None, 0)


def test_the_line_goes_before_the_interrupt(caplog: pytest.LogCaptureFixture) -> None:
    for line in (None, "Stopped."):
        with pytest.raises(KeyboardInterrupt), interrupts_described(lambda line=line: line):  # type: ignore[misc]
            raise KeyboardInterrupt
    with pytest.raises(ValueError, match="other"), interrupts_described(lambda: "not said"):
        raise ValueError("other")
    assert [record.getMessage() for record in caplog.records] == ["Stopped."]


class BusyStream(io.StringIO):
    """A stream in the middle of a write: Python's buffers refuse another one of the same thread."""

    def write(self, text: str) -> int:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_signal_within_a_write_stops_the_run_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BusyStream()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger("paceline").addHandler(handler)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        logging.getLogger("paceline").removeHandler(handler)
    assert signals.is_keyboard


SCRIPT = """
import logging, os, signal, sys
from paceline.core.interrupts import interrupts_described
from paceline.core.signals import SECOND_INTERRUPT, StopSignals

def stop():
    with interrupts_described(lambda: "Stopped at step 3."), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        if sys.argv[1] == "twice":
            os.kill(os.getpid(), signal.SIGINT)
        if signals.is_keyboard:
            raise KeyboardInterrupt("stopped at step 3")

if sys.argv[1] == "caught":
    try:
        stop()
    except KeyboardInterrupt as error:
        assert str(error) == "stopped at step 3"
    raise KeyError("another error")
if sys.argv[1] == "silent":
    logging.getLogger("paceline").setLevel(logging.ERROR)
stop()
"""


def script(word: str) -> tuple[int, list[str]]:
    """Returns the exit code of a script and the lines of its standard error, without that of the first Ctrl-C."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, word], capture_output=True, text=True)
    return result.returncode, [line for line in result.stderr.splitlines() if not line.startswith("SIGINT:")]


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_ends_a_script_in_one_line() -> None:
    assert script("once") == (-signal.SIGINT, ["Stopped at step 3."])
    code, lines = script("twice")
    assert (code, lines[0], lines[-1]) == (-signal.SIGINT, "Stopped at step 3.", "KeyboardInterrupt: a second Ctrl-C")
    assert "Traceback" in lines[1]
    code, lines = script("silent")  # where the line is not shown
    assert (code, lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt: stopped at step 3")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_error_after_a_caught_ctrl_c_is_printed() -> None:
    code, lines = script("caught")
    assert (code, lines[0], lines[-1]) == (1, "Stopped at step 3.", "KeyError: 'another error'")
