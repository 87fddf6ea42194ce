"""Regularizers: a classifier of handwritten digits from few labels, with and without mixup, CutMix, SAM and ASAM.

    python examples/regularizers.py [--seeds 4] [--labels 50]

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


class Classifier(nn.Module):
    """Pictures (samples, 1, 8, 8) -> loss and logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pictures)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, Any]]:
    """Returns the digits in a fixed shuffled order."""
    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    pictures = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return [{"pictures": pictures[index], "labels": int(digits[index])} for index in order]


def error_of(regularizers: list[Any], seed: int, labels: int, folder: str) -> float:
    """Trains on the first `labels` digits; returns the error in percent on the second half of all."""
    data = rows()
    args = paceline.TrainingArguments(
        folder,
        max_steps=600,
        per_device_train_batch_size=20,
        learning_rate=2e-3,
        regularizers=regularizers,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    trainer = paceline.Trainer(
        Classifier(seed),
        args,
        train_dataset=data[:labels],
        eval_dataset=data[len(data) // 2 :],
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--labels", type=int, default=50)
    options = parser.parse_args()
    ways: dict[str, list[Any]] = {
        "none": [],
        "mixup": [paceline.Mixup(1.0)],
        "cutmix": [paceline.CutMix(1.0)],
        "mixup or cutmix": [paceline.Mixup(1.0), paceline.CutMix(1.0)],
        "sam": [paceline.SAM(0.2)],
        "asam": [paceline.SAM(2.0, adaptive=True)],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, regularizers in ways.items():
            found = [error_of(regularizers, seed, options.labels, folder) for seed in range(options.seeds)]
            print(f"{name:15} error {statistics.mean(found):5.2f} % ({min(found):.2f} .. {max(found):.2f})", flush=True)


if __name__ == "__main__":
    main()
