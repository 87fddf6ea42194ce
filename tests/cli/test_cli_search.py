"""`paceline search`: the space in a file, trials in one process and in two, the result and its plots."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from terminals import TerminalProcess
from train_jobs import MODULE, write_job

from paceline.cli import search, search_table
from paceline.cli.display import AboveBars
from paceline.cli.main import main
from paceline.cli.search import run_workers
from paceline.cli.search_options import SearchConfig, read_search

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


@pytest.mark.slow
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
    wide = next(trial.number for trial in study.trials if trial.params["model.width"] != 4)  # not that of the file
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run" / f"run-{wide}"), "--step", "3", "--trust"]) == 0
    assert "bit-exact      yes" in capsys.readouterr().out


@pytest.mark.slow
def test_parallel(tmp_path: Path) -> None:
    path = write_job(tmp_path, MODULE, CONFIG)
    command = [sys.executable, "-m", "paceline", "search", str(path), "--n_parallel", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
    found = json.loads(done.stdout)  # and nothing else; the workers' output is not in it
    assert [row["state"] for row in found["trials"]] == ["complete"] * 3
    best = min(found["trials"], key=lambda row: row["objective"])
    assert found["best_trial"] == best["trial"]
    assert best["parameters"].keys() == {"learning_rate", "model.width", "per_device_train_batch_size"}
    assert Path(best["folder"]).is_dir()
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
        ("n_trials: 3", "direction: up", "search.direction: 'up' is neither minimize nor maximize"),
        ("n_trials: 3", "direction: [minimize, maximize]", "search.direction: give one; several are for Trainer."),
        ("n_trials: 3", "timeout: soon", "search.timeout: 'soon' is not a number of seconds"),
        ("n_trials: 3", "timeout: 0", "search.timeout: 0 is not a number of seconds"),
        ("n_trials: 3", "timeout: .inf", "search.timeout: inf is not a number of seconds"),
        ("n_trials: 3", "timeout: true", "search.timeout: True is not a number of seconds"),
        ("objective: mae", "objective: [mae]", "search.objective: ['mae'] is neither"),
        ("n_trials: 3", "pruner: 3", "search.pruner: 3 names no class"),
        ("{{name: TPESampler, seed: 0}}", "{{seed: 0}}", "search.sampler: {'seed': 0} names no class"),
        ("n_trials: 3", "pruner: {{name: MedianPruner, startup: 1}}", "search.pruner: "),
        ("n_trials: 3", "halving: 3", "search.halving: 3 is not {min_steps"),
        ("n_trials: 3", "halving: {{min_steps: 2, factor: 2}}", "search.halving: {'min_steps': 2, 'factor': 2} is not"),
        ("n_trials: 3", "halving: {{reduction_factor: 2}}", "search.halving: {'reduction_factor': 2} is not"),
        ("n_trials: 3", "halving: {{min_steps: 0}}", "search.halving.min_steps: 0 is not a whole number"),
        ("n_trials: 3", "halving: {{min_steps: 2}}\n  timeout: 3", "search.halving: it cannot be combined"),
        ("n_trials: 3", "halving: {{min_steps: 2}}\n  pruner: MedianPruner", "search.halving: it compares the trials"),
        ("high: 1e-1", "high: .nan", "search.space.learning_rate.high: nan is not a number"),
        ("high: 1e-1", "high: .inf", "search.space.learning_rate.high: inf is not a number"),
        ("log: true", "log: 1", "search.space.learning_rate.log: 1 is neither true nor false"),
        ("low: 1e-3", "low: 0", "search.space.learning_rate: log: true needs bounds above 0, not low=0"),
        ("log: true", "log: true, step: 0.01", "search.space.learning_rate: log and step exclude each other"),
        ("step: 4", "step: 0", "search.space.per_device_train_batch_size.step: 0 is not above 0"),
        ("step: 4", "step: 0.5", "search.space.per_device_train_batch_size.step: 0.5 is not a whole number"),
        ("[2, 8]", "[2, [8]]", "search.space.model.width: [8] is neither a number nor a text"),
        ("[2, 8]", "[]", "search.space.model.width: give a list of values"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str) -> None:
    assert old in CONFIG
    path = write_job(tmp_path, MODULE, CONFIG.replace(old, new))
    assert main(["search", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def in_this_process(config: SearchConfig, folder: Path | None = None) -> list[int]:
    """Takes the place of the processes of a search: the first one takes all trials."""
    return [search.run(read_search([*config.words, "--worker"]))]


GRID = "{{name: GridSampler, search_space: {{learning_rate: [0.001, 0.01], model.width: [2], {batch}: [4]}}}}"


def test_a_grid_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial of the queue has its own place in the grid."""
    monkeypatch.setattr(search, "run_workers", in_this_process)
    grid = GRID.replace("{batch}", "per_device_train_batch_size")
    path = write_job(tmp_path, MODULE, CONFIG.replace("{{name: TPESampler, seed: 0}}", grid))
    assert main(["search", str(path), "--n_parallel", "2", "--n_trials", "2"]) == 0
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    assert sorted(trial.params["learning_rate"] for trial in trials) == [0.001, 0.01]


@pytest.mark.filterwarnings("ignore:The number of trials is too small to compute importances")
def test_changed_arguments_of_a_search_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that starts the others compares its arguments with those of the study, and tells of it once."""
    monkeypatch.setattr(search, "run_workers", in_this_process)
    command = ["search", str(write_job(tmp_path, MODULE, CONFIG)), "--n_parallel", "2", "--n_trials"]
    assert main([*command, "1"]) == 0
    assert main([*command, "2", "--weight_decay", "0.5"]) == 0
    told = caplog.text
    assert told.count("other arguments") == told.count("comparable: weight_decay=0.5 (before: 0.0).") == 1


def test_without_the_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, MODULE, CONFIG.split("search:")[0])
    assert main(["search", str(path)]) == 2
    assert "the section 'search' is missing" in capsys.readouterr().err
    assert main(["search"]) == 2
    assert main(["search", "--help"]) == 0


@pytest.mark.slow
def test_trials_in_processes_that_have_all_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any, folder: Any = None) -> list[int]:
        study = study_of(tmp_path)
        for _ in range(config.n_trials):
            trial = study.ask()
            trial.set_user_attr("error", "ValueError: too wide")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return [0, 0]

    monkeypatch.setattr("paceline.cli.search.run_workers", fail)
    path = write_job(tmp_path, MODULE, CONFIG)
    assert main(["search", str(path), "--n_parallel", "2"]) == 1
    error = capsys.readouterr().err
    assert re.search(r"of 3, 3 failed .* trial 2: ValueError: too wide", error)
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_line_for_each_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets one line at the end of each trial, and none about those of an earlier start."""
    path = write_job(tmp_path, MODULE, CONFIG)
    assert main(["search", str(path), "--n_trials", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"trial \d+ +complete", line)]
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert all("learning_rate=" in line and "model.width=" in line for line in lines)
    assert main(["search", str(path), "--n_trials", "3"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [line.split()[1] for line in out.splitlines() if re.match(r"trial \d+ +complete", line)] == ["2"]


def test_table_of_trials() -> None:
    """A table has the trials that run and the newest, with the hyperparameters that can differ."""
    width, fixed = optuna.distributions.IntDistribution(2, 8), optuna.distributions.CategoricalDistribution([3])
    state = optuna.trial.TrialState
    ended = optuna.trial.create_trial(
        value=0.5, params={"width": 4, "seed": 3}, distributions={"width": width, "seed": fixed}
    )
    running = optuna.trial.create_trial(
        state=state.RUNNING, params={"width": 2}, distributions={"width": width}, intermediate_values={2: 0.75, 4: 0.25}
    )
    ended.number, running.number = 0, 1
    lines = search_table.table_of([ended, running], ["4/4", "2/4"])
    assert lines[0].split() == list(search_table.HEAD)
    assert lines[1].split()[:4] == ["0", "complete", "0.5", "4/4"]
    assert lines[1].endswith("width=4")
    assert lines[2].split()[:4] == ["1", "running", "0.25", "2/4"]
    trials = [optuna.trial.create_trial(value=0.0) for _ in range(5)]
    for number, trial in enumerate(trials):
        trial.number = number
    trials[1].state = state.RUNNING
    assert [trial.number for trial in search_table.chosen(trials, 3)] == [1, 3, 4]


def test_log_lines_above_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table is cleared before a log line and drawn again below it; it ends with the last states."""
    study = optuna.create_study(study_name="paceline", storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    monkeypatch.setattr(search_table, "is_interactive", lambda stream: True)
    handler = AboveBars()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with search_table.TrialsDisplay(tmp_path).shown():
        assert handler.around is not None
        with handler.around():
            print("note")
    assert handler.around is None
    out = capsys.readouterr().out
    assert out.startswith("note\n\r\x1b[J")
    assert out.count("complete") == 2
    assert out.endswith("\x1b[3B\r")


def test_display_without_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no study costs the display, not the search."""
    (tmp_path / "study.db").write_text("no database" * 99)
    with search_table.TrialsDisplay(tmp_path).shown():
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [("4,6", ["4", "6", "4"]), ("GPU-a1", ["GPU-a1"] * 3), ("", [""] * 3)],
)
def test_each_process_has_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, wanted: list[str]
) -> None:
    """Processes take the visible CUDA devices in turn; without one, their environment is that of the search."""
    started: list[tuple[list[str], str]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            started.append((command, env["CUDA_VISIBLE_DEVICES"]))

        def wait(self) -> int:
            return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("paceline.cli.search.subprocess.Popen", Process)
    path = write_job(tmp_path, MODULE, CONFIG)
    config = read_search([str(path), "--n_parallel", "3"])
    assert run_workers(config) == [0, 0, 0]
    assert [device for _, device in started] == wanted
    assert all(command[-1] == "--worker" and str(path) in command for command, _ in started)
    assert run_workers(config, tmp_path) == [0, 0, 0]
    assert [device for _, device in started[3:]] == wanted
    assert sorted(file.name for file in tmp_path.glob("worker-*")) == [f"worker-{index}.log" for index in range(3)]


SLOW_NET = """
class Slow(Net):
    def forward(self, *args, **kwargs):
        time.sleep(0.05)
        return super().forward(*args, **kwargs)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("n_parallel", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ctrl_c_during_the_table(tmp_path: Path, n_parallel: int) -> None:
    """Ctrl-C ends a search in a terminal with a message; the same command keeps the finished trials and goes on."""
    config = CONFIG.replace(":Net", ":Slow").replace("max_steps: 4", "max_steps: 20")
    path = write_job(tmp_path, f"import time\n{MODULE}{SLOW_NET}", config)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "search",
        str(path),
        "--n_parallel",
        str(n_parallel),
        "--n_trials",
        "5",
    ]
    with TerminalProcess(command, 120) as screen:
        screen.wait_for(lambda: num_complete(tmp_path) >= 1)
        time.sleep(2)  # into the next trial: between them, Python drops what a signal raises while it collects garbage
        screen.interrupt()
        assert screen.wait() == 130
    assert "Traceback" not in screen.text
    assert screen.text.rstrip().endswith("paceline: interrupted")
    assert num_complete(tmp_path) < 5
    before = [trial.number for trial in study_of(tmp_path).trials if trial.state.name == "COMPLETE"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    states = {trial.number: trial.state.name for trial in study_of(tmp_path).trials}
    assert [states[number] for number in before] == ["COMPLETE"] * len(before)
    assert list(states.values()).count("COMPLETE") == 5


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_locked_storage_during_the_table(tmp_path: Path) -> None:
    """A storage that another process locks for some seconds costs neither the search nor a trial."""
    config = CONFIG.replace(":Net", ":Slow").replace("max_steps: 4", "max_steps: 20")
    path = write_job(tmp_path, f"import time\n{MODULE}{SLOW_NET}", config)
    command = [sys.executable, "-m", "paceline", "search", str(path)]
    with TerminalProcess(command, 120) as screen:
        screen.wait_for(lambda: num_complete(tmp_path) >= 1)
        with sqlite3.connect(tmp_path / "run" / "study.db", isolation_level=None, timeout=60) as other:
            other.execute("BEGIN EXCLUSIVE")
            time.sleep(4)
            other.execute("ROLLBACK")
        other.close()
        assert screen.wait() == 0, screen.text[-2000:]
    assert "Traceback" not in screen.text
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["COMPLETE"] * 3


def num_complete(folder: Path) -> int:
    """The number of finished trials; 0 while the study is being made."""
    path = folder / "run" / "study.db"
    if not path.exists():
        return 0
    database = sqlite3.connect(path)
    try:
        return int(database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0])
    except sqlite3.Error:
        return 0
    finally:
        database.close()
