"""Searches with Ray Tune on this machine: `python ray_search_job.py FOLDER plain|asha|pbt`; writes result.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from search_jobs import SAVES, make_search, searched


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": tune.grid_search([1e-2, 1e-9]), "seed": 3}


def options_of(way: str) -> dict[str, Any]:
    if way == "asha":
        scheduler = ASHAScheduler(metric="objective", mode="min", time_attr="step", grace_period=2, max_t=6)
        return {"scheduler": scheduler, "max_concurrent_trials": 1}
    if way == "pbt":
        scheduler = PopulationBasedTraining(
            time_attr="step",
            metric="objective",
            mode="min",
            perturbation_interval=4,  # once: at the last step there is nothing left to train
            hyperparam_mutations={"learning_rate": [3e-2, 2e-2]},
            quantile_fraction=0.5,
            resample_probability=1.0,
            synch=True,
        )
        return {"scheduler": scheduler}
    return {}


def main() -> None:
    folder, way = Path(sys.argv[1]), sys.argv[2]
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=200 << 20)
    trainer = make_search(folder, **SAVES)
    before = trainer.args.to_dict()
    best = searched(trainer, hp_space=space, n_trials=1, backend="ray", verbose=0, **options_of(way))
    assert trainer.args.to_dict() == before
    trials = [
        {"id": trial.trial_id, "step": trial.last_result.get("step"), "config": trial.config, **trial.last_result}
        for trial in best.run_summary.trials
    ]
    found = {"id": best.run_id, "objective": best.objective, "params": best.hyperparameters, "trials": trials}
    (folder / "result.json").write_text(json.dumps(found, default=str), encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
