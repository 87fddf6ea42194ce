"""launch/ray_train.py, run by a real Ray: the numbers are those of the same processes under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.folders import list_checkpoints
from paceline.core.optional import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs ray"),
]

ROOT = Path(__file__).resolve().parents[3]
STEPS = 60


def run(words: list[str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'launch'}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.nightly
def test_ray_gives_the_numbers_of_torchrun(tmp_path: Path) -> None:
    options = ["--max_steps", str(STEPS), "--use_cpu", "--disable_tqdm", "true"]
    launched = ["-m", "paceline", "launch", "--nproc-per-node", "2", str(ROOT / "launch" / "train.py")]
    run([*launched, "--output_dir", str(tmp_path / "torchrun"), *options])
    ray_job = [str(ROOT / "tests" / "support" / "ray_job.py"), "--output-dir", str(tmp_path / "ray")]
    run([*ray_job, "--max-steps", str(STEPS)])
    check(tmp_path)


def check(folder: Path) -> None:
    """Weights and evaluation of the two runs."""
    for which in ("torchrun", "ray"):
        assert [path.name for path in list_checkpoints(folder / which)] == ["checkpoint-50", "checkpoint-60"]
    ours, theirs = (load_file(folder / which / "model.safetensors") for which in ("torchrun", "ray"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-7)
    results = [json.loads((folder / which / "eval_results.json").read_text()) for which in ("torchrun", "ray")]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-5)
