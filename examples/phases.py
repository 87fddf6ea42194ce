"""Training phases: digits first, then "odd or even" from a few samples, at once and by gradual unfreezing.

    python examples/phases.py [--seeds 10]

Needs scikit-learn, whose digits it trains on. Prints the error on held-out samples, as the mean over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

NUM_FEW = 20  # samples of the second task


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            pixels = layer(pixels)
        logits = self.head(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def error_of(phases: list[paceline.Phase], test: list[dict], seed: int, folder: str) -> float:
    """Trains in phases; returns the error in percent on the held-out samples."""
    args = paceline.TrainingArguments(
        folder,
        phases=phases,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    trainer = paceline.Trainer(
        Classifier(seed),
        args,
        train_dataset=phases[-1].train_dataset,
        eval_dataset=test,
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    images, digits = load_digits(return_X_y=True)
    rows = [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(digit)}
        for pixels, digit in zip(images, digits, strict=True)
    ]
    known, rest = rows[:800], [{**row, "labels": row["labels"] % 2} for row in rows[800:]]
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            few, test = rest[seed * NUM_FEW : (seed + 1) * NUM_FEW], rest[400:]
            digits_first = paceline.Phase("digits", until="500 steps", train_dataset=known)
            all_at_once = paceline.Phase("odd or even", until="120 steps", train_dataset=few)
            few_steps = {"until": "40 steps", "train_dataset": few}
            ways = {
                "odd or even alone": [all_at_once],
                "digits, then all layers": [digits_first, all_at_once],
                "digits, then rates by depth": [
                    digits_first,
                    paceline.Phase("odd or even", until="120 steps", layer_decay=0.3, train_dataset=few),
                ],
                "digits, then gradual unfreezing": [
                    digits_first,
                    paceline.Phase(
                        "head", until="40 steps", freeze=["layers.*"], learning_rate=1e-2, train_dataset=few
                    ),
                    paceline.Phase(
                        "top", until="40 steps", freeze=["layers.[01].*"], layer_decay=0.3, train_dataset=few
                    ),
                    paceline.Phase("all", **few_steps, layer_decay=0.3),
                ],
            }
            for name, phases in ways.items():
                errors.setdefault(name, []).append(error_of(phases, test, seed, folder))
    for name, found in errors.items():
        print(f"{name:32}  error {statistics.mean(found):5.1f} %")


if __name__ == "__main__":
    main()
