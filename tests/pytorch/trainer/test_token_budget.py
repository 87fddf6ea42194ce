"""Training by a token budget: the numbers of batches of samples, exact resume, and what the rows tell."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import llama, pad, texts
from small_models import losses, make_trainer, weights
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainerCallback

pytest.importorskip("transformers")


def by_tokens(folder: Path, tokens: int = 40, dropout: float = 0.0, data: Any = None, **options: Any) -> Trainer:
    """Not yet trained."""
    defaults = {"per_device_train_batch_size": 8, "data_collator": pad, "per_device_train_tokens": tokens}
    data = texts() if data is None else data
    return make_trainer(folder, llama(dropout=dropout), data, **{**defaults, **options})


@pytest.mark.parametrize("packing", [None, "pack", "flatten"])
def test_samples_of_one_window_have_the_loss_and_gradient_of_batches_of_samples(
    packing: str | None, tmp_path: Path
) -> None:
    results = []
    by_samples = {"per_device_train_tokens": None, "per_device_train_batch_size": 4}
    for number, options in enumerate((by_samples, {"packing": packing})):
        trainer = by_tokens(tmp_path / str(number), gradient_accumulation_steps=40, num_train_epochs=2, **options)
        trainer.train()
        results.append((losses(trainer), [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataloader_num_workers": 2, "gradient_accumulation_steps": 2},
        pytest.param(
            {"packing": "pack", "packing_length": 20, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"packing": "flatten"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_bit_for_bit_in_the_middle_of_an_epoch(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, **options}
    whole = by_tokens(tmp_path / "whole", dropout=0.1, **options)
    whole.train()
    by_tokens(tmp_path / "cut", dropout=0.1, callbacks=[StopAt()], **options).train()
    resumed = by_tokens(tmp_path / "cut", dropout=0.1, **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.state.global_step == whole.state.max_steps == resumed.state.max_steps
    assert resumed.state.epoch == whole.state.epoch == 2.0


def test_an_epoch_is_finished_in_its_own_budget(tmp_path: Path) -> None:
    first = by_tokens(tmp_path, save_strategy="steps", save_steps=3, callbacks=[StopAt()], num_train_epochs=2)
    first.train()
    resumed = by_tokens(tmp_path, tokens=80, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=True)
    own, new = (len(by_tokens(tmp_path, tokens=each).get_train_dataloader()) for each in (40, 80))
    assert resumed.state.global_step == resumed.state.max_steps == own + new
    assert resumed.state.epoch == 2.0


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0.25),
        ({"packing": "flatten"}, 0.0),
        ({"packing": "pack"}, 0.0),
        ({"packing": "pack", "packing_length": 16}, 0.25),
        ({"packing": "group", "per_device_train_tokens": None}, 0.5),
    ],
)
def test_rows_tell_the_padding_and_the_useful_tokens(options: dict[str, Any], most: float, tmp_path: Path) -> None:
    rows = Rows()
    trainer = by_tokens(tmp_path, callbacks=[rows], **options)
    trainer.train()
    told = [row for row in rows.rows if "loss" in row]
    assert all(0 <= row["pad_ratio"] < 1 and row["useful_tokens_per_second"] > 0 for row in told)
    assert sum(row["pad_ratio"] for row in told) / len(told) <= most
    assert not any("pad_ratio" in row for row in trainer.state.log_history)


def test_no_rows_tell_it_without_the_options(tmp_path: Path) -> None:
    rows = Rows()
    by_tokens(tmp_path, per_device_train_tokens=None, callbacks=[rows]).train()
    assert not any("pad_ratio" in row for row in rows.rows)


def test_a_collator_that_exceeds_the_budget_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wide(samples: Any) -> Any:
        return pad([*samples, {"input_ids": [1] * 30, "labels": [1] * 30}])

    with caplog.at_level(logging.WARNING):
        by_tokens(tmp_path, data_collator=wide, max_steps=3).train()
    assert caplog.text.count("and per_device_train_tokens=40: the data_collator pads to more") == 1


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return range(37)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts())

    def __len__(self) -> int:
        return 37


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cls": OwnSampler}, "the training loader or its sampler is OwnSampler's own"),
        ({"data": Stream()}, "the training data is a stream"),
        ({"tokens": 14}, r"per_device_train_tokens=14: sample \d+ of the training data has 15 tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    trainer = by_tokens(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        trainer.train()
