"""The error of a batch without labels names the columns that were dropped, and the one that looks like labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

from paceline import Trainer, TrainingArguments
from paceline.pytorch.model.outputs import IncompleteBatch


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Strict(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x, labels)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(x)}


def rows(**columns: Any) -> list[dict[str, Any]]:
    return [{"x": torch.ones(2), **columns} for _ in range(4)]


def message_of(folder: Path, model: nn.Module, data: Any, **options: Any) -> str:
    args = TrainingArguments(str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, **options)
    with pytest.raises(IncompleteBatch) as caught:
        Trainer(model, args, train_dataset=data).train()
    return str(caught.value)


def test_a_dropped_column_that_looks_like_labels(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"x": [[0.1, 0.2]] * 4, "text": ["a"] * 4, "target": [0, 1, 0, 1]})
    message = message_of(tmp_path, Classifier(), data, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    assert "did not return a loss from the inputs" in message
    assert "remove_unused_columns=True dropped text, target, because forward(x, labels) does not take them" in message
    assert "'target' looks like the labels: rename it, dataset.rename_column('target', 'labels')" in message
    assert "label_names=['target'] keeps" in message


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}])
def test_samples_that_are_dicts_and_labels_that_forward_requires(tmp_path: Path, options: dict[str, Any]) -> None:
    message = message_of(tmp_path, Strict(), rows(sentiment=1), **options)
    assert "dropped sentiment" in message
    assert "'sentiment' looks like the labels: rename it" in message


def test_a_column_that_reaches_the_batch_and_not_forward(tmp_path: Path) -> None:
    message = message_of(tmp_path, Classifier(), rows(class_id=1), remove_unused_columns=False)
    assert "dropped" not in message
    assert "'class_id' looks like the labels: rename it, dataset.rename_column('class_id', 'labels')" in message


def test_a_forward_without_a_parameter_for_labels(tmp_path: Path) -> None:
    message = message_of(tmp_path, Headless(), rows(label=1))
    assert "looks like the labels, and forward has no parameter for labels: label_names=['labels'] keeps" in message


def test_data_without_labels(tmp_path: Path) -> None:
    assert "No column looks like labels: the training set has x, width." in message_of(
        tmp_path, Classifier(), rows(width=1)
    )


def test_the_remedies_work(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"x": [[0.1, 0.2]] * 4, "target": [0, 1, 0, 1]})
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    assert Trainer(Classifier(), args, train_dataset=data.rename_column("target", "labels")).train().training_loss > 0
    args.label_names = ["target"]
    trainer = Trainer(
        Headless(),
        args,
        train_dataset=data,
        compute_loss_func=lambda outputs, labels: nn.functional.cross_entropy(outputs["logits"], labels),
    )
    assert trainer.train().training_loss > 0
