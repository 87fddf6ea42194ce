"""Jobs of libraries that build on transformers' Trainer, run as they are and with `python -m paceline.drop_in`.

Both runs log the same numbers and leave the same files. The models have no dropout, so nothing is drawn at random
while they train; the two jobs that sample text are only run.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline

JOBS = Path(__file__).with_name("jobs")
TOLERANCE = 2e-3
# name -> script and arguments, and the packages it needs
COMPARED = {
    "sft": (("sft.py",), ("trl",)),
    "sft with packing": (("sft.py", "packing"), ("trl",)),
    "sft with lora": (("sft.py", "lora"), ("trl", "peft")),
    "dpo": (("dpo.py",), ("trl",)),
    "dpo with lora": (("dpo.py", "lora"), ("trl", "peft")),
    "reward": (("reward.py",), ("trl",)),
    "kto": (("more.py", "kto"), ("trl",)),
    "cpo": (("more.py", "cpo"), ("trl",)),
    "orpo": (("more.py", "orpo"), ("trl",)),
    "bi-encoder": (("encoders.py", "bi"), ("sentence_transformers",)),
    "cross-encoder": (("encoders.py", "cross"), ("sentence_transformers",)),
    "sparse encoder": (("encoders.py", "sparse"), ("sentence_transformers",)),
    "setfit": (("few_shot.py",), ("setfit",)),
    "lora": (("lora.py",), ("peft",)),
}
SAMPLED = {"grpo": ("more.py", "grpo"), "rloo": ("more.py", "rloo")}
# of a clock, or of what is counted by another rule
NOT_COMPARED = ("runtime", "per_second", "step_time", "preparation_time", "total_flos")


def run(script: tuple[str, ...], folder: Path, *, with_paceline: bool) -> dict[str, Any]:
    """Run a job of `jobs/`; returns what it wrote down."""
    folder.mkdir()
    name, *arguments = script
    command = [sys.executable, *(["-m", "paceline.drop_in"] if with_paceline else []), name, str(folder), *arguments]
    path = os.pathsep.join(filter(None, [str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=JOBS, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not any(word in key for word in NOT_COMPARED)}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_job_gives_the_same_numbers_and_files(name: str, tmp_path: Path) -> None:
    script, packages = COMPARED[name]
    for package in packages:
        pytest.importorskip(package)
    theirs = run(script, tmp_path / "theirs", with_paceline=False)
    ours = run(script, tmp_path / "ours", with_paceline=True)
    assert theirs["trainers"] == ["transformers.trainer"]
    assert ours["trainers"] == ["paceline.trainer"]
    assert len(ours["rows"]) == len(theirs["rows"])
    for their_row, our_row in zip(theirs["rows"], ours["rows"], strict=True):
        expected, found = numbers(their_row), numbers(our_row)
        assert found.keys() == expected.keys()
        different = {
            key: (value, found[key])
            for key, value in expected.items()
            if not math.isclose(found[key], value, rel_tol=TOLERANCE, abs_tol=1e-6)
        }
        assert not different, (their_row["step"], different)
    assert files(tmp_path / "theirs") - files(tmp_path / "ours") == set()
    more = {Path(file).name for file in files(tmp_path / "ours") - files(tmp_path / "theirs")}
    assert more == {"manifest.json", "progress.json", "journal.bin", "run.json"}
    assert same_weights(tmp_path / "theirs", tmp_path / "ours")
    if "gap" in ours:  # between the model that was trained and its adapter, loaded again
        assert ours["gap"] < 1e-5


def same_weights(theirs: Path, ours: Path) -> bool:
    """Whether every tensor file of the one run holds what that of the other does."""
    import torch
    from safetensors.torch import load_file

    found = sorted(file for file in files(theirs) if file.endswith(".safetensors"))
    assert any("checkpoint-" in file for file in found)
    for file in found:
        expected, got = load_file(theirs / file), load_file(ours / file)
        assert got.keys() == expected.keys(), file
        for key, value in expected.items():
            assert torch.allclose(got[key], value, rtol=TOLERANCE, atol=2e-5), (file, key)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_a_job_that_samples_text_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    ours = run(SAMPLED[name], tmp_path / "ours", with_paceline=True)
    assert ours["trainers"] == ["paceline.trainer"]
    assert [row["step"] for row in ours["rows"]] == [1, 2, 3, 4, 4]
    assert (tmp_path / "ours" / "checkpoint-4" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_library_that_was_imported_first_is_moved_over(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    job = (JOBS / "sft.py").read_text()
    late = job.replace("args = SFTConfig(", "from paceline import drop_in\n\ndrop_in.install()\nargs = SFTConfig(")
    assert late != job
    (tmp_path / "late.py").write_text(f"import sys\nsys.path.insert(0, {str(JOBS)!r})\n{late}")
    theirs = run(("sft.py",), tmp_path / "theirs", with_paceline=False)
    ours = run((str(tmp_path / "late.py"),), tmp_path / "ours", with_paceline=False)
    assert ours["trainers"] == ["paceline.trainer"]
    losses = [[row["loss"] for row in result["rows"] if "loss" in row] for result in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
