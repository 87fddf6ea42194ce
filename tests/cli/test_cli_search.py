"""`paceline search`: the space in a file, trials in one process and in two, the result and its plots."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_jobs import MODULE, write_job

from paceline.cli.main import main

optuna = pytest.importorskip("optuna")

CONFIG = """
model: {{factory: "{module}:Net", width: 4}}
data: {module}:data
compute_metrics: {module}:metrics
arguments:
  output_dir: {folder}/run
  max_steps: 4
  label_names: [y]
  eval_strategy: steps
  eval_steps: 2
  save_strategy: "no"
  disable_tqdm: true
  report_to: none
search:
  space:
    learning_rate: {{low: 1e-3, high: 1e-1, log: true}}
    model.width: [2, 8]
    per_device_train_batch_size: {{low: 4, high: 8, step: 4}}
  objective: mae
  n_trials: 3
  sampler: {{name: TPESampler, seed: 0}}
"""


def study_of(folder: Path) -> Any:
    return optuna.load_study(study_name="paceline", storage=f"sqlite:///{folder / 'run' / 'study.db'}")


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, MODULE, CONFIG)
    assert main(["search", str(path)]) == 0
    out = capsys.readouterr().out
    study = study_of(tmp_path)
    assert len(study.trials) == 3
    assert f"Best: trial {study.best_trial.number} with {study.best_value:.6g}" in out
    assert out.count("complete") == 3
    assert {"learning_rate", "model.width", "per_device_train_batch_size"} == set(study.best_params)
    assert "Importance: " in out
    if "For plots" not in out:
        assert (tmp_path / "run" / "plots" / "optimization_history.html").stat().st_size > 1000
    assert main(["search", str(path), "--n_trials", "4"]) == 0
    assert len(study_of(tmp_path).trials) == 4


@pytest.mark.slow
def test_parallel(tmp_path: Path) -> None:
    path = write_job(tmp_path, MODULE, CONFIG)
    command = [sys.executable, "-m", "paceline", "search", str(path), "--n_parallel", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
    assert done.stdout.count("Best: trial") == 1
    with sqlite3.connect(tmp_path / "run" / "study.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_trials: 3", "n_trails: 3", "search: unknown key 'n_trails'; did you mean 'n_trials'?"),
        ("n_trials: 3", "n_trials: 0", "search.n_trials: 0 is not"),
        ("[2, 8]", "3", "search.space.model.width: give a list of values"),
        ("learning_rate: {{low", "learning_rat: {{low", "no such option; did you mean 'learning_rate'?"),
        ("high: 1e-1", "hgh: 1e-1", "search.space.learning_rate: give a list of values, or {low"),
        ("low: 4", "low: 40", "low=40 is above high=8"),
        ("TPESampler", "TPSampler", "'TPSampler', 'seed': 0} is none of"),
        ("n_trials: 3", "n_parallel: 2\n  timeout: 3", "search.n_parallel: with halving or timeout"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str) -> None:
    assert old in CONFIG
    path = write_job(tmp_path, MODULE, CONFIG.replace(old, new))
    assert main(["search", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_without_the_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, MODULE, CONFIG.split("search:")[0])
    assert main(["search", str(path)]) == 2
    assert "the section 'search' is missing" in capsys.readouterr().err
    assert main(["search"]) == 2
    assert main(["search", "--help"]) == 0


def test_trials_in_processes_that_have_all_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> list[int]:
        study = study_of(tmp_path)
        for _ in range(config.n_trials):
            trial = study.ask()
            trial.set_user_attr("error", "ValueError: too wide")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return [0, 0]

    monkeypatch.setattr("paceline.cli.search.run_workers", fail)
    path = write_job(tmp_path, MODULE, CONFIG)
    with pytest.raises(RuntimeError, match=r"of 3, 3 failed .* trial 2: ValueError: too wide"):
        main(["search", str(path), "--n_parallel", "2"])
