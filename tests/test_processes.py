"""The processes of tests: `processes.py`, `warm.py` and `interrupts.py` of tests/support."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import interrupts
import processes
import pytest
import warm

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


SHOW = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "name": __name__, "is_main": sys.modules["__main__"].__dict__ is globals(),
    "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"), "first": sys.path[0], "input": sys.stdin.read(),
    "is_interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
print("an error", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_program_finds_what_an_interpreter_of_its_own_gives_it(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "show.py").write_text(SHOW)
    environment = {**os.environ, "VARIABLE": "value", "PYTHONPATH": str(scripts)}
    expected = {
        "name": "__main__", "is_main": True, "folder": str(tmp_path), "variable": "value", "input": "",
        "is_interruptible": True,
    }  # fmt: skip
    for words, arguments, first in (
        ([str(scripts / "show.py"), "a"], [str(scripts / "show.py"), "a"], str(scripts)),
        (["-c", SHOW, "a"], ["-c", "a"], ""),
        (["-m", "show", "a"], [str(scripts / "show.py"), "a"], str(tmp_path)),
    ):
        done = warm.run(words, tmp_path, environment)
        assert done.stderr == "an error\n"
        assert json.loads(done.stdout) == {**expected, "arguments": arguments, "first": first}


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("{}['a key']", 1, "KeyError: 'a key'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end"),
    ],
)
def test_a_program_ends_as_in_an_interpreter_of_its_own(code: str, status: int, said: str) -> None:
    done = warm.run(["-c", code])
    assert (done.returncode, said in done.stderr) == (status, True)


def test_a_program_is_ended_when_its_time_is_up() -> None:
    program = warm.start(["-c", "import time; time.sleep(100)"])
    with pytest.raises(subprocess.TimeoutExpired):
        program.communicate(timeout=0.1)
    assert program.poll() is None
    program.kill()
    program.communicate()
    assert program.returncode == -signal.SIGKILL


NESTED = """
import subprocess, sys
done = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
print(done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\\n")[2])
"""


@pytest.mark.slow
def test_a_program_starts_programs() -> None:
    fast = "import sys; is_forked = 'torch' in sys.modules; "
    for code, said in (
        ("print(is_forked)", f"0 {warm.IS_SUPPORTED} "),
        ("sys.exit(f'is_forked {is_forked}')", f"1  is_forked {warm.IS_SUPPORTED}"),
        ("import os; print('before', flush=True); os.kill(os.getpid(), 9)", "-9 before "),
    ):
        done = warm.run(["-c", NESTED, fast + code], is_nested=True)
        assert (done.stdout, done.stderr) == (f"{said}\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not warm.IS_SUPPORTED, reason="programs are not forked on this system")
def test_programs_end_with_the_process_that_started_them() -> None:
    code = (
        "import os, warm\n"
        "warm._servers.append(warm.Server(()))\n"
        "print(warm.start(['-c', 'import time; time.sleep(100)']).pid, flush=True)\n"
        "os._exit(0)"
    )
    path = os.pathsep.join([str(processes.SUPPORT), str(processes.SOURCES)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    began = time.monotonic()
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() - began < 10
        time.sleep(0.01)


def test_tests_take_ctrl_c_where_a_shell_ignores_it() -> None:
    """In the background of a script a process starts with SIGINT ignored, and so would the processes it starts."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.restore()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert subprocess.run(["sh", "-c", "kill -INT $$"]).returncode == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
