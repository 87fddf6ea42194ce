"""The example of an architecture search runs, and finds a depth and a width."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import warm

pytest.importorskip("optuna")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_example(tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "architecture_search.py"), "--n_trials", "2", "--max_steps", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = warm.run([*words, "--output_dir", str(tmp_path)], tmp_path, environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"best: run-[01], accuracy 0\.\d+, .*'depth': \d", done.stdout)
    assert (tmp_path / "study.db").exists()
