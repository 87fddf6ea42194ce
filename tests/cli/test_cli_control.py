"""`paceline control` against live runs, and what a run and the command line refuse."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import control_job
import processes
import pytest
from small_models import classification

from paceline.checkpoint import lock
from paceline.checkpoint.lock import holder_in
from paceline.cli import main as cli
from paceline.core import commands
from paceline.core.commands import COMMAND_FILE, CommandRefused, take_command
from paceline.core.journal import CHANGES_FILE, JOURNAL_FILE, read_changes, read_rows
from paceline.core.session import COMMAND_FILE as LISTENED
from paceline.pytorch.replay.step import replay

ID = "0" * 32


def wait_until(is_so: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "control" in path.name and path.name != CHANGES_FILE]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids="{} processes".format)
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run in progress, of one and of two processes."""
    started = processes.start("control_job.py", request.param, "wait", str(tmp_path))
    try:
        wait_until(lambda: holder_in(tmp_path / "out") and read_rows(tmp_path / "out" / JOURNAL_FILE), 120)
        yield tmp_path / "out"
        processes.finish(started, timeout=60)
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
def test_a_live_run_obeys_answers_and_can_be_replayed(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def control(*words: str) -> tuple[int, str]:
        code = cli.main(["control", str(live), *words])
        return code, capsys.readouterr().out

    code, text = control("learning-rate", "1e-3")
    assert code == 0
    assert "learning_rate is 0.001" in text
    step = int(text.partition("at step ")[2].partition(":")[0])
    code, text = control("weight-decay", "0.3")
    assert (code, "weight_decay is 0.3 (was 0.1)" in text) == (0, True)
    assert control("max-grad-norm", "0.05")[0] == 0
    assert control("evaluate")[0] == 0
    assert control("save")[0] == 0
    put_bytes(live, b'{"id": "x')  # hostile: the run goes on
    wait_until(lambda: COMMAND_FILE not in os.listdir(live))
    code, text = control("stop")
    assert code == 0
    last = int(text.rpartition(" ")[2])
    wait_until(lambda: holder_in(live) is None)
    rows = read_rows(live / JOURNAL_FILE)
    assert rows[step - 1].learning_rate < 5.1e-5
    assert rows[step].learning_rate == 1e-3
    assert rows[-1].step == last
    assert len([path for path in live.iterdir() if path.name.startswith("checkpoint-")]) == 2  # save, and stop
    assert (live / f"checkpoint-{last}").is_dir()
    assert len(read_changes(live / CHANGES_FILE)) == 3
    logs = json.loads((live / f"checkpoint-{last}" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_loss" in row for row in logs)
    assert left_in(live) == []
    if len(processes_of(live)) == 1:
        again = control_job.make(live, eval_dataset=classification(8), max_steps=4000, save_steps=4000)
        assert replay(again, last).is_exact
    assert cli.main(["control", str(live), "save"]) == 2
    assert "no run trains" in capsys.readouterr().err
    assert left_in(live) == []


def processes_of(folder: Path) -> list[str]:
    """The random states in the newest checkpoint: one for each process."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return [path.name for path in newest.iterdir() if path.name.startswith("rng_state")]


def put_bytes(folder: Path, content: bytes, mode: int = 0o600) -> None:
    path = folder / "new"
    path.write_bytes(content)
    path.chmod(mode)
    path.rename(folder / COMMAND_FILE)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"1" * 4000, "not a JSON object"),
        (b" " * 5000, "more than 4096 bytes"),
        (b"[]", "not a JSON object"),
        (b'{"command": "save"}', "no id"),
        (b'{"command": "save", "id": "../../../../tmp/x"}', "no id"),
        (json.dumps({"id": ID, "command": "stop", "pid": 2**31 - 1}).encode(), "its sender has ended"),
        (json.dumps({"id": ID, "command": "rm"}).encode(), "no command 'rm'"),
        (json.dumps({"id": ID, "command": ["save"]}).encode(), "no command"),
        (json.dumps({"id": ID, "command": "learning-rate"}).encode(), "not a finite number"),
        (json.dumps({"id": ID, "command": "learning-rate", "value": float("nan")}).encode(), "not a finite number"),
        (json.dumps({"id": ID, "command": "learning-rate", "value": "1e-3"}).encode(), "not a finite number"),
        (json.dumps({"id": ID, "command": "learning-rate", "value": -1}).encode(), "not positive"),
        (json.dumps({"id": ID, "command": "learning-rate", "value": 10**400}).encode(), "too large"),
        (json.dumps({"id": ID, "command": "weight-decay", "value": -1}).encode(), "negative"),
        (json.dumps({"id": ID, "command": "max-grad-norm", "value": True}).encode(), "not a finite number"),
    ],
)
def test_bytes_that_are_no_command_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    put_bytes(tmp_path, content)
    with pytest.raises(CommandRefused, match=reason):
        take_command(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert take_command(tmp_path) is None


def test_links_pipes_folders_and_files_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = json.dumps({"id": ID, "command": "save"}).encode()
    (tmp_path / "target").write_bytes(valid)
    (tmp_path / COMMAND_FILE).symlink_to(tmp_path / "target")
    with pytest.raises(CommandRefused, match="cannot be read"):
        take_command(tmp_path)
    os.mkfifo(tmp_path / COMMAND_FILE)
    with pytest.raises(CommandRefused, match="not a regular file"):
        take_command(tmp_path)
    put_bytes(tmp_path, valid, 0o640)
    with pytest.raises(CommandRefused, match="0600"):
        take_command(tmp_path)
    put_bytes(tmp_path, valid)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(CommandRefused, match="another user"):
            take_command(tmp_path)
    put_bytes(tmp_path, valid)
    assert take_command(tmp_path) == ("save", "save", None, ID)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a run and a command"),
        (["sav"], "did you mean 'save'"),
        (["save", "3"], "takes no value"),
        (["learning-rate"], "needs a value"),
        (["learning-rate", "fast"], "fast"),
        (["scale-learning-rate", "0"], "not positive"),
        (["max-grad-norm", "nan"], "not a finite number"),
        (["save", "--timeout", "0"], "positive number of seconds"),
        (["save", "--learning_rate", "1"], "--timeout"),
        (["save"], "no run trains"),
    ],
)
def test_a_wrong_command_line_is_an_error(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["control", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_not_read_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.control.holder_in", lambda folder: "process 1")
    assert cli.main(["control", str(tmp_path), "save", "--timeout", "0.1"]) == 1
    assert "withdrawn" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_two_senders_take_turns(tmp_path: Path) -> None:
    def take_both() -> None:
        for _ in range(2):
            wait_until(lambda: commands.is_waiting(tmp_path))
            found = take_command(tmp_path)
            assert found is not None
            taken.append(found[0])
            commands.answer_command(tmp_path, found[3], True, found[0])

    taken: list[str] = []
    run = threading.Thread(target=take_both)
    run.start()
    with commands.sent(tmp_path, "save", None, 5) as first:
        assert commands.wait_for_answer(tmp_path, first, 5) == (True, "save")
        with commands.sent(tmp_path, "evaluate", None, 5) as second:
            assert commands.wait_for_answer(tmp_path, second, 5) == (True, "evaluate")
    run.join()
    assert taken == ["save", "evaluate"]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_tells_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_LOOKS", 0.01)
    held, found = lock.acquire(tmp_path), threading.Event()
    assert held is not None
    held.listen(COMMAND_FILE, found.set)
    assert not found.wait(0.05)
    (tmp_path / COMMAND_FILE).touch()
    assert found.wait(5)
    held.release()
    assert LISTENED == COMMAND_FILE


def test_a_run_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without evaluation data or weight decay; the answer says so, and the run goes on."""
    answers: list[tuple[bool, str]] = []

    def ask(*command: Any) -> None:
        with commands.sent(tmp_path, *command, 5) as command_id:
            answer = commands.wait_for_answer(tmp_path, command_id, 20)
            assert answer is not None
            answers.append(answer)

    def ask_all() -> None:
        wait_until(lambda: read_rows(tmp_path / JOURNAL_FILE))
        ask("evaluate", None)
        ask("weight-decay", 0.1)
        ask("stop", None)

    sender = threading.Thread(target=ask_all)
    sender.start()
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_LOOKS", 0.02)
    control_job.make(tmp_path, control_job.Slow(), max_steps=2000, weight_decay=0.0, save_strategy="no").train()
    sender.join()
    assert [is_accepted for is_accepted, _ in answers] == [False, False, True]
    assert "no evaluation data" in answers[0][1]
    assert "weight_decay above 0" in answers[1][1]
    assert not list(tmp_path.glob("checkpoint-*"))
