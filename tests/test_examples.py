"""The examples run, and so do their counterparts for transformers, with the same losses."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

import counterparts
from paceline.core.optional import is_installed

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = counterparts.examples()
STEPS = 20


def name_of(path: Path) -> str:
    return path.stem


def test_there_is_one_for_each_task() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "image_classification",
        "language_modelling",
        "question_answering",
        "summarization",
        "text_classification",
        "token_classification",
        "translation",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_counterparts_differ_in_one_line(path: Path) -> None:
    theirs = path.with_name(f"{path.stem}{counterparts.SUFFIX}.py").read_text("utf-8")
    lines = difflib.ndiff(path.read_text("utf-8").splitlines(), theirs.splitlines())
    changed = [line[2:] for line in lines if line[:1] in "+-"]
    assert len(changed) == 2
    assert changed[0].startswith("from paceline import ")
    assert changed[1] == changed[0].replace("from paceline", "from transformers")


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_are_short_and_listed(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 120
    assert f"python examples/{path.name}" in (ROOT / "examples" / "README.md").read_text("utf-8")


def run(script: Path, folder: Path) -> list[dict[str, Any]]:
    """Run an example for 20 steps, and return the rows of its log."""
    words = f"--max_steps {STEPS} --logging_steps 1 --eval_strategy no --save_strategy steps --use_cpu"
    command = [str(script), "--output_dir", str(folder), *words.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = warm.run(command, folder, environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "eval_results.json").exists()
    assert (folder / "model.safetensors").exists()
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text("utf-8"))
    return [row for row in state["log_history"] if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_both_log_the_same(path: Path, tmp_path: Path) -> None:
    """20 steps of each, from the same weights in the same order: no dropout, so that nothing else is random."""
    found = []
    for script in (path, path.with_name(f"{path.stem}{counterparts.SUFFIX}.py")):
        folder = tmp_path / script.stem
        folder.mkdir()
        found.append(run(script, folder))
    ours, theirs = found
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
        assert mine["learning_rate"] == pytest.approx(other["learning_rate"], rel=1e-6, abs=1e-12)
    names = (path.stem, f"{path.stem}{counterparts.SUFFIX}")
    metrics = [json.loads((tmp_path / name / "eval_results.json").read_text("utf-8")) for name in names]
    assert set(metrics[1]) - {"eval_model_preparation_time"} <= set(metrics[0])


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_the_doctor_raises_no_alarm(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [str(ROOT / "tests" / "support" / "example_doctor.py"), path.stem, str(tmp_path)]
    done = warm.run(command, tmp_path, environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    print(f"{path.stem}: {found['seconds']:.1f} s")
    assert [each for each in found["findings"] if each["severity"] != "note"] == []
    assert len(found["checks"]) == 17


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("tensorflow"), reason="needs TensorFlow")
def test_tensorflow(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "tensorflow_classification.py"), "--max_steps", "30"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    words = ["--eval_strategy", "no", "--save_strategy", "no", "--output_dir", str(tmp_path)]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "eval_results.json").read_text("utf-8"))["eval_accuracy"] > 0.3
