"""The environment of launchers, the process group that is made from it, and the settings that are refused."""

from __future__ import annotations

import time
from pathlib import Path

import processes
import pytest
import torch
from cases import slow_but

from paceline import TrainingArguments
from paceline.args.plan import resolve
from paceline.pytorch.distributed.launchers import Launch, first_node, read_launch, run_identity
from paceline.pytorch.distributed.world import choose_backend

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41007",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
}


def test_each_launcher_is_read() -> None:
    assert read_launch(TORCHRUN) == Launch(3, 4, 1)
    assert read_launch(SRUN) == Launch(5, 8, 1, "gpu03", 15000 + 41007 % 20000)
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": "b", "MASTER_PORT": "7"}
    assert read_launch(mpi) == Launch(1, 2, 0, "b", 7)
    assert read_launch({}) is None
    assert read_launch({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert read_launch({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # inside salloc, without srun


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("gpu[3,7-9]", "gpu3"), ("a[01-04]-ib,b", "a01-ib")]
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_what_does_not_fit_together_is_said() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is not set"):
        read_launch({"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(ValueError, match="ranks are 0 to 3"):
        read_launch({**TORCHRUN, "RANK": "4"})
    with pytest.raises(ValueError, match="trains on the CPU"):
        choose_backend("nccl", torch.device("cpu"))
    with pytest.raises(ValueError, match="there is one"):
        resolve(TrainingArguments("x", fsdp=True), micro_batches_per_epoch=3)
    with pytest.raises(ValueError, match="two ways to parallelize"):
        TrainingArguments("x", fsdp=True, parallel="ddp")
    with pytest.raises(ValueError, match="set fsdp=True too"):
        TrainingArguments("x", fsdp_config={"min_num_params": 3})


def test_backends() -> None:
    assert choose_backend(None, torch.device("cpu")) == "gloo"
    assert choose_backend("nccl", torch.device("cuda")) == "cpu:gloo,cuda:nccl"


def test_a_restart_has_the_identity_of_its_start() -> None:
    assert run_identity({"TORCHELASTIC_RUN_ID": "job-1"}) == "job-1"
    assert run_identity({"TORCHELASTIC_RUN_ID": "none"}) == run_identity({"TORCHELASTIC_RUN_ID": "none"})
    assert run_identity({}) is None


def test_the_plan_says_how_the_work_is_shared() -> None:
    text = resolve(TrainingArguments("x"), world_size=2, micro_batches_per_epoch=3).describe()
    assert "processes  2, each with the whole model" in text


@pytest.mark.slow
def test_who_is_late_is_named(tmp_path: Path) -> None:
    """One process hangs in its data: the other says so, and in the end fails with the same words."""
    started = processes.start("late_job.py", 2, str(tmp_path), "1", "sleep")
    _, waiting = started[0].communicate(timeout=120)
    started[1].kill()
    _, late = started[1].communicate()
    assert started[0].returncode == 1
    assert "Process 0 is waiting: process 1 was reading data for" in waiting
    assert "RuntimeError: Process 0, waiting for the others before an update: process 1 was reading data" in waiting
    assert "Process 1 has been reading data for" in late
    assert "in __getitem__" in late  # its stack


@pytest.mark.slow
@pytest.mark.parametrize("rank", slow_but([1], [0, 1], pytest.mark.nightly))
def test_who_is_stopped_is_named_and_the_other_ends_when_its_time_is_up(tmp_path: Path, rank: int) -> None:
    """The first process serves the store, too: nobody waits for what it would have said."""
    started = processes.start("late_job.py", 2, str(tmp_path), str(rank), "stop")
    begun = time.monotonic()
    try:
        _, waiting = started[1 - rank].communicate(timeout=120)
        assert time.monotonic() - begun < 12 + 60, waiting  # and the time that imports take
    finally:
        started[rank].kill()
        started[rank].communicate()
    assert started[1 - rank].returncode == 1
    silent = "process 0, which keeps the records, has not answered for" if rank == 0 else "process 1, last heard of"
    assert f"Process {1 - rank} is waiting: {silent}" in waiting
    assert f"RuntimeError: Process {1 - rank}, waiting for the others before an update: {silent}" in waiting
    assert "it is stopped, or cut off" in waiting
