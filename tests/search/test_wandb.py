"""Sweeps of wandb. The service chooses the hyperparameters, so a stand-in takes its place: `wandb.sweep` and
`wandb.agent`; the runs are wandb's own, offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from search_jobs import make_search, searched

from paceline.callbacks.reporters.wandb import WandbCallback
from paceline.core.optional import is_installed
from paceline.search.trials import SearchError
from paceline.search.wandb_sweep import sweep_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A sweep of two learning rates, whose agent survives errors as wandb's does."""
    import wandb

    told: dict[str, Any] = {"rates": [1e-9, 1e-2], "ids": []}

    def sweep(config: dict[str, Any], project: str | None = None, entity: str | None = None) -> str:
        told.update(config=config, project=project)
        return "sweep-1"

    def agent(sweep_id: str, function: Callable[[], Any], count: int, **place: Any) -> None:
        for rate in told["rates"][:count]:
            run = wandb.init(mode="offline", dir=tmp_path, config={"learning_rate": rate})
            told["ids"].append(run.id)
            try:
                function()
            except Exception as error:
                told["error"] = error
            assert wandb.run is None or wandb.run.id == run.id  # no trial ends or replaces the agent's run
            run.finish()

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb, "sweep", sweep)
    monkeypatch.setattr(wandb, "agent", agent)
    return told


SPACE = {"method": "random", "parameters": {"learning_rate": {"values": [1e-9, 1e-2]}}}
ACCURACY = {"name": "eval/accuracy", "goal": "maximize", "target": 0.9}
OBJECTIVE = {"name": "objective", "goal": "minimize"}


def test_sweep(service: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_search(tmp_path / "out", run_name="mine")
    callbacks = list(trainer.callback_handler.callbacks)
    best = searched(trainer, hp_space=lambda trial: SPACE, n_trials=2, backend="wandb", project="p", name="n")
    assert best.run_id == service["ids"][1]
    assert best.hyperparameters == {"learning_rate": 1e-2}
    assert best.run_summary == "sweep-1"
    assert service["config"]["metric"] == {"name": "eval/loss", "goal": "minimize"}
    assert (service["config"]["name"], service["project"]) == ("n", "p")
    assert {path.name for path in (tmp_path / "out").glob("run-*")} == {f"run-{one}" for one in service["ids"]}
    assert trainer.callback_handler.callbacks == callbacks
    assert not any(isinstance(callback, WandbCallback) for callback in callbacks)


def test_errors(service: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_search(tmp_path / "out")
    service["rates"] = [-1.0, 1e-2]
    searched(trainer, hp_space=lambda trial: SPACE, n_trials=2, backend="wandb")
    assert "learning_rate" in str(service["error"])
    with pytest.raises(RuntimeError, match="No trial of the sweep sweep-1 was completed; the last error"):
        searched(trainer, hp_space=lambda trial: SPACE, n_trials=1, backend="wandb")
    with pytest.raises(SearchError, match="asked for 'eval_f1'"):
        searched(
            trainer,
            hp_space=lambda trial: SPACE,
            n_trials=2,
            backend="wandb",
            compute_objective=lambda metrics: metrics["eval_f1"],
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hp_space": lambda trial: {"learning_rate": 1}}, "a sweep of wandb is a dict with 'method'"),
        ({"projct": "p"}, "has no option 'projct'"),
        ({"direction": ["minimize", "minimize"]}, "a sweep has one objective"),
        ({"hp_space": lambda trial: SPACE, "direction": "maximize"}, "would maximize .eval/loss.. Give its name"),
        ({"hp_space": lambda trial: {**SPACE, "metric": ACCURACY}}, "goal of its metric is .maximize., and direction="),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        make_search(tmp_path).hyperparameter_search(backend="wandb", n_trials=1, **options)


@pytest.mark.parametrize(
    ("metric", "direction", "options", "wanted"),
    [
        ({}, "minimize", {}, {"name": "eval/loss", "goal": "minimize"}),
        (ACCURACY, "maximize", {}, ACCURACY),
        (OBJECTIVE, "maximize", {}, {"name": "objective", "goal": "maximize"}),
        (OBJECTIVE, "maximize", {"metric": "eval/f1"}, {"name": "eval/f1", "goal": "maximize"}),
    ],
)
def test_metric_of_a_sweep(
    metric: dict[str, Any], direction: str, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert sweep_config({**SPACE, "metric": metric}, direction, options)["metric"] == wanted
