"""Losses by chunks of a head that FSDP shards: the numbers of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch

WITH_LOGITS = ("kept", "a unit, kept")


def check(name: str, plain: dict[str, Any], found: dict[str, Any]) -> None:
    rounding = 3e-2 if "bf16" in name else 1e-5
    assert found["by_chunks"] is (name not in WITH_LOGITS), name
    assert found["losses"] == pytest.approx(plain["losses"], rel=rounding), name
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"], rel=rounding), name
    assert (found["weights"] - plain["weights"]).norm() <= rounding * plain["weights"].norm(), name
    assert found["rows"] == [pytest.approx(row, rel=rounding) for row in plain["rows"]], name


@pytest.mark.slow
def test_the_numbers_are_those_of_the_logits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    processes.run("sharded_loss_job.py", 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for found in ranks:
        for name, (plain, chunked) in found["cases"].items():
            check(name, plain, chunked)
        whole, resumed = found["resume"]["whole"], found["resume"]["resumed"]
        assert resumed["by_chunks"] is True
        assert resumed["losses"][-2:] == whole["losses"][-2:]
        assert torch.equal(resumed["weights"], whole["weights"])
        assert "after its forward, when FSDP has taken back the weights" in found["refused"]["read"]


@pytest.mark.slow
def test_replicas_of_shards_have_the_numbers_of_the_logits(tmp_path: Path) -> None:
    processes.run("sharded_loss_job.py", 4, str(tmp_path))
    plain, chunked = torch.load(tmp_path / "3.pt", weights_only=True)["hybrid"]
    check("hybrid", plain, chunked)
