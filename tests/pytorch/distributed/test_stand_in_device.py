"""A whole run on a device that is registered with torch, and that neither torch nor this package knows by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the report of the job. It has a process of its own: a device stays registered until its process ends."""
    folder = tmp_path_factory.mktemp("stand-in")
    path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SUPPORT / "stand_in_device_job.py"), str(folder), str(folder / "report.json")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    return report


@pytest.mark.slow
def test_the_run_is_on_the_device(found: dict[str, Any]) -> None:
    assert found["accelerator"] == "standin"
    assert {found[name]["device"] for name in ("whole", "resumed", "plain")} == {"standin:0"}
    assert found["cpu"]["device"] == "cpu"
    assert found["run"]["hardware"]["devices"] == ["standin"]


def test_it_trains_and_evaluates_as_on_a_cpu(found: dict[str, Any]) -> None:
    device, host = found["plain"], found["cpu"]
    assert len(device["losses"]) == 8
    assert device["losses"] == pytest.approx(host["losses"], rel=1e-5)
    assert device["eval_loss"] == pytest.approx(host["eval_loss"], rel=1e-5)
    assert device["eval_accuracy"] == host["eval_accuracy"]


def test_a_resume_is_exact_with_dropout_drawn_on_the_device(found: dict[str, Any]) -> None:
    for name in ("losses", "weights", "eval_loss"):
        assert found["resumed"][name] == found["whole"][name]


def test_tensors_without_addresses_are_tied_by_their_storage(found: dict[str, Any]) -> None:
    """All have address 0: by that, weights of one shape would be one weight, and all but the first lost in a save."""
    assert found["aliases"] == {"head": "embedding"}


def test_nothing_asks_for_cuda(found: dict[str, Any]) -> None:
    assert found["cuda_calls"] == []
