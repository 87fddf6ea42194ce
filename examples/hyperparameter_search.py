"""Searches learning rate, batch size and weight decay of a small classifier, and trains with the best of them.

    python examples/hyperparameter_search.py --n_trials 12

A trial that is worse than the median of the others at an evaluation is ended there. Each trial has a folder
`run-{number}` below `--output_dir`, and the study is `study.db` there: the same command continues a search that was
interrupted. Needs optuna: pip install "paceline[optuna]".
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import optuna
import torch
from torch import Tensor, nn

import paceline


class Network(nn.Module):
    """A multilayer perceptron."""

    def __init__(self, width: int = 32, features: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.hidden(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """The class of a sample is the number of its points inside a circle: not linear in its features."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    inside = (x.view(count, 4, 2).square().sum(-1) < 1.4).sum(-1)
    return [{"x": x[i], "labels": inside[i].clamp(1, 3) - 1} for i in range(count)]


def hp_space(trial: Any) -> dict[str, Any]:
    """The options of a trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [16, 32, 64]),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def compute_metrics(prediction: paceline.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/hyperparameter-search")
    parser.add_argument("--n_trials", type=int, default=12)
    parser.add_argument("--max_steps", type=int, default=200)
    options = parser.parse_args()
    args = paceline.TrainingArguments(
        options.output_dir,
        max_steps=options.max_steps,
        eval_strategy="steps",
        eval_steps=options.max_steps // 4,
        save_steps=options.max_steps // 4,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = paceline.Trainer(
        model_init=Network,
        args=args,
        train_dataset=make_samples(2000, seed=0),
        eval_dataset=make_samples(500, seed=1),
        compute_metrics=compute_metrics,
    )
    best = trainer.hyperparameter_search(
        hp_space,
        n_trials=options.n_trials,
        direction="maximize",
        backend="optuna",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    print(f"best: run-{best.run_id}, accuracy {best.objective:.3f}, {best.hyperparameters}")
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    print(f"again: accuracy {trainer.evaluate()['eval_accuracy']:.3f}")  # that of the trial


if __name__ == "__main__":
    main()
