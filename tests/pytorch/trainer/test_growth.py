"""A long run adds little from one step to the next: memory, and the rows that a save formats."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

from paceline.callbacks.printer import PrinterCallback
from paceline.checkpoint.folders import verify
from paceline.core import log_text
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerState
from paceline.report.run_data import read_run

BEGIN, FIRST, LAST = 100, 150, 450


class MeasureMemory(TrainerCallback):
    def __init__(self) -> None:
        self.held: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == BEGIN:
            tracemalloc.start()
        if state.global_step in (FIRST, LAST):
            gc.collect()
            self.held.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.slow
def test_a_run_that_logs_each_step_grows_by_its_row(tmp_path: Path) -> None:
    """Five numbers in a dict take 310 bytes; the caches that fill beside them, up to 120 for each of 300 rows."""
    memory = MeasureMemory()
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        classification(64),
        max_steps=LAST + 1,
        logging_steps=1,
        callbacks=[memory],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        tracemalloc.stop()
    assert (memory.held[1] - memory.held[0]) / (LAST - FIRST) < 500


def test_saves_format_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[int] = []
    plain = log_text.encode_rows

    def count(rows: Any) -> bytes:
        formatted.append(len(rows))
        return plain(rows)

    monkeypatch.setattr(log_text, "encode_rows", count)
    monkeypatch.setattr(log_text, "CHUNK_ROWS", 10)
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        classification(64),
        max_steps=100,
        logging_steps=1,
        save_strategy="steps",
        save_steps=20,
        nonfinite_policy="skip",
    )
    trainer.train()
    assert sum(formatted) == 100
    saved = TrainerState.load_from_json(tmp_path / "checkpoint-100" / "trainer_state.json")
    assert saved.log_history == trainer.state.log_history[:100]


def run_with_blocks(folder: Path, **options: Any) -> Any:
    """A run that logs 100 rows and writes checkpoints at steps 20, 40, 60, 80 and 100; a block has 10 rows."""
    return make_trainer(
        folder,
        Classifier(),
        classification(64),
        **{"max_steps": 100, "logging_steps": 1, "save_strategy": "steps", "save_steps": 20, **options},
    )


def rows_in(checkpoint: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return rows


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "CHUNK_ROWS", 5)
    monkeypatch.setattr(log_text, "CHUNKS_PER_BLOCK", 2)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_writes_a_bounded_number_of_rows(tmp_path: Path, small_blocks: None, in_background: bool) -> None:
    trainer = run_with_blocks(tmp_path, save_in_background=in_background, save_total_limit=4)
    trainer.train()
    for step in (40, 60, 80):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert [row["step"] for row in rows_in(checkpoint)] == list(range(step - 9, step + 1))
        assert verify(checkpoint) == []
        read = TrainerState.load_from_json(checkpoint / "trainer_state.json")
        assert read.log_history == trainer.state.log_history[:step]
    names = [path.name for path in (tmp_path / "checkpoint-60" / "log_history").glob("rows-*")]
    assert len(names) == 5
    for name in names:
        assert (tmp_path / "checkpoint-60/log_history" / name).samefile(tmp_path / "checkpoint-80/log_history" / name)
    assert rows_in(tmp_path / "checkpoint-100") == trainer.state.log_history[:100]
    assert not (tmp_path / "checkpoint-100" / "log_history").exists()


def test_a_resumed_run_has_the_rows_of_all_blocks(tmp_path: Path, small_blocks: None) -> None:
    whole = run_with_blocks(tmp_path / "whole")
    whole.train()
    resumed = run_with_blocks(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-60"))

    def same(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if "train_runtime" not in row]

    assert same(resumed.state.log_history) == same(whole.state.log_history)
    again = TrainerState.load_from_json(tmp_path / "resumed" / "checkpoint-80" / "trainer_state.json")
    assert again.log_history == whole.state.log_history[:80]


def test_a_run_that_stops_early_ends_with_one_file(tmp_path: Path, small_blocks: None) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 60

    trainer = run_with_blocks(tmp_path, callbacks=[Stop()])
    trainer.train()
    assert rows_in(tmp_path / "checkpoint-60") == trainer.state.log_history[:60]
    trainer.save_state()
    assert rows_in(tmp_path) == trainer.state.log_history


def test_each_checkpoint_holds_one_file_on_request(tmp_path: Path, small_blocks: None) -> None:
    trainer = run_with_blocks(tmp_path, save_full_log_history=True)
    trainer.train()
    assert [len(rows_in(tmp_path / f"checkpoint-{step}")) for step in (20, 40, 60, 80, 100)] == [20, 40, 60, 80, 100]
    assert list(tmp_path.rglob("log_history")) == []


def test_a_report_of_an_unfinished_run_reads_the_blocks(tmp_path: Path, small_blocks: None) -> None:
    trainer = run_with_blocks(tmp_path)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-100")
    (tmp_path / "log.jsonl").unlink(missing_ok=True)
    (tmp_path / "report.html").unlink(missing_ok=True)
    found = read_run(tmp_path)
    assert [row["step"] for row in found.rows] == list(range(1, 81))
    assert found.problems == []
    next((tmp_path / "checkpoint-80" / "log_history").glob("rows-*")).write_text("[")
    harmed = read_run(tmp_path)
    assert [row["step"] for row in harmed.rows] == list(range(71, 81))
    assert "checkpoint-80/trainer_state.json" in harmed.problems[0]
