"""Averages of the weights: a classifier of handwritten digits without one, with EMA and with SWA.

    python examples/averages.py [--seeds 5]

Needs scikit-learn, whose digits it trains on. Prints the error on the held-out half, as the mean over the seeds.
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

WAYS: dict[str, dict[str, Any]] = {
    "no average": {},
    "ema_decay=0.99": {"ema_decay": 0.99},
    "swa_start=0.5": {"swa_start": 0.5, "average_steps": 10},
}


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def error_of(options: dict[str, Any], seed: int, folder: str) -> float:
    """Trains at a constant learning rate; returns the error in percent on the held-out half."""
    images, digits = load_digits(return_X_y=True)
    rows = [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(digit)}
        for pixels, digit in zip(images, digits, strict=True)
    ]
    torch.manual_seed(seed)
    args = paceline.TrainingArguments(
        folder,
        max_steps=400,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
        **options,
    )
    trainer = paceline.Trainer(
        Classifier(),
        args,
        train_dataset=rows[::2],
        eval_dataset=rows[1::2],
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        for name, options in WAYS.items():
            errors = [error_of(options, seed, folder) for seed in range(seeds)]
            print(f"{name:16} error {statistics.mean(errors):.2f} % ({min(errors):.2f} .. {max(errors):.2f})")


if __name__ == "__main__":
    main()
