"""All processes infer the same loss reduction, and get the numbers of one process with the same global batch."""

from pathlib import Path
from typing import Any

import floor_job
import loss_job
import processes
import pytest
import torch


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    processes.finish(processes.start("loss_job.py", 2, str(folder), request.param))
    return [torch.load(folder / f"{request.param}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", loss_job.CASES)
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, of_two: list[dict[str, Any]], name: str) -> None:
    one = loss_job.run(tmp_path, name, 1, "")
    for rank in of_two:
        torch.testing.assert_close(rank[name]["weights"], one["weights"], rtol=1e-9, atol=1e-11)
        assert rank[name]["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert of_two[0][name]["passes"] == of_two[1][name]["passes"]


@pytest.fixture(scope="module")
def floored(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("floors")
    processes.finish(processes.start("floor_job.py", 2, str(folder)))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("floor", floor_job.FLOORS)
@pytest.mark.parametrize("maker", floor_job.MAKERS)
def test_a_floor_is_never_crossed_in_silence(floored: list[dict[Any, dict[str, Any]]], maker: str, floor: str) -> None:
    model = floor_job.MAKERS[maker](floor).double()
    loss = model(**{key: torch.stack([sample[key] for sample in floor_job.DATA]) for key in floor_job.DATA[0]})["loss"]
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
    for parts in floor_job.PARTS:
        ranks = [rank[maker, floor, parts] for rank in floored]
        is_right = all(torch.allclose(rank["gradient"], gradient, rtol=1e-8, atol=1e-11) for rank in ranks)
        assert is_right or any(rank["warned"] for rank in ranks), parts
        is_right = all(rank["eval_loss"] == pytest.approx(loss.item(), rel=1e-8) for rank in ranks)
        assert is_right or any(rank["eval_warned"] for rank in ranks), parts
