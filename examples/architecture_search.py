"""Searches the depth and width of a small classifier together with its learning rate.

    python examples/architecture_search.py --n_trials 12

Each trial has a folder `run-{number}` below `--output_dir`, and the study is `study.db` there: the same command
continues a search that was interrupted. Needs optuna: pip install "paceline[optuna]".
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paceline


class Network(nn.Module):
    """A multilayer perceptron of some depth and width."""

    def __init__(self, depth: int, width: int, features: int = 8, classes: int = 3) -> None:
        super().__init__()
        sizes = [features, *[width] * depth]
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in itertools.pairwise(sizes)])
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """The class of a sample is the number of its points inside a circle: not linear in its features."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    inside = (x.view(count, 4, 2).square().sum(-1) < 1.4).sum(-1)
    return [{"x": x[i], "labels": inside[i].clamp(1, 3) - 1} for i in range(count)]


def model_init(trial: Any) -> Network:
    """The network of a trial; without one, of the Trainer that is not searching."""
    if trial is None:
        return Network(depth=1, width=16)
    return Network(trial.suggest_int("depth", 1, 3), trial.suggest_categorical("width", [8, 16, 32, 64]))


def hp_space(trial: Any) -> dict[str, Any]:
    """The options of a trial."""
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)}


def compute_metrics(prediction: paceline.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/architecture-search")
    parser.add_argument("--n_trials", type=int, default=12)
    parser.add_argument("--max_steps", type=int, default=200)
    options = parser.parse_args()
    args = paceline.TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=32,
        eval_strategy="steps",
        eval_steps=options.max_steps // 4,
        save_steps=options.max_steps // 4,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = paceline.Trainer(
        model_init=model_init,
        args=args,
        train_dataset=make_samples(2000, seed=0),
        eval_dataset=make_samples(500, seed=1),
        compute_metrics=compute_metrics,
    )
    best = trainer.hyperparameter_search(hp_space, n_trials=options.n_trials, direction="maximize", backend="optuna")
    print(f"best: run-{best.run_id}, accuracy {best.objective:.3f}, {best.hyperparameters}")


if __name__ == "__main__":
    main()
