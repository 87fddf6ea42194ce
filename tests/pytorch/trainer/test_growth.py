"""A long run adds little from one step to the next: memory, and the rows that a save formats."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

from paceline.callbacks.printer import PrinterCallback
from paceline.core import log_text
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerState

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
