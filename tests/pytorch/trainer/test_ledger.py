"""The time ledger of a run: the parts are the wall time, and go to the callbacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import Trainer, TrainerCallback
from paceline.core.ledger import DEVICE, LOG, Ledger
from paceline.pytorch.distributed.device_clock import DeviceClock, make_ledger

STEP_PARTS = {"data", "transfer", "forward", "backward", "optimizer"}


class Rows(TrainerCallback):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


class Slow(torch.utils.data.Dataset[Any]):
    """A dataset of which each sample takes a while."""

    def __init__(self, seconds: float) -> None:
        self.samples = classification(64)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[index]


class SlowModel(Classifier):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.004)
        return super().forward(*args, **kwargs)


def test_the_parts_are_the_wall_time_and_each_is_what_took_it(tmp_path: Path) -> None:
    rows = Rows()
    trainer = make_trainer(
        tmp_path,
        SlowModel(),
        Slow(0.001),
        eval_dataset=classification(16),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=6,
        callbacks=[rows],
    )
    begun = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - begun
    spent = trainer.time_spent
    assert sum(spent.values()) == pytest.approx(wall, rel=0.1)
    assert set(spent) >= {*STEP_PARTS, "setup", "log", "evaluate", "save", "other"}
    assert spent["data"] >= 12 * 8 * 0.001  # each sample sleeps 1 ms
    assert spent["forward"] >= 12 * 2 * 0.004
    assert spent["evaluate"] >= 2 * 2 * 0.004
    timed = [row for row in rows.rows if any(name.startswith("time/") for name in row)]
    assert ["loss" in row for row in timed] == [True, True, True, False], "three rows of losses, and the last"
    assert sum(row.get("time/forward", 0.0) for row in timed) == pytest.approx(spent["forward"], rel=1e-3)
    assert not any(name.startswith("time/") for row in trainer.state.log_history for name in row)


def test_the_summary_is_logged_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, Classifier(), Slow(0.002), max_steps=6, log_level="info")
    with caplog.at_level("INFO"):
        trainer.train()
    told = [record for record in caplog.records if "waiting for data" in record.getMessage()]
    assert len(told) == 2
    assert ", 6 optimizer steps: " in told[0].getMessage()
    assert told[1].getMessage().endswith("raise dataloader_num_workers, or let the dataset do less for each sample.")
    assert told[1].levelname == "INFO", "a run of a second is no reason for a warning"


def test_an_own_training_step_is_computation(tmp_path: Path) -> None:
    from paceline import Trainer

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            time.sleep(0.005)
            loss = model(**inputs)[0]
            loss.backward()
            return loss.detach()

    trainer = make_trainer(tmp_path, Classifier(), classification(64), cls=Own, max_steps=4)
    trainer.train()
    assert trainer.time_spent["compute"] >= 4 * 0.005
    assert "forward" not in trainer.time_spent


class Event:
    """An event of a device that needs 2 s for each second in which something was queued, and counts waits."""

    time = 0.0
    waits = 0

    def record(self) -> None:
        self.at = Event.time

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


def test_a_device_is_timed_by_its_events_which_only_a_log_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Event.waits = 0
    clock = DeviceClock(Event)
    monkeypatch.setattr("paceline.pytorch.distributed.device_clock.make_ledger", lambda device: Ledger(clock))

    class Ticks(Classifier):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            Event.time += 1.0
            return super().forward(*args, **kwargs)

    options: dict[str, Any] = {"eval_dataset": classification(16), "eval_strategy": "steps", "eval_steps": 8}
    trainer = make_trainer(tmp_path, Ticks(), classification(64), max_steps=8, logging_steps=4, **options)
    trainer.train()
    spent = dict(trainer.time_spent)
    # exactly: no other part took the device's time, and the passes of the evaluation are its own
    assert spent["forward"] == 8.0
    assert spent["evaluate"] >= 2.0
    assert set(spent) == {"setup", "forward", "evaluate"}
    assert Event.waits <= 6, "each log waits, the last row, and the end of the run"


def test_devices_without_events_are_timed_by_the_host() -> None:
    assert make_ledger(torch.device("cpu")).reading == LOG
    assert make_ledger(torch.device("mps")).reading == DEVICE


def test_times_of_a_row_that_was_dropped_are_in_the_next_one_with_its_operations(tmp_path: Path) -> None:
    class Drops(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if self.state.global_step % 4 == 0:
                super().log(logs, start_time)

    rows = Rows()
    trainer = make_trainer(
        tmp_path, SlowModel(), classification(64), cls=Drops, callbacks=[rows], log_flops=True, max_steps=12
    )
    trainer.train()
    trained = [row for row in rows.rows if "loss" in row]
    operations = [
        row["model_flops_per_second"] * sum(value for name, value in row.items() if name.startswith("time/"))
        for row in trained[1:]
    ]
    assert len(trained) == 3
    assert all(row["time/forward"] > 4 * 0.004 for row in trained)
    meter = trainer.step_parts.find("flop_meter")
    assert operations == pytest.approx([meter.operations / 3] * 2, rel=1e-3)


def test_times_of_a_row_that_was_dropped_are_in_no_row_of_an_evaluation(tmp_path: Path) -> None:
    class Drops(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" not in logs:
                super().log(logs, start_time)

    rows = Rows()
    options: dict[str, Any] = {"eval_dataset": classification(8), "eval_strategy": "steps", "eval_steps": 1}
    make_trainer(tmp_path, Classifier(), classification(16), cls=Drops, callbacks=[rows], **options).train()
    evaluations = [row for row in rows.rows if "eval_loss" in row]
    assert len(evaluations) == 4
    assert not [key for row in evaluations for key in row if key.startswith("time/")]
