"""All processes infer the same loss reduction, and get the numbers of one process with the same global batch."""

from pathlib import Path
from typing import Any

import loss_job
import processes
import pytest
import torch


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    processes.finish(processes.start("loss_job.py", 2, str(folder), request.param))
    return [torch.load(folder / f"{request.param}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", loss_job.CASES)
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, of_two: list[dict[str, Any]], name: str) -> None:
    one = loss_job.run(tmp_path, name, 1, "")
    for rank in of_two:
        torch.testing.assert_close(rank[name]["weights"], one["weights"], rtol=1e-9, atol=1e-11)
        assert rank[name]["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert of_two[0][name]["passes"] == of_two[1][name]["passes"]
