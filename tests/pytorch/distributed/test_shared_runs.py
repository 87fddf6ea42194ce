"""Runs of several processes that are interrupted: signals, kills, resume on the same and on another number of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import shared_runs
import torch
from safetensors.torch import load_file
from small_models import Tagger

from paceline.checkpoint.folders import verify
from paceline.core.journal import read_rows


def ended(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def weights(folder: Path, name: str, rank: int = 0) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(folder / f"{name}-{rank}.pt")
    return tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a whole run on two processes, one that a signal to the second process ended, and their resumption."""
    folder = tmp_path_factory.mktemp("runs")
    modes = ["whole", "terminated", f"from={folder}/terminated/checkpoint-6", "stopped"]
    modes += ["sharded", f"sharded_from={folder}/sharded/checkpoint-8", "sharded_best"]
    processes.run("shared_runs.py", 2, str(folder), *modes)
    return folder


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(folder: Path) -> None:
    assert [ended(folder, "terminated", rank)["global_step"] for rank in (0, 1)] == [6, 6]
    assert not verify(folder / "terminated" / "checkpoint-6")


def test_what_a_callback_asks_for_on_one_process_is_done_on_all(folder: Path) -> None:
    assert [ended(folder, "stopped", rank)["global_step"] for rank in (0, 1)] == [5, 5]


def test_a_resumed_run_is_bit_exact_on_every_process(folder: Path) -> None:
    for rank in (0, 1):
        assert torch.equal(weights(folder, "from", rank), weights(folder, "whole", rank))
        assert ended(folder, "from", rank) == ended(folder, "whole", rank)


def test_files_are_written_once(folder: Path) -> None:
    checkpoint = folder / "whole" / "checkpoint-8"
    assert not verify(checkpoint)
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    states = [torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=True)["cpu"] for rank in (0, 1)]
    assert not torch.equal(*states)  # other dropout on each process
    rows = read_rows(folder / "whole" / "journal.bin")
    assert [row.step for row in rows] == list(range(1, 16))
    assert [row.num_samples for row in rows[:5]] == [12, 12, 12, 12, 5]
    lines = (folder / "whole" / "log.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["step"] for line in lines}) + 1  # and the summary at the end


def test_a_sharded_run_is_resumed_bit_for_bit(folder: Path) -> None:
    for rank in (0, 1):
        assert torch.equal(weights(folder, "sharded_from", rank), weights(folder, "sharded", 0))
        assert ended(folder, "sharded_from", rank) == ended(folder, "sharded", rank)


def test_a_sharded_run_leaves_whole_checkpoints(folder: Path, tmp_path: Path) -> None:
    """They are gone on from by one process, with the same samples per update; `save_model` writes the whole model."""
    assert not verify(folder / "sharded" / "checkpoint-8")
    saved = load_file(folder / "sharded-model" / "model.safetensors")
    names = list(Tagger().state_dict())
    assert torch.equal(torch.cat([saved[name].flatten() for name in names]), weights(folder, "sharded"))
    shared_runs.run(tmp_path, f"from={folder}/sharded/checkpoint-8")
    before, after = (read_rows(path / "journal.bin") for path in (folder / "sharded", tmp_path / "from"))
    assert [row[:4] for row in after] == [row[:4] for row in before[8:]]
    state = torch.load(folder / "sharded" / "checkpoint-8" / "optimizer.pt", weights_only=True)["state"]
    assert [tuple(entry["exp_avg"].shape) for entry in state.values()] == [
        tuple(parameter.shape) for parameter in Tagger().parameters()
    ]


def test_the_best_sharded_model_is_loaded(folder: Path) -> None:
    best = json.loads((folder / "sharded_best" / "checkpoint-15" / "trainer_state.json").read_text())
    saved = load_file(Path(best["best_model_checkpoint"]) / "model.safetensors")
    expected = torch.cat([saved[name].flatten() for name in Tagger().state_dict()])
    for rank in (0, 1):
        assert torch.equal(weights(folder, "sharded_best", rank), expected)


@pytest.mark.parametrize("batch_size", ["3", "4"])
def test_another_number_of_processes_keeps_the_global_batch(
    folder: Path, tmp_path: Path, batch_size: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 -> 1: the same samples in each update, unless the batch size was set anew."""
    monkeypatch.setenv("BATCH_SIZE", batch_size)
    shared_runs.run(tmp_path, f"from={folder}/whole/checkpoint-8")
    before, after = (read_rows(path / "journal.bin") for path in (folder / "whole", tmp_path / "from"))
    if batch_size == "3":
        assert [row[:4] for row in after] == [row[:4] for row in before[8:]]
        assert "takes the same 12 samples" in caplog.text
    else:
        assert [row.num_samples for row in after[:2]] == [8, 8]
        assert "per_device_train_batch_size=4 was set" in caplog.text


@pytest.mark.slow
def test_a_killed_process_is_restarted_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(processes.SUPPORT / "shared_runs.py"), str(tmp_path), "killed"]
    environment = processes.environment_of(0, 2, 0)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert torch.equal(weights(tmp_path, "killed"), weights(folder, "whole"))
    rows = read_rows(tmp_path / "killed" / "journal.bin")
    assert [row.step for row in rows] == list(range(1, 16))


@pytest.mark.slow
def test_the_numbers_stay_on_other_numbers_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 -> 3 and 2 -> 4, without dropout: the same samples in each update, the same weights in the end."""
    monkeypatch.setenv("DROPOUT", "0")
    processes.run("shared_runs.py", 2, str(tmp_path), "whole")
    for size in (3, 4):
        own = tmp_path / str(size)
        own.mkdir()
        said = processes.run("shared_runs.py", size, str(own), f"from={tmp_path}/whole/checkpoint-4")
        assert f"resuming on {size}: each optimizer step takes the same 12 samples" in said[0]
        before, after = (read_rows(path / "journal.bin") for path in (tmp_path / "whole", own / "from"))
        assert [row[:4] for row in after] == [row[:4] for row in before[4:]]
        torch.testing.assert_close(weights(own, "from"), weights(tmp_path, "whole"), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 3)])
def test_updates_are_the_same_whoever_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Left twice in mid-epoch, without dropout: the samples of each update, and the weights, are those of one run."""
    monkeypatch.setenv("DROPOUT", "0")
    processes.run("shared_runs.py", sizes[0], str(tmp_path), "whole")
    rows = read_rows(tmp_path / "whole" / "journal.bin")
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    for number, size in enumerate(sizes[1:]):
        own = tmp_path / str(number)
        own.mkdir()
        processes.run("shared_runs.py", size, str(own), f"from={checkpoint}")
        after = read_rows(own / "from" / "journal.bin")
        assert [row[:4] for row in after] == [row[:4] for row in rows[4 * (number + 1) :]]
        torch.testing.assert_close(weights(own, "from"), weights(tmp_path, "whole"), rtol=1e-4, atol=1e-6)
        checkpoint = own / "from" / "checkpoint-8"
