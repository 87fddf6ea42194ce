"""Distillation: a small classifier of handwritten digits learns from few labels, with and without a teacher.

    python examples/distillation.py [--seeds 3]

Needs scikit-learn, whose digits it trains on. The teacher is trained on the labels of half of the digits; the student
has an eighth of its width and a ninth of its labels. Prints the error on the held-out half, as the mean over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

FEW = 100  # labelled digits of the student


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows_of_digits() -> list[dict[str, Any]]:
    """Returns the samples."""
    images, digits = load_digits(return_X_y=True)
    return [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(digit)}
        for pixels, digit in zip(images, digits, strict=True)
    ]


def train(model: nn.Module, rows: list[dict[str, Any]], seed: int, folder: str, **options: Any) -> paceline.Trainer:
    """Trains a model; returns its Trainer."""
    teacher = options.pop("teacher", None)
    args = paceline.TrainingArguments(
        folder,
        max_steps=600,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
        **options,
    )
    trainer = paceline.Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows_of_digits()[1::2],
        teacher=teacher,
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    half = rows_of_digits()[::2]
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            teacher = train(Classifier(seed, 128), half, seed, folder)
            errors.setdefault("teacher", []).append(teacher.evaluate()["eval_error"])
            soft = {"teacher": teacher.model, "distillation_alpha": 0.9, "distillation_temperature": 4.0}
            ways: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
                "few labels": (half[:FEW], {}),
                "few labels, teacher": (half[:FEW], soft),
                "no labels, teacher": (half, {**soft, "distillation_alpha": 1.0}),
            }
            for name, (rows, options) in ways.items():
                trainer = train(Classifier(seed, 16), rows, seed, folder, **options)
                errors.setdefault(name, []).append(trainer.evaluate()["eval_error"])
    for name, found in errors.items():
        print(f"{name:20} error {statistics.mean(found):.2f} % ({min(found):.2f} .. {max(found):.2f})")


if __name__ == "__main__":
    main()
