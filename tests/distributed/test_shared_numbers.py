"""The numbers of a run do not depend on how many processes make it: weights, losses, norms, evaluations, predictions.

One start of real processes (gloo) goes through all scenarios of `tests/support/shared_job.py`; each is compared with
the same global batch on one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import shared_job
import torch

Found = dict[str, Any]
EXACT = ("learning_rate", "global_step", "epoch", "tokens", "scheduler_steps", "count")


def results_of(folder: Path, size: int) -> dict[str, list[Found]]:
    """What each process found, by scenario."""
    processes.run("shared_job.py", size, str(folder), *shared_job.SCENARIOS)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(size)]
        for name in shared_job.SCENARIOS
    }


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return results_of(tmp_path_factory.mktemp("two"), 2)


def check_same(several: list[Found], one: Found) -> None:
    for rank, found in enumerate(several):
        for name in EXACT:
            assert found.get(name) == one.get(name), f"{name} of process {rank}"
        assert torch.equal(found["weights"], several[0]["weights"]), "the processes have drifted apart"
        torch.testing.assert_close(found["gradient"], one["gradient"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-4, atol=1e-6)
        for name in ("loss", "grad_norm", "eval_loss", "test_loss"):
            assert found[name] == pytest.approx(one[name], rel=1e-5, nan_ok=True), f"{name} of process {rank}"
        for name in ("predictions", "labels"):
            if name in one:
                np.testing.assert_allclose(found[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", shared_job.SCENARIOS)
def test_two_processes(tmp_path: Path, of_two: dict[str, list[Found]], name: str) -> None:
    check_same(of_two[name], shared_job.SCENARIOS[name](tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_processes(tmp_path: Path, size: int) -> None:
    found = results_of(tmp_path, size)
    for name, several in found.items():
        check_same(several, shared_job.SCENARIOS[name](tmp_path / "one", 1))
