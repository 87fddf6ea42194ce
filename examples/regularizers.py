"""Regularizers: a classifier of handwritten digits from few labels, with and without mixup, CutMix, SAM and ASAM.

    python examples/regularizers.py [--seeds 4] [--labels 50]
    python examples/regularizers.py --privacy [--seeds 4]

Needs scikit-learn, whose digits it trains on. Prints the error on the held-out half, as the mean over the seeds. The
second form trains on the other half with differential privacy, and needs Opacus (the extra `privacy`).
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


def train(regularizers: list[Any], seed: int, labels: int, folder: str, batch_size: int = 20) -> paceline.Trainer:
    """Trains on the first `labels` digits, with the second half of all as evaluation data."""
    data = rows()
    args = paceline.TrainingArguments(
        folder,
        max_steps=600,
        per_device_train_batch_size=batch_size,
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
    return trainer


def compare(ways: dict[str, list[Any]], num_seeds: int, labels: int, batch_size: int) -> None:
    """Prints the error of each way in percent, and the epsilon that it has spent."""
    with tempfile.TemporaryDirectory() as folder:
        for name, regularizers in ways.items():
            runs = [train(regularizers, seed, labels, folder, batch_size) for seed in range(num_seeds)]
            errors = [trainer.evaluate()["eval_error"] for trainer in runs]
            passes = runs[-1].regularizers
            spent = {} if passes is None else passes.row({})
            shown = "".join(f", {key} {value:.2f}" for key, value in spent.items())
            mean = statistics.mean(errors)
            print(f"{name:15} error {mean:5.2f} % ({min(errors):.2f} .. {max(errors):.2f}){shown}", flush=True)


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--labels", type=int, default=50)
    parser.add_argument("--privacy", action="store_true")
    options = parser.parse_args()
    if options.privacy:
        private = {f"epsilon {e}": [paceline.DPSGD(1.0, target_epsilon=e, delta=1e-4)] for e in (8, 2)}
        compare({"not private": [], **private}, options.seeds, 898, 64)
        return
    ways: dict[str, list[Any]] = {
        "none": [],
        "mixup": [paceline.Mixup(1.0)],
        "cutmix": [paceline.CutMix(1.0)],
        "mixup or cutmix": [paceline.Mixup(1.0), paceline.CutMix(1.0)],
        "sam": [paceline.SAM(0.2)],
        "asam": [paceline.SAM(2.0, adaptive=True)],
    }
    compare(ways, options.seeds, options.labels, 20)


if __name__ == "__main__":
    main()
