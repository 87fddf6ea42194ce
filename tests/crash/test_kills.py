"""SIGKILL at random instants: the run that is taken up again ends where the undisturbed one does, bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import crash_job
import pytest
import torch

from paceline.checkpoint.folders import list_checkpoints, verify

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

CALLS = 320  # a few more calls that change folders than one undisturbed run makes


class Kills:
    """Starts runs from one server process, which has torch imported, and kills them."""

    def __init__(self, folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["paceline.pytorch.trainer", "torch._dynamo"])
        self.expected = self.finish(folder)
        start = time.monotonic()
        self.finish(folder / "timed")
        self.seconds = time.monotonic() - start

    def start(self, folder: Path, kill_at: int | None = None) -> Any:
        folder.mkdir(exist_ok=True)
        (folder / "started").unlink(missing_ok=True)
        process = self.context.Process(target=crash_job.run, args=(folder, kill_at))
        process.start()
        while not (folder / "started").exists() and process.is_alive():
            time.sleep(0.002)
        return process

    def finish(self, folder: Path) -> dict[str, Any]:
        process = self.start(folder)
        process.join(120)
        assert process.exitcode == 0
        result: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
        return result

    def kill_somewhere(self, folder: Path, choice: random.Random) -> bool:
        """At a random time, or at a random change of a folder. Returns whether the run was still going."""
        if choice.random() < 0.5:
            process = self.start(folder, kill_at=choice.randrange(CALLS))
            process.join(120)
        else:
            process = self.start(folder)
            process.join(choice.uniform(0, 1.2 * self.seconds))
            process.kill()
            process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return Kills(tmp_path_factory.mktemp("undisturbed"))


def check(folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["weights"], expected["weights"])
    assert all(map(torch.equal, found["optimizer"], expected["optimizer"]))
    assert {k: v for k, v in found.items() if k not in ("weights", "optimizer")} == {
        k: v for k, v in expected.items() if k not in ("weights", "optimizer")
    }
    assert [problem for path in list_checkpoints(folder) for problem in verify(path)] == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def kill_and_finish(kills: Kills, folder: Path, seed: int) -> int:
    """Kill a run up to three times, let it finish, compare. Returns the number of kills that hit."""
    choice = random.Random(seed)
    hits = sum(kills.kill_somewhere(folder, choice) for _ in range(choice.choice((1, 1, 2, 3))))
    check(folder, kills.finish(folder), kills.expected)
    return hits


def kill_until(kills: Kills, folder: Path, number: int, seed: int) -> None:
    hits = 0
    while hits < number:
        hits += kill_and_finish(kills, folder / str(seed), seed)
        seed += 1


@pytest.mark.slow
def test_three_kills(kills: Kills, tmp_path: Path) -> None:
    kill_until(kills, tmp_path, 3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [10, pytest.param(50, marks=pytest.mark.nightly)])
def test_many_kills(kills: Kills, tmp_path: Path, number: int) -> None:
    kill_until(kills, tmp_path, number, seed=100)
