"""A search on two processes: one rank asks and all obey."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

optuna = pytest.importorskip("optuna")


@pytest.mark.slow
def test_one_rank_asks_and_all_obey(tmp_path: Path) -> None:
    processes.run("ranks_search_job.py", 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text("utf-8")) for rank in range(2))
    assert first == second
    assert first["replayed"][0]
    study = optuna.load_study(study_name="paceline", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.state.name for trial in study.trials][:3] == ["COMPLETE", "PRUNED", "FAIL"]
    assert [(name, step) for name, step, *_ in first["ends"]][:2] == [("run-0", 6), ("run-1", 2)]
    assert [name for name, *_ in first["ends"]] == ["run-0", "run-1", "run-3"]
    told = [params for _, _, params, _ in first["ends"]]
    assert told == [trial.params for trial in study.trials if trial.state.name != "FAIL"]
    assert first["best"][1] == min(trial.value for trial in study.trials if trial.state.name == "COMPLETE")
