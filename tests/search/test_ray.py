"""A search with Ray Tune on this machine: trials, ASHA, and PBT with the checkpoints of other trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from search_jobs import SAVES, make_search

from paceline.core.optional import is_installed
from paceline.search.trials import SearchError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("ray"), reason="needs ray")]
SUPPORT = Path(__file__).resolve().parents[1] / "support"


def search(folder: Path, way: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1] / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(SUPPORT / "ray_search_job.py"), str(folder), way]
    log = folder.parent / "log.txt"  # no pipe: processes of Ray that outlive the job would keep it open
    with log.open("wb") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=280).returncode
    assert code == 0, log.read_text("utf-8", errors="replace")[-3000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
    return found


@pytest.mark.nightly
def test_asha_ends_the_worse_trial(tmp_path: Path) -> None:
    found = search(tmp_path / "out", "asha")
    assert [trial["step"] for trial in found["trials"]] == [6, 2]
    assert found["id"] == found["trials"][0]["id"]
    assert found["params"]["learning_rate"] == 1e-2
    again = make_search(tmp_path / "again", learning_rate=1e-2, seed=3)
    again.train()
    assert again.evaluate()["eval_loss"] == found["objective"]


@pytest.mark.nightly
def test_pbt_goes_on_from_the_better_trial(tmp_path: Path) -> None:
    """The worse trial takes the checkpoint of the other, and a learning rate of the mutations, which is applied."""
    found = search(tmp_path / "out", "pbt")
    assert all(trial["step"] == 6 for trial in found["trials"])
    state = json.loads((tmp_path / "out" / f"run-{found['id']}" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["trial_params"] == found["params"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": ["minimize", "minimize"]}, "Ray Tune takes one objective"),
        ({"hp_space": lambda trial: 3}, "hp_space returned int"),
        ({"scheduler": SimpleNamespace(_hyperparam_mutations={"adam_beta1": [0.1]})}, "names 'adam_beta1'"),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        make_search(tmp_path, **SAVES).hyperparameter_search(backend="ray", n_trials=1, **options)


def test_unknown_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SCOPE", "first")
    with pytest.raises(SearchError, match="RAY_SCOPE='first'"):
        make_search(tmp_path).hyperparameter_search(backend="ray", n_trials=1)
