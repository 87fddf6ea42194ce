"""`Trainer.plan` of several processes, made on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planned_job
import processes
import pytest
import torch
from small_models import Classifier, classification, make_trainer
from torch import distributed

from paceline import UnsupportedOption, simulated_processes
from paceline.cli.main import main

WITHIN = 0.10


def planned(folder: Path, number: int, name: str) -> Any:
    with simulated_processes(number):
        found = planned_job.build(folder, name).plan()
    assert found.memory is not None, found.memory_note
    return found


def test_each_process_holds_a_shard(tmp_path: Path) -> None:
    whole = planned(tmp_path, 1, "ddp").memory
    found = planned(tmp_path, 4, "fsdp")
    assert found.memory.parameters == pytest.approx(whole.parameters / 4, rel=0.01)
    assert found.memory.gradients == pytest.approx(whole.gradients / 4, rel=0.01)
    assert found.memory.optimizer == pytest.approx(whole.optimizer / 4, rel=0.01)
    assert found.disk.optimizer == pytest.approx(whole.optimizer, rel=0.001)  # checkpoints hold all of it
    assert found.memory.peak < whole.peak
    assert "processes  4" in str(found)
    assert not list(tmp_path.iterdir())
    assert not distributed.is_initialized()


def test_a_mesh_cuts_what_its_plan_names(tmp_path: Path) -> None:
    found = planned(tmp_path, 2, "tp").memory
    cut, other = 2 * 256 * 1024 + 1024, 256 + (256 * 1024 + 1024) + (10 * 1024 + 10)  # first and second; the rest
    assert found.parameters == 4 * (cut // 2 + other)


@pytest.mark.slow
def test_buckets_of_replicas_are_counted(tmp_path: Path) -> None:
    found = planned(tmp_path, 2, "ddp").memory
    assert found.by_kind["buckets"] == found.gradients == found.parameters


@pytest.mark.slow
def test_gradients_stay_whole_between_micro_batches(tmp_path: Path) -> None:
    found = [planned(tmp_path, 2, name).memory for name in ("fsdp", "fsdp, accumulation")]
    assert found[1].peak > found[0].peak + found[0].gradients // 2


@pytest.mark.slow
def test_the_peak_is_what_the_allocator_gives(tmp_path: Path) -> None:
    processes.run("planned_job.py", 2, str(tmp_path))
    measured = json.loads((tmp_path / "peaks.json").read_text())
    for name in planned_job.CASES:
        found = planned(tmp_path / "planned", 2, name).memory.peak / measured[name]
        print(f"{name}: predicted / measured = {found:.3f}")
        assert found == pytest.approx(1, abs=WITHIN), name


def test_nothing_is_trained_there(tmp_path: Path) -> None:
    with simulated_processes(2):
        trainer = make_trainer(tmp_path, Classifier(), classification(8), eval_dataset=classification(8))
        with pytest.raises(UnsupportedOption, match=r"train\(\) under simulated_processes"):
            trainer.train()
        with pytest.raises(UnsupportedOption, match="simulated_processes"):
            trainer.evaluate()
        with pytest.raises(UnsupportedOption, match="one process"):
            trainer.plan(time=True)
        with pytest.raises(RuntimeError, match="process group already"), simulated_processes(2):
            pass
    for call in (trainer.train, trainer.evaluate, trainer.plan):
        with pytest.raises(
            UnsupportedOption, match=r"made for 2 processes, and their process group is gone.*Make another"
        ):
            call()
    with pytest.raises(ValueError, match="at least 1"), simulated_processes(0):
        pass


JOB = """\
model: made:Classifier
data: made:rows
arguments: {output_dir: run, fsdp: true, use_cpu: true, per_device_train_batch_size: 4}
"""
MODULE = """\
from small_models import Classifier, classification
def rows():
    return {"train": classification(48)}
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text(MODULE)
    Path("job.yaml").write_text(JOB)
    assert main(["plan", "job.yaml", "--processes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["plan"]["world_size"] == 4
    assert found["memory"]["parameters"] < sum(4 * each.numel() for each in Classifier().parameters())
    assert not torch.distributed.is_initialized()
    for words, text in (
        (["--processes"], "from 1 on"),
        (["--processes=x"], "from 1 on"),
        (["--processes", "2", "--time"], "--time"),
    ):
        assert main(["plan", "job.yaml", *words]) == 2
        assert text in capsys.readouterr().err
