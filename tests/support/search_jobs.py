"""Small searches: `python search_jobs.py FOLDER kill|interrupt` ends in the middle of its second trial."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import Classifier, classification, make_trainer, with_loss
from torch import Tensor, nn

from paceline import BestRun, Trainer, TrainerCallback

DATA, EVAL = classification(24), classification(16, seed=5)
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
RATES = (1e-3, 1e-2, 3e-2)


class Sized(nn.Module):
    """A classifier of some depth and width."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList([nn.Linear(8 if i == 0 else width, width) for i in range(depth)])
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return with_loss(self.head(x), labels)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_search(folder: Path, **options: Any) -> Trainer:
    """A Trainer of six steps per trial, evaluated at every second one."""
    defaults: dict[str, Any] = {
        "model_init": lambda trial: Classifier(dropout=0.1),
        "eval_dataset": EVAL,
        "compute_metrics": accuracy,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
    }
    return make_trainer(folder, None, DATA, **{**defaults, **options})


def searched(trainer: Trainer, **options: Any) -> BestRun:
    """Searches for the lowest evaluation loss."""
    best = trainer.hyperparameter_search(**{"compute_objective": lambda metrics: metrics["eval_loss"], **options})
    assert isinstance(best, BestRun)
    return best


class DieAt(TrainerCallback):
    """Ends the process, or interrupts the run, at step 5 of the second trial."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.trial_name == "run-1" and state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGINT)


def main() -> None:
    import optuna

    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    trainer = make_search(folder, callbacks=[DieAt(how)], **SAVES)

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        searched(trainer, hp_space=space, n_trials=3, sampler=Listed())
    except KeyboardInterrupt:
        sys.exit(7)


try:
    from optuna.samplers import BaseSampler
except ImportError:
    BaseSampler = object  # type: ignore[assignment,misc]


class Listed(BaseSampler):  # type: ignore[misc]
    """Gives trial number i the i-th of `RATES`."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> float:
        return RATES[trial.number]


if __name__ == "__main__":
    main()
