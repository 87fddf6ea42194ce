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


def test_each_process_of_a_pipeline_is_traced(tmp_path: Path) -> None:
    with simulated_processes(2):
        found = planned_job.build(tmp_path, "pp, 1f1b").plan()
        assert distributed.get_rank() == 0
    memory = found.memory
    assert memory is not None, found.memory_note
    first, second = 2 * 256 * 1024 + 1024 + 256, 256 * 1024 + 1024 + 10 * 1024 + 10
    assert memory.parameters == 4 * first
    assert len(memory.peaks) == 2
    assert memory.peak == memory.peaks[0] > memory.peaks[1] > 4 * 4 * second
    assert found.disk.optimizer == pytest.approx(2 * 4 * (first + second), rel=0.001)  # checkpoints hold all of it
    assert "processes of a pipeline" in str(found)
    assert not list(tmp_path.iterdir())
    assert not distributed.is_initialized()


@pytest.mark.slow
def test_replicas_of_a_pipeline(tmp_path: Path) -> None:
    with simulated_processes(4):
        options = {"parallel": {"pp": 2, "dp_replicate": 2}}
        found = make_trainer(tmp_path, Classifier(), classification(8), **options).plan()
    assert found.memory is not None, found.memory_note
    assert len(found.memory.peaks) == 2


def test_a_stage_that_reads_values_is_named(tmp_path: Path) -> None:
    class Reading(Classifier):
        def begin(self, x: torch.Tensor) -> torch.Tensor:
            assert float(x.sum()) != 12345.0
            return super().begin(x)

    with simulated_processes(2):
        found = make_trainer(tmp_path, Reading(), classification(8), parallel={"pp": 2}).plan()
        assert distributed.get_rank() == 0
    assert found.memory is None
    assert "cannot run on tensors without data" in found.memory_note
    assert "measure_memory" not in found.memory_note  # which runs on one process


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # DeepSpeed's
@pytest.mark.parametrize(
    ("section", "named"),
    [({"stage": 3}, "stage 3"), ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer")],
)
def test_settings_of_deepspeed_that_are_not_traced_are_named(section: Any, named: str, tmp_path: Path) -> None:
    comm = pytest.importorskip("deepspeed.comm.comm")
    with simulated_processes(2):
        trainer = make_trainer(tmp_path, Classifier(), classification(8), deepspeed={"zero_optimization": section})
        found = trainer.plan()
    assert found.memory is None
    assert named in found.memory_note
    assert comm.cdb is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # DeepSpeed's
def test_each_process_under_zero_holds_a_part_of_the_state(tmp_path: Path) -> None:
    comm = pytest.importorskip("deepspeed.comm.comm")
    whole = planned(tmp_path, 1, "ddp")
    found = planned(tmp_path, 4, "ZeRO 2")
    assert found.memory.parameters == pytest.approx(whole.memory.parameters, rel=0.001)
    assert found.memory.optimizer == pytest.approx(3 * whole.memory.parameters / 4, rel=0.001)  # with master weights
    assert found.disk.optimizer == pytest.approx(whole.disk.optimizer, rel=0.001)
    assert comm.cdb is None


@pytest.mark.slow
def test_buckets_of_replicas_are_counted(tmp_path: Path) -> None:
    found = planned(tmp_path, 2, "ddp").memory
    assert found.by_kind["buckets"] == found.gradients == found.parameters


@pytest.mark.slow
def test_gradients_stay_whole_between_micro_batches(tmp_path: Path) -> None:
    found = [planned(tmp_path, 2, name).memory for name in ("fsdp", "fsdp, accumulation")]
    assert found[1].peak > found[0].peak + found[0].gradients // 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # DeepSpeed's
@pytest.mark.parametrize("kind", ["", "zero"])
def test_the_peak_is_what_the_allocator_gives(kind: str, tmp_path: Path) -> None:
    if kind:
        pytest.importorskip("deepspeed")
    processes.run("planned_job.py", 2, str(tmp_path), *([kind] if kind else []))
    measured = json.loads((tmp_path / "peaks.json").read_text())
    for name in planned_job.ZERO if kind else planned_job.CASES:
        memory = planned(tmp_path / "planned", 2, name).memory
        found = [memory.peak / max(lowest for lowest, _ in measured[name])]
        # what a process of a pipeline has sent is held until it was taken, later in some steps than in others
        for own, (lowest, highest) in zip(memory.peaks, measured[name], strict=False):
            found.append(own / min(max(own, lowest), highest))
        shown = ", ".join(f"{ratio:.3f}" for ratio in found)
        print(f"{name}: predicted / measured = {shown}")
        assert found == pytest.approx([1] * len(found), abs=WITHIN), name


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
