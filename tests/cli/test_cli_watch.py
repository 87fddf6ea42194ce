"""`paceline watch`: its frames at any width, its lines and records, and its end."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.checkpoint.lock import acquire
from paceline.cli import watch
from paceline.cli.main import main
from paceline.core.journal import FORMAT, JOURNAL_FILE
from paceline.core.terminal import fit, sparkline, width_of
from paceline.report.page import make_page
from paceline.report.run_data import read_run
from paceline.report.run_table import list_runs
from paceline.report.status import read_status


def write_run(folder: Path, steps: int, max_steps: int = 100, *, pace: float = 2.0, **record: Any) -> None:
    """A run whose first step took 50 seconds and the others `pace`; its last step was just now."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(step, 0, 8 * step, 8, 5.0 / step, 1.0, 0.1, 1) for step in range(1, steps + 1)]
    np.array(rows, dtype=FORMAT).tofile(folder / JOURNAL_FILE)
    began = time.time() - 50 - pace * (steps - 1)
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began))
    values = {"format": 1, "started": started, "plan": {"max_steps": max_steps}, "run": {"starts": [["x", 0]]}}
    (folder / "run.json").write_text(json.dumps({**values, **record}))
    logged = [
        {"step": step, "epoch": step / 50, "loss": 5.0 / step, "time": began + 50 + pace * (step - 1), "time/data": 1.5}
        for step in range(1, steps + 1)
    ]
    logged.append({"step": steps, "eval_loss": 0.25, "eval_runtime": 3.0, "time": time.time()})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))


def test_a_live_run_has_a_time_left_that_its_slow_first_step_does_not_change(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    assert read_status(tmp_path).seconds_left is None  # nothing trains there
    lock = acquire(tmp_path)
    try:
        status = read_status(tmp_path)
    finally:
        lock.release()
    assert (status.state, status.step, status.max_steps) == ("running", 10, 100)
    assert status.seconds_left == pytest.approx(180, rel=0.1)
    assert status.samples_per_second == pytest.approx(4, rel=0.1)
    assert status.epoch == pytest.approx(0.2)
    assert status.evaluation["eval_loss"] == 0.25
    assert status.times == {"data": 15.0}
    assert status.losses[0] == 5.0


@pytest.mark.parametrize(
    ("plan", "logged", "epoch"),
    [
        ({"updates_per_epoch": 4}, [], 1.5),
        ({"updates_per_epoch": 4}, [{"step": 5, "epoch": 1.25, "eval_loss": 1.0}], 1.5),  # of an earlier step
        ({"updates_per_epoch": 4}, [{"step": 6, "epoch": 1.375}], 1.375),
        ({}, [{"step": 5, "epoch": 1.25}], 1.25),
        ({"updates_per_epoch": None}, [], 1.0),
        ({"updates_per_epoch": -1}, [{"step": 2, "epoch": "x"}], 1.0),
    ],
)
def test_the_epoch_is_that_of_the_last_step(
    tmp_path: Path, plan: dict[str, Any], logged: list[dict[str, Any]], epoch: float
) -> None:
    """Of a run without a log too, whose rows are those of the newest checkpoint; its page shows the same."""
    write_run(tmp_path, 6, plan={"max_steps": 12, **plan})
    rows = [(step, (step - 1) // 4, 0, 8, 1.0, 1.0, 0.1, 1) for step in range(1, 7)]
    np.array(rows, dtype=FORMAT).tofile(tmp_path / JOURNAL_FILE)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    assert read_status(tmp_path).epoch == epoch
    assert f"<dt>epochs</dt><dd>{epoch:.4g}</dd>" in make_page([read_run(tmp_path)])


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("is_unicode", [True, False])
def test_frames_fit(tmp_path: Path, columns: int, is_unicode: bool) -> None:
    name = "名前" * 60 + "\x1b[2J\x07\u202e\u0301"
    write_run(tmp_path, 60, arguments={"run_name": name}, end={"state": "failed", "error": "boom \x1b]0;x\x07" * 40})
    lines = watch.draw(read_status(tmp_path), columns, is_unicode)
    assert max(map(width_of, lines)) <= columns
    assert all(line.isprintable() for line in lines)
    if not is_unicode:
        assert all(line.isascii() for line in lines[1:])
    assert any(line.startswith("warning") for line in lines)


def test_one_frame_and_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 100)
    assert main(["watch", str(tmp_path)]) == 0  # ends, because the run has
    frame = capsys.readouterr().out
    assert re.search(r"state +finished", frame)
    assert "100 of 100 100%" in frame
    assert "\x1b" not in frame
    assert main(["watch", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["state"], record["step"], record["loss"]) == ("finished", 100, 0.05)


def test_lines_where_there_is_no_terminal_and_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, 98)
    lock, steps = acquire(tmp_path), iter((99, 100))

    def sleep(seconds: float) -> None:
        step = next(steps)
        write_run(tmp_path, step)
        if step == 100:
            lock.release()

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert main(["watch", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(",")[0] for line in lines]
    assert shown == ["running: step 98/100", "running: step 99/100", "finished: step 100/100"]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_the_terminal_cannot_show(encoding: str) -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
    watch.redraw(["λauf 1", "odd \udcff byte"], stream)
    shown = "λ" if encoding == "utf-8" else "?"
    assert buffer.getvalue() == f"\r\x1b[J{shown}auf 1\nodd ? byte\n\x1b[2A".encode(encoding)


def test_a_run_that_vanishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write_run(run, 5)
    lock = acquire(run)

    def sleep(seconds: float) -> None:
        run.rename(tmp_path / "moved")

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    try:
        assert main(["watch", str(run)]) == 1
    finally:
        (tmp_path / "moved").rename(run)
        lock.release()
    assert "cannot be read any more" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[" * 10_000, "[]", '{"run": 3, "plan": [], "end": 7, "started": {}}', ""])
def test_damaged_records(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 5)
    (tmp_path / "run.json").write_text(content)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "5" in capsys.readouterr().out


HUGE = 10**400  # JSON has it, and no float


@pytest.mark.parametrize(
    ("record", "row", "state"),
    [
        ({"end": {"state": {}, "step": HUGE}}, {"eval_loss": HUGE}, {"log_history": True}),
        ({"end": {"state": ["finished"], "time": HUGE}}, {"train_runtime": -HUGE}, {"log_history": 3}),
        ({"run": {"starts": [["x", HUGE]]}}, {"time/data": HUGE}, {"max_steps": HUGE}),
        ({"plan": {"max_steps": HUGE}}, {"loss": HUGE, "time": HUGE}, {"log_history": {"step": 1}}),
    ],
)
def test_values_of_the_wrong_kind_are_left_out(
    tmp_path: Path, record: dict[str, Any], row: dict[str, Any], state: dict[str, Any]
) -> None:
    write_run(tmp_path / "run", 10, **record)
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, **row}) + "\n")
    (tmp_path / "run" / "checkpoint-10").mkdir()
    (tmp_path / "run" / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(state))
    assert "step        10" in "\n".join(watch.draw(read_status(tmp_path / "run"), 80))
    assert "training loss" in make_page([read_run(tmp_path / "run")])
    assert [found.name for found in list_runs(tmp_path).rows] == ["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "needs the folder"), (["{here}/x"], "is not a folder"), (["{here}", "--every", "0"], "--every 0")],
)
def test_wrong_commands(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *[word.format(here=tmp_path) for word in words]]) == 2
    assert message in capsys.readouterr().err


def test_text_of_a_known_width() -> None:
    assert fit("名前名前", 5) == "名前…"
    assert width_of("e\u0301") == 1
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float("nan"), 1.0], 8) == ""
    assert len(sparkline([1e308, -1e308] * 50, 10)) == 10
