"""Data maps: finds labels of handwritten digits that were changed on purpose, from one training on them.

    python examples/data_maps.py [--share 0.05] [--epochs 5]

Needs scikit-learn, whose digits it trains on. Prints the share of changed labels among the samples that the map puts
first: as many samples as labels were changed, and half of them.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    """Changes labels, trains, and prints what the map finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    images, digits = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    wrong = generator.choice(len(digits), round(options.share * len(digits)), replace=False)
    labels = digits.copy()
    labels[wrong] = (labels[wrong] + generator.integers(1, 10, len(wrong))) % 10
    rows: list[dict[str, Any]] = [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(label)}
        for pixels, label in zip(images, labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = paceline.TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            data_map=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = paceline.Trainer(Classifier(), args, train_dataset=rows)
        trainer.remove_callback(paceline.PrinterCallback)
        trainer.train()
    changed = set(wrong.tolist())
    for number in (len(wrong), len(wrong) // 2):
        first = trainer.data_map.result.label_errors(number)
        found = len(changed.intersection(first))
        print(f"{found} of the first {number} samples have a changed label: {100 * found / number:.0f} %")
    print(f"by chance: {100 * options.share:.0f} %")


if __name__ == "__main__":
    main()
