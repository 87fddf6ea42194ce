"""The disk space that a checkpoint is said to need, beside what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import Trainer, TrainingArguments
from paceline.checkpoint import space


class Layers(nn.Module):
    """Linear layers, and the mean squared difference to the labels."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(size, size) for _ in range(number)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).pow(2).mean()}


@pytest.mark.parametrize(("size", "number"), [(4, 1), (128, 2), (8, 200)])
def test_the_space_that_is_asked_for_is_what_a_checkpoint_takes(
    tmp_path: Path, size: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(space.Place, "check", lambda self, num_bytes: asked.append(num_bytes))
    data = [{"x": torch.randn(size), "labels": torch.randn(size)} for _ in range(8)]
    args = TrainingArguments(str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(Layers(size, number), args, train_dataset=data).train()
    taken = sum(file.stat().st_size for file in (tmp_path / "checkpoint-1").rglob("*") if file.is_file())
    needed = asked[-1] + space.SMALL_FILES_BYTES
    assert taken <= needed <= 1.25 * taken + space.SMALL_FILES_BYTES
