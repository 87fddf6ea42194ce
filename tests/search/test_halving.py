"""Successive halving: survivors resume their checkpoints, and end as if they had never been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from search_jobs import SAVES, Listed, make_search, searched

from paceline import TrainerCallback
from paceline.search.halving import HalvingSummary, make_ladder
from paceline.search.trials import SearchError

optuna = pytest.importorskip("optuna")


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "saves", [SAVES, pytest.param({"save_strategy": "no"}, marks=pytest.mark.slow)], ids=["saving", "not saving"]
)
def test_survivors_equal_undisturbed_runs(tmp_path: Path, saves: dict[str, Any]) -> None:
    """Two rungs: all three trials to step 2, the best one to the end at step 6."""
    starts: list[tuple[str, int]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            starts.append((state.trial_name, state.global_step))

    trainer = make_search(tmp_path / "search", callbacks=[Watch], **saves)
    best = searched(trainer, hp_space=rates, n_trials=3, sampler=Listed(), halving={"min_steps": 2})
    assert starts == [("run-0", 0), ("run-1", 0), ("run-2", 0), (f"run-{best.run_id}", 2)]
    assert best.run_summary == HalvingSummary(num_updates=10, num_saved=2, num_full=18, survivors=(3, 1))
    straight = make_search(tmp_path / "straight", **SAVES, **best.hyperparameters)
    straight.train()
    assert straight.evaluate()["eval_loss"] == best.objective
    if saves is SAVES:
        one, other = (
            load_file(folder / "checkpoint-6" / "model.safetensors")
            for folder in (tmp_path / "search" / f"run-{best.run_id}", tmp_path / "straight")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
    study = optuna.load_study(study_name="paceline", storage=f"sqlite:///{tmp_path / 'search' / 'study.db'}")
    assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "PRUNED", "PRUNED"]


@pytest.mark.slow
def test_a_search_that_died_goes_on_at_its_rung(tmp_path: Path) -> None:
    class Die(TrainerCallback):
        def __init__(self, at: tuple[int, int]) -> None:
            self.at, self.count = at, 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_name == f"run-{self.at[0]}" and state.global_step == self.at[1]:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"hp_space": rates, "n_trials": 3, "sampler": Listed(), "halving": {"min_steps": 2}}
    straight = searched(make_search(tmp_path / "straight", **SAVES), **options)
    for at in ((1, 1), (int(straight.run_id), 5)):
        with pytest.raises(KeyboardInterrupt, match="continues the search"):
            searched(make_search(tmp_path / "died", callbacks=[Die(at)], **SAVES), **options)
    assert searched(make_search(tmp_path / "died", **SAVES), **options) == straight


@pytest.mark.slow
def test_a_failed_trial_leaves_the_others(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {**rates(trial), "per_device_train_batch_size": 0 if trial.number == 0 else 4}

    best = searched(make_search(tmp_path), hp_space=space, n_trials=2, sampler=Listed(), halving={"min_steps": 2})
    assert best.run_id == "1"
    assert best.run_summary.survivors == (1, 1)


def test_without_evaluations_of_the_run_the_objective_is_that_of_its_last_step(tmp_path: Path) -> None:
    """The checkpoint that a survivor resumes has the evaluation of its rung in its log."""
    options: dict[str, Any] = {"hp_space": rates, "n_trials": 2, "sampler": Listed(), "halving": {"min_steps": 2}}
    best = searched(make_search(tmp_path / "search", eval_strategy="no"), **options)
    straight = make_search(tmp_path / "straight", eval_strategy="no", **best.hyperparameters)
    straight.train()
    assert straight.evaluate()["eval_loss"] == best.objective


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("name", ["GridSampler", "BruteForceSampler"])
def test_a_sampler_that_has_tried_its_whole_space(tmp_path: Path, name: str) -> None:
    """It asks optuna for the end of an optimization, which is not optuna's here."""
    grid = {"learning_rate": [1e-3, 1e-2]}
    options = {"search_space": grid} if name == "GridSampler" else {}
    best = searched(
        make_search(tmp_path),
        hp_space=lambda trial: {key: trial.suggest_categorical(key, values) for key, values in grid.items()},
        n_trials=2,
        sampler=getattr(optuna.samplers, name)(**options),
        halving={"min_steps": 2},
    )
    assert best.run_summary.survivors == (2, 1)
    study = optuna.load_study(study_name="paceline", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "PRUNED"]
    assert {trial.params["learning_rate"] for trial in study.trials} == set(grid["learning_rate"])


def test_rungs() -> None:
    ladder = make_ladder({"min_steps": 10, "reduction_factor": 2}, 5)
    assert [ladder.until(rung) for rung in range(ladder.num_rungs)] == [10, 20, 40, None]
    assert make_ladder({"min_steps": 10}, 1).until(0) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"halving": {"steps": 3}}, "give a dict with min_steps and reduction_factor"),
        ({"halving": {}}, "min_steps=None"),
        ({"halving": {"min_steps": 2, "reduction_factor": 1}}, "reduction_factor=1"),
        ({"halving": {"min_steps": 2}, "timeout": 3}, "timeout cannot be combined"),
        ({"halving": {"min_steps": 2}, "pruner": optuna.pruners.MedianPruner()}, "MedianPruner: .* asks no pruner"),
        ({"halving": {"min_steps": 2}, "direction": ["minimize", "minimize"]}, "direction names several"),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        make_search(tmp_path).hyperparameter_search(hp_space=rates, n_trials=2, **options)


@pytest.mark.slow
def test_trials_that_end_below_the_first_rung_are_trained_once(tmp_path: Path) -> None:
    steps = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append((state.trial_name, state.global_step))

    best = searched(
        make_search(tmp_path, callbacks=[Watch]), hp_space=lambda trial: {}, n_trials=2, halving={"min_steps": 100}
    )
    assert len(steps) == len(set(steps)) == best.run_summary.num_updates == 12
