"""The same run twice gives the same bits; and nobody else's random numbers are touched."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import nn

from paceline import enable_full_determinism, set_seed
from paceline.pytorch.distributed.random import capture_rng

DATA = classification(24)
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "ASCEND_LAUNCH_BLOCKING",
    "HCCL_DETERMINISTIC",
    "FLASH_ATTENTION_DETERMINISTIC",
)


@pytest.fixture
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in VARIABLES:
        monkeypatch.setenv(name, "unset")
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def same_rng(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, torch.Tensor) else str(a) == str(b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def run(folder: Path, seed: int = 42, **options: Any) -> Any:
    model = Classifier(dropout=0.3)
    trainer = make_trainer(folder, model, DATA, num_train_epochs=2, seed=seed, **options)
    trainer.train()
    return trainer


def test_set_seed_seeds_everything() -> None:
    set_seed(3)
    first = drawn()
    set_seed(3)
    assert drawn() == first
    set_seed(4)
    assert drawn() != first


@pytest.mark.parametrize(
    "options",
    [{}, {"dataloader_num_workers": 2}, {"train_sampling_strategy": "sequential"}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_the_same_run_twice(tmp_path: Path, options: dict[str, Any]) -> None:
    first = run(tmp_path, **options)
    torch.rand(17)  # what happened before does not matter
    random.random()
    second = run(tmp_path, **options)
    assert torch.equal(weights(first.model), weights(second.model))
    assert losses(first) == losses(second)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    assert losses(run(tmp_path, 1)) != losses(run(tmp_path, 2))


def test_data_seed_changes_the_order_only(tmp_path: Path) -> None:
    orders, masks = [], []
    for options in ({}, {"data_seed": 7}):
        seen: list[float] = []

        class Watched(Classifier):
            def forward(self, x: Any, labels: Any = None) -> Any:
                seen.extend(x[:, 0].tolist())  # noqa: B023
                return super().forward(x, labels)

        trainer = make_trainer(tmp_path, Watched(dropout=0.5), DATA, **options)
        trainer.train()
        orders.append(seen)
        masks.append(float(torch.rand(())))  # as many masks drawn, from the same seed
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert masks[0] == masks[1]


@pytest.mark.usefixtures("_clean_environment")
def test_full_determinism(tmp_path: Path) -> None:
    first = run(tmp_path, full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert all(os.environ[name] != "unset" for name in VARIABLES)
    second = run(tmp_path, full_determinism=True)
    assert torch.equal(weights(first.model), weights(second.model))


@pytest.mark.usefixtures("_clean_environment")
def test_an_operation_without_a_deterministic_form_is_an_error(tmp_path: Path) -> None:
    enable_full_determinism(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    enable_full_determinism(1, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_run_without_it_writes_no_variable(tmp_path: Path) -> None:
    before = dict(os.environ)
    run(tmp_path)
    changed = {name for name in os.environ if os.environ.get(name) != before.get(name)} - {"PYTEST_CURRENT_TEST"}
    assert changed == set()


@pytest.mark.parametrize("how", ["model", "model_init"])
def test_construction_leaves_the_generators_alone(tmp_path: Path, how: str) -> None:
    def model_init() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4))

    model = model_init() if how == "model" else None
    torch.manual_seed(99)
    before = capture_rng()
    make_trainer(tmp_path, model, DATA, model_init=None if how == "model" else model_init, seed=5)
    assert same_rng(before, capture_rng())


def test_model_init_makes_the_same_fresh_model_at_each_train(tmp_path: Path) -> None:
    made: list[torch.Tensor] = []

    def model_init() -> nn.Module:
        class Unseeded(Classifier):
            def __init__(self) -> None:
                super().__init__(seed=int(torch.randint(0, 10**6, ())))

        model = Unseeded()
        made.append(weights(model).clone())
        return model

    trainer = make_trainer(tmp_path, None, DATA, model_init=model_init, num_train_epochs=1)
    first = trainer.model
    trainer.train()
    after_one = weights(trainer.model).clone()
    assert trainer.model is not first
    torch.rand(3)
    trainer.train()
    assert torch.equal(made[1], made[2])
    assert torch.equal(made[0], made[1])
    assert torch.equal(weights(trainer.model), after_one)
    assert len(losses(trainer)) == 6
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.model.parameters()}


def test_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    plain = run(tmp_path)
    evaluated = run(tmp_path, eval_strategy="steps", eval_steps=2, eval_dataset=DATA)
    assert torch.equal(weights(plain.model), weights(evaluated.model))
