"""Averages of the weights: a classifier of handwritten digits without one, with EMA, with SWA, and soups.

    python examples/averages.py [--seeds 5]

Needs scikit-learn, whose digits it trains on. Prints errors on held-out samples, as means over the seeds. The members
of a soup are trained on from one short run, with other learning rates; a greedy soup chooses by samples that the error
is not measured on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

import paceline
from paceline.pytorch.checkpoint.soup import average_checkpoints, greedy_soup

WAYS: dict[str, dict[str, Any]] = {
    "no average": {},
    "ema_decay=0.99": {"ema_decay": 0.99},
    "swa_start=0.5": {"swa_start": 0.5, "average_steps": 10},
}
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)  # of the members of a soup


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits() -> list[dict[str, Any]]:
    """Returns the samples."""
    images, labels = load_digits(return_X_y=True)
    return [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(digit)}
        for pixels, digit in zip(images, labels, strict=True)
    ]


def make_trainer(model: nn.Module, seed: int, folder: str, **options: Any) -> paceline.Trainer:
    """Returns the Trainer of one run."""
    rows = digits()
    common = {"per_device_train_batch_size": 16, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    trainer = paceline.Trainer(
        model,
        paceline.TrainingArguments(folder, seed=seed, **{"max_steps": 400, **common, **quiet, **options}),
        train_dataset=rows[::2],
        eval_dataset=rows[1::2],
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    return trainer


def error_of(options: dict[str, Any], seed: int, folder: str) -> float:
    """Trains at a constant learning rate; returns the error in percent on the held-out half."""
    torch.manual_seed(seed)
    trainer = make_trainer(Classifier(), seed, folder, **options)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def soups(seed: int, folder: str) -> dict[str, float]:
    """Returns the errors in percent of the members (their mean, and the one chosen as the best) and of their soups."""
    torch.manual_seed(seed)
    first = Classifier()
    make_trainer(first, seed, f"{folder}/start", max_steps=60).train()
    members = []
    for number, rate in enumerate(RATES):
        member = Classifier()
        member.load_state_dict(first.state_dict())
        trainer = make_trainer(member, seed + number, f"{folder}/{rate}", max_steps=200, learning_rate=rate)
        trainer.train()
        trainer.save_model()
        members.append(f"{folder}/{rate}")
    held_out = digits()[1::2]

    def error(place: str, part: int) -> float:
        model = Classifier()
        model.load_state_dict(load_file(f"{place}/model.safetensors"))
        return make_trainer(model, seed, place).evaluate(held_out[part::2])["eval_error"]

    average_checkpoints(members, f"{folder}/uniform")
    soup = greedy_soup(members, lambda place: error(place, 0), f"{folder}/greedy", greater_is_better=False)
    best = min(soup.metrics, key=lambda place: soup.metrics[place])
    return {
        "members of a soup": statistics.mean(error(place, 1) for place in members),
        "best member": error(best, 1),
        "uniform soup": error(f"{folder}/uniform", 1),
        "greedy soup": error(f"{folder}/greedy", 1),
    }


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in WAYS.items():
            errors[name] = [error_of(options, seed, folder) for seed in range(seeds)]
        for seed in range(seeds):
            for name, error in soups(seed, f"{folder}/soup-{seed}").items():
                errors.setdefault(name, []).append(error)
    for name, found in errors.items():
        print(f"{name:18} error {statistics.mean(found):.2f} % ({min(found):.2f} .. {max(found):.2f})")


if __name__ == "__main__":
    main()
