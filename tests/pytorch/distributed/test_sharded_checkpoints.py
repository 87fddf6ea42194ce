"""Checkpoints in shards, written by several processes and gone on from by the same and by other numbers of them."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import shared_runs
import torch
from small_models import Tagger

from paceline.checkpoint.folders import list_checkpoints, verify
from paceline.core.journal import read_rows
from paceline.pytorch.checkpoint.fqn_state import read_whole_model

pytestmark = pytest.mark.slow


def ended(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def weights(folder: Path, name: str, rank: int = 0) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(folder / f"{name}-{rank}.pt")
    return tensor


def stored(checkpoint: Path) -> torch.Tensor:
    whole = read_whole_model(checkpoint)
    assert whole is not None
    return torch.cat([whole[name].flatten() for name in Tagger().state_dict()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs on two processes that write whole checkpoints and shards, and go on from either."""
    folder = tmp_path_factory.mktemp("runs")
    parts, whole = folder / "sharded_parts", folder / "sharded"
    modes = ["sharded", "sharded_parts", f"sharded_parts_from={parts}/checkpoint-8", "whole"]
    modes += [f"sharded_parts_of_whole={whole}/checkpoint-8", f"sharded_of_parts={parts}/checkpoint-8"]
    modes += [f"ddp_of_parts={parts}/checkpoint-8", "ddp_parts", "sharded_parts_best"]
    processes.run("shared_runs.py", 2, str(folder), *modes)
    return folder


@pytest.mark.parametrize("name", ["sharded_parts", "sharded_parts_from", "sharded_parts_of_whole", "sharded_of_parts"])
def test_the_form_of_a_checkpoint_changes_no_bit(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert torch.equal(weights(folder, name, rank), weights(folder, "sharded"))
        assert ended(folder, name, rank) == ended(folder, "sharded", rank)


def test_an_error_of_the_first_process_is_told_to_all(tmp_path: Path) -> None:
    """And not waited out by the others."""
    processes.finish(processes.start("refused_plan_job.py", 2, str(tmp_path)), timeout=120)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == "KeyError: 'a writer that has no folder'"
    assert second == f"RuntimeError: {first}"


def test_each_process_writes_its_own_part(folder: Path) -> None:
    checkpoint = folder / "sharded_parts" / "checkpoint-8"
    assert verify(checkpoint) == []
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        found = {path.name: path.stat().st_size for path in (checkpoint / part).glob("*.distcp")}
        assert found.keys() == {"__0_0.distcp", "__1_0.distcp"}
    assert {path.name for path in (folder / "sharded_parts").glob(".*")} == set()
    assert torch.equal(stored(folder / "sharded_parts" / "checkpoint-15"), weights(folder, "sharded"))


def test_whole_models_are_written_in_shares_too(folder: Path) -> None:
    assert torch.equal(weights(folder, "ddp_parts"), weights(folder, "whole"))
    assert torch.equal(stored(folder / "ddp_parts" / "checkpoint-15"), weights(folder, "whole"))
    files = list((folder / "ddp_parts" / "checkpoint-15" / "optimizer_0").glob("*.distcp"))
    assert len(files) == 2


def test_the_best_model_is_loaded(folder: Path) -> None:
    best = json.loads((folder / "sharded_parts_best" / "checkpoint-15" / "trainer_state.json").read_text())
    expected = stored(Path(best["best_model_checkpoint"]))
    for rank in (0, 1):
        assert torch.equal(weights(folder, "sharded_parts_best", rank), expected)


def test_other_strategies_and_numbers_of_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 -> 1, 2 -> 4 and 2 -> 2 x 2, without dropout: the same samples, the same weights in the end."""
    monkeypatch.setenv("DROPOUT", "0")
    processes.run("shared_runs.py", 2, str(tmp_path), "sharded_parts")
    source, expected = f"{tmp_path}/sharded_parts/checkpoint-4", weights(tmp_path, "sharded_parts")
    processes.run("shared_runs.py", 2, str(tmp_path), f"ddp_of={source}")
    shared_runs.run(tmp_path, f"one_of={source}")
    (tmp_path / "4").mkdir()
    modes = [f"sharded_parts_of={source}", f"hybrid_parts_of={source}"]
    processes.run("shared_runs.py", 4, str(tmp_path / "4"), *modes)
    for place, name in ((tmp_path, "ddp_of"), (tmp_path, "one_of"), (tmp_path / "4", "sharded_parts_of"),
                        (tmp_path / "4", "hybrid_parts_of")):  # fmt: skip
        torch.testing.assert_close(weights(place, name), expected, rtol=1e-4, atol=1e-6)
    shared_runs.run(tmp_path, f"one_from={tmp_path}/4/hybrid_parts_of/checkpoint-8")
    torch.testing.assert_close(weights(tmp_path, "one_from"), expected, rtol=1e-4, atol=1e-6)
    before, after = (read_rows(path / "journal.bin") for path in (tmp_path / "sharded_parts", tmp_path / "one_of"))
    assert [row[:4] for row in after] == [row[:4] for row in before[4:]]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_processes_killed_while_they_save_leave_the_old_checkpoint_or_the_new(tmp_path: Path) -> None:
    """One of two is killed at a call that changes a folder, mid-save mostly; the run that goes on ends as one whole."""

    def run(place: Path, rank: int = -1, call: int = 0) -> list[int]:
        place.mkdir(exist_ok=True)
        started = processes.start("sharded_kill_job.py", 2, str(place), str(rank), str(call))
        codes = []
        for process in started:
            process.communicate(timeout=240)
            codes.append(process.returncode)
        return codes

    assert run(tmp_path / "whole") == [0, 0]
    expected = torch.load(tmp_path / "whole" / "result-0.pt")
    for rank, call in ((0, 23), (1, 9), (0, 61)):
        place = tmp_path / f"{rank}-{call}"
        codes = run(place, rank, call)
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] != 0
        for checkpoint in list_checkpoints(place / "run"):
            assert verify(checkpoint) == []
        assert run(place) == [0, 0]
        assert torch.equal(torch.load(place / "result-1.pt"), expected)
        assert [path.name for path in (place / "run").glob(".*")] == []
