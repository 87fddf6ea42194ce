"""A search on several processes: `python ranks_search_job.py FOLDER`; each rank writes what it saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import optuna
import torch
from search_jobs import SAVES, Sized, make_search
from torch import distributed

from paceline import TrainerCallback, replay


def model_init(trial: Any) -> Sized:
    """Asks the trial too, on every rank."""
    return Sized(1, 4) if trial is None else Sized(1, trial.suggest_categorical("width", [4, 8]))


class Ends(TrainerCallback):
    """Notes the step at which each trial ended, and its hyperparameters."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append([state.trial_name, state.global_step, state.trial_params, args.learning_rate])


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    ends = Ends()
    trainer = make_search(folder, model_init=model_init, callbacks=[ends], num_train_epochs=2, **SAVES)

    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 2:
            raise OSError("no such space")
        low, high = (1e-9, 1e-8) if trial.number == 1 else (1e-2, 3e-2)
        return {"learning_rate": trial.suggest_float(f"rate_{trial.number}", low, high)}

    best = trainer.hyperparameter_search(
        hp_space=space,
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=4,
        backend="optuna",
        sampler=optuna.samplers.TPESampler(seed=1),  # the loss before the first step depends on the width
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
    )
    alone = {"model_init": lambda: Sized(1, 4), **SAVES}
    make_search(folder / "alone", **alone).train()
    replayed = replay(make_search(folder / "alone", **alone), 3)
    found = {"best": best, "ends": ends.seen, "replayed": [replayed.is_exact, replayed.sample_ids]}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
