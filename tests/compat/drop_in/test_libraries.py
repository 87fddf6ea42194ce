"""Jobs of libraries that build on transformers' Trainer, run as they are and with `python -m paceline.drop_in`.

Both runs log the same numbers and leave the same files. The models have no dropout, so nothing is drawn at random
while they train; jobs that sample text seed each call of `generate`.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from cases import slow_but
from safetensors.torch import load_file

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
    "tpo": (("more.py", "tpo"), ("trl",)),
    "gkd": (("more.py", "gkd"), ("trl",)),
    "gold": (("more.py", "gold"), ("trl",)),
    "grpo": (("more.py", "grpo"), ("trl",)),
    "rloo": (("more.py", "rloo"), ("trl",)),
    "gmpo": (("more.py", "gmpo"), ("trl",)),
    "distillation": (("more.py", "distillation"), ("trl",)),
    "online dpo": (("more.py", "online dpo"), ("trl",)),
    "sdft": (("more.py", "sdft"), ("trl",)),
    "sdpo": (("more.py", "sdpo"), ("trl",)),
    "a2po": (("more.py", "a2po"), ("trl",)),
    "bi-encoder": (("encoders.py", "bi"), ("sentence_transformers",)),
    "cross-encoder": (("encoders.py", "cross"), ("sentence_transformers",)),
    "sparse encoder": (("encoders.py", "sparse"), ("sentence_transformers",)),
    "setfit": (("few_shot.py",), ("setfit",)),
    "lora": (("lora.py",), ("peft",)),
}
# one of each library and kind of training; the others run at night
OFTEN = (
    *("sft with lora", "dpo", "reward", "grpo"),
    *("bi-encoder", "cross-encoder", "setfit"),
)
# jobs with dropout, killed and gone on with
RESUMED = {
    "sft with packing": (("sft.py", "packing", "dropout"), ("trl",)),
    "dpo with lora": (("dpo.py", "lora", "dropout"), ("trl", "peft")),
    "bi-encoder": (("encoders.py", "bi", "dropout"), ("sentence_transformers",)),
    "lora": (("lora.py", "dropout"), ("peft",)),
}
# of a clock, or of what is counted by another rule
NOT_COMPARED = ("runtime", "per_second", "step_time", "preparation_time", "total_flos")


def run(script: tuple[str, ...], folder: Path, *, with_paceline: bool, status: int = 0) -> dict[str, Any]:
    """Run a job of `jobs/`, which ends with `status`; returns what it wrote down."""
    folder.mkdir(exist_ok=True)
    name, *arguments = script
    words = [*(["-m", "paceline.drop_in"] if with_paceline else []), name, str(folder), *arguments]
    path = os.pathsep.join(filter(None, [str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = warm.run(words, JOBS, {**os.environ, "PYTHONPATH": path}, timeout=250)
    assert done.returncode == status, done.stderr[-3000:]
    if status:
        return {}
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not any(word in key for word in NOT_COMPARED)}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(OFTEN, COMPARED, pytest.mark.nightly))
def test_a_job_gives_the_same_numbers_and_files(name: str, tmp_path: Path) -> None:
    script, packages = COMPARED[name]
    for package in packages:
        pytest.importorskip(package)
    theirs = run(script, tmp_path / "theirs", with_paceline=False)
    ours = run(script, tmp_path / "ours", with_paceline=True)
    assert theirs["trainers"] == ["transformers.trainer"]
    assert ours["trainers"] == ["paceline.pytorch.trainer"]
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
    more -= {"uncommitted.diff"}  # of the repository that the tests run in
    assert more == {"manifest.json", "progress.json", "journal.bin", "packages.txt", "report.html", "run.json"}
    assert same_weights(tmp_path / "theirs", tmp_path / "ours")
    assert ("gap" in ours) == ("peft" in packages)  # between the model that was trained and its adapter, loaded again
    assert ours.get("gap", 0.0) < 1e-5


def same_weights(theirs: Path, ours: Path) -> bool:
    """True if the tensor files of two runs are equal."""
    found = sorted(file for file in files(theirs) if file.endswith(".safetensors"))
    assert any("checkpoint-" in file for file in found)
    for file in found:
        expected, got = load_file(theirs / file), load_file(ours / file)
        assert got.keys() == expected.keys(), file
        for key, value in expected.items():
            assert torch.allclose(got[key], value, rtol=TOLERANCE, atol=2e-5), (file, key)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["dpo with lora", "lora"], RESUMED, pytest.mark.nightly))
def test_a_job_that_was_killed_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """The process ends without a word at step 6, and the next one resumes from the checkpoint of step 4."""
    script, packages = RESUMED[name]
    for package in packages:
        pytest.importorskip(package)
    whole = run(script, tmp_path / "whole", with_paceline=True)
    run((*script, "kill"), tmp_path / "parts", with_paceline=True, status=9)
    assert not (tmp_path / "parts" / "checkpoint-8").exists()
    parts = run((*script, "resume"), tmp_path / "parts", with_paceline=True)
    rows = [[numbers(row) for row in result["rows"][:-1]] for result in (parts, whole)]
    for row in (*rows[0], *rows[1]):  # TRL counts tokens from the start of the process, wherever it resumes
        row.pop("num_tokens", None)
        row.pop("eval_num_tokens", None)
    assert rows[0] == rows[1]
    found = sorted(file for file in files(tmp_path / "whole") if file.endswith(".safetensors"))
    assert any("checkpoint-8" in file for file in found)
    for file in found:
        expected, got = (load_file(tmp_path / side / file) for side in ("whole", "parts"))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], value) for key, value in expected.items()), file


@pytest.mark.slow
def test_a_library_that_was_imported_first_is_moved_over(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    job = (JOBS / "sft.py").read_text()
    late = job.replace("args = SFTConfig(", "from paceline import drop_in\n\ndrop_in.install()\nargs = SFTConfig(")
    assert late != job
    (tmp_path / "late.py").write_text(f"import sys\nsys.path.insert(0, {str(JOBS)!r})\n{late}")
    theirs = run(("sft.py",), tmp_path / "theirs", with_paceline=False)
    ours = run((str(tmp_path / "late.py"),), tmp_path / "ours", with_paceline=False)
    assert ours["trainers"] == ["paceline.pytorch.trainer"]
    losses = [[row["loss"] for row in result["rows"] if "loss" in row] for result in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
