"""The default search spaces of the backends: those of transformers."""

from __future__ import annotations

from typing import Any

from paceline.core.optional import require

BATCH_SIZES = (4, 8, 16, 32, 64)


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Returns learning rate (log-uniform from 1e-6 to 1e-4), epochs, seed and batch size, from an optuna trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", list(BATCH_SIZES)),
    }


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    """Returns the distributions of the same hyperparameters for Ray Tune.

    Raises:
        ImportError: Ray is not installed.
    """
    tune = require("ray.tune", "ray")
    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.uniform(1, 40),
        "per_device_train_batch_size": tune.choice(list(BATCH_SIZES)),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:
    """Returns the configuration of a random sweep over the same hyperparameters.

    Raises:
        ImportError: wandb is not installed.
    """
    require("wandb", "wandb")
    return {
        "method": "random",
        "metric": {"name": "objective", "goal": "minimize"},
        "parameters": {
            "learning_rate": {"distribution": "uniform", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": list(BATCH_SIZES)},
        },
    }
