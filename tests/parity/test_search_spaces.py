"""The default search spaces of hyperparameters: what they sample, beside those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

import paceline
from paceline.core.optional import is_installed

pytest.importorskip("transformers")
OPTIONS = ["learning_rate", "num_train_epochs", "per_device_train_batch_size", "seed"]


@pytest.mark.skipif(not is_installed("optuna"), reason="needs optuna")
def test_optuna() -> None:
    optuna = pytest.importorskip("optuna")
    theirs = pytest.importorskip("transformers.trainer_utils").default_hp_space_optuna
    found = []
    for space in (paceline.default_hp_space_optuna, theirs):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
        trial = study.ask()
        found.append((space(trial), trial.distributions))
    assert found[0] == found[1]
    assert sorted(found[0][0]) == OPTIONS


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("ray"), reason="needs ray")
def test_ray() -> None:
    theirs = pytest.importorskip("transformers.trainer_utils").default_hp_space_ray(None)
    ours = paceline.default_hp_space_ray(None)
    assert sorted(ours) == sorted(theirs) == OPTIONS
    for name in OPTIONS:
        assert type(ours[name]) is type(theirs[name])
        assert described(ours[name]) == described(theirs[name]), name


def described(domain: Any) -> dict[str, Any]:
    """Returns bounds, choices and scale of a distribution of Ray Tune."""
    found = {key: value for key, value in vars(domain).items() if key != "sampler"}
    return {**found, "sampler": (type(domain.sampler).__name__, vars(domain.sampler))}


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")
def test_wandb() -> None:
    module = pytest.importorskip("transformers.trainer_utils")
    assert paceline.default_hp_space_wandb(None) == module.default_hp_space_wandb(None)


@pytest.mark.skipif(not is_installed("optuna"), reason="needs optuna")
def test_a_search_without_a_space_samples_it(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, None, classification(16), model_init=Classifier, eval_dataset=classification(8), eval_strategy="epoch"
    )
    best = trainer.hyperparameter_search(n_trials=1, backend="optuna", direction="minimize")
    assert sorted(best.hyperparameters) == OPTIONS
    assert 1e-6 <= best.hyperparameters["learning_rate"] <= 1e-4
    assert best.hyperparameters["per_device_train_batch_size"] in (4, 8, 16, 32, 64)
