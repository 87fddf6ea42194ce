"""The examples of searches run: one of options, one of a depth and a width."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import warm

pytest.importorskip("optuna")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["architecture_search", "hyperparameter_search"])
def test_example(name: str, tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / f"{name}.py"), "--n_trials", "2", "--max_steps", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = warm.run([*words, "--output_dir", str(tmp_path)], tmp_path, environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    best = re.search(r"best: run-[01], accuracy (0\.\d+), .*'learning_rate': 0\.\d", done.stdout)
    assert best
    if name == "architecture_search":
        assert "'depth': " in done.stdout
    else:
        assert f"again: accuracy {best[1]}\n" in done.stdout
    assert (tmp_path / "study.db").exists()
