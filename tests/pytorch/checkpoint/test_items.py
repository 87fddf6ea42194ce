"""A further item, joined in one place, is saved, restored and rewound like those of every Trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.checkpoint import folders
from paceline.pytorch.checkpoint.tensors import load_tensors
from paceline.pytorch.distributed.strategy import SingleDevice

DATA = classification(16)
STEPS = {"max_steps": 4, "per_device_train_batch_size": 4}


class Average(TrainerCallback):
    """An average of the weights over the optimizer steps."""

    def __init__(self) -> None:
        self.values = torch.zeros(8)
        self.num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        self.values += next(model.parameters()).detach().flatten()[:8] / 10

    def state_of(self) -> dict[str, Any]:
        return {"values": self.values, "num_steps": self.num_steps}


class AsItem:
    def __init__(self, average: Average) -> None:
        self.average = average

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_of()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.average.values = state["values"].clone()
        self.average.num_steps = state["num_steps"]


def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None = None, data: Any = DATA, **options: Any
) -> Average:
    average = Average()
    monkeypatch.setattr(SingleDevice, "stateful", lambda self: {"precision": self.precision, "ema": AsItem(average)})
    options = {"save_strategy": "steps", "save_steps": 2, **STEPS, **options}
    trainer = make_trainer(folder, Classifier(), data, callbacks=[average], **options)
    trainer.train(resume_from_checkpoint=resume)
    return average


@pytest.mark.parametrize("in_background", [True, False])
def test_a_further_item_is_saved_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    options = {"save_in_background": in_background}
    whole = train(tmp_path, monkeypatch, **options)
    checkpoint = tmp_path / "checkpoint-2"
    assert not folders.verify(checkpoint)
    saved = load_tensors(checkpoint / "ema.pt")
    assert saved["num_steps"] == 2  # as it was at the save, however late it was written
    assert not torch.equal(saved["values"], whole.values)
    resumed = train(tmp_path, monkeypatch, resume=str(checkpoint), **options)
    assert resumed.num_steps == 4
    assert torch.equal(resumed.values, whole.values)


def test_a_checkpoint_without_it_is_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, monkeypatch, save_only_model=True)
    assert not (tmp_path / "checkpoint-2" / "ema.pt").exists()
    resumed = train(tmp_path, monkeypatch, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.num_steps == 2
    assert "checkpoint-2 holds no ema.pt: that state is initialized anew" in caplog.text


def test_a_further_item_is_rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [{**sample, "x": sample["x"] * math.nan} if number == 9 else sample for number, sample in enumerate(DATA)]
    options = {"nonfinite_policy": "rollback", "save_strategy": "no", "logging_steps": 1, "max_steps": 3}
    average = train(tmp_path, monkeypatch, data=bad, **options)
    assert average.num_steps == 3
    assert average.values.isfinite().all()
