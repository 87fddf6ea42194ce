"""Losses by chunks of a head whose classes are split over processes: the numbers of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import vocabulary_job

from paceline.pytorch.model.linear_loss_check import CHECKED_ROWS


def check(case: str, plain: dict[str, Any], chunked: dict[str, Any]) -> None:
    rounding = 1e-2 if case == "autocast" else 1e-5
    assert chunked["losses"] == pytest.approx(plain["losses"], rel=rounding), case
    assert chunked["eval_loss"] == pytest.approx(plain["eval_loss"], rel=rounding), case
    assert chunked["rows"] == [pytest.approx(row, rel=rounding) for row in plain["rows"]], case
    assert (chunked["weights"] - plain["weights"]).norm() <= rounding * plain["weights"].norm(), case


def check_by_default(found: dict[str, list[dict[str, Any]]], rank: int) -> None:
    for case, (plain, chunked) in found.items():
        check(case, plain, chunked)
        takes_logits = case.startswith("one process")
        assert (chunked["by_chunks"] is True) is not takes_logits or rank > 1, case
        assert plain["num_logits"] > CHECKED_ROWS, case
        assert takes_logits or chunked["num_logits"] <= CHECKED_ROWS, case
        if case.startswith("one process") and rank == 1:
            assert chunked["seen"] == pytest.approx(plain["seen"], rel=1e-5), case
            assert chunked["seen"] or chunked["kept"] is not None, case
        if chunked["kept"] is not None:
            torch.testing.assert_close(chunked["kept"], plain["kept"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_logits(tmp_path: Path) -> None:
    processes.run("vocabulary_job.py", 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    alone = vocabulary_job.train(tmp_path, vocabulary_job.CASES["terms"], False, parallel=None)
    for found in ranks:
        assert found["cases"]["terms"][1]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["cases"]["terms"][1]["rows"] == [pytest.approx(row, rel=1e-5) for row in alone["rows"]]
        for case, (plain, chunked) in found["cases"].items():
            assert chunked["by_chunks"] is True, case
            assert chunked["losses"] == ranks[0]["cases"][case][1]["losses"], case
            check(case, plain, chunked)
        assert {"perplexity", "z_loss", "eval_perplexity"} <= {
            name for row in found["cases"]["terms"][1]["rows"] for name in row
        }
        read = found["read"]
        assert (read["is_lazy False"], read["is_lazy True"]) == (False, True)
        for name in ("logits", "gradient"):
            torch.testing.assert_close(read[f"{name} True"], read[f"{name} False"], rtol=1e-4, atol=1e-5)
    for rank, found in enumerate(ranks):
        check_by_default(found["auto"], rank)


@pytest.mark.slow
def test_with_shards_the_numbers_are_those_of_the_logits(tmp_path: Path) -> None:
    processes.run("vocabulary_job.py", 4, str(tmp_path))
    for rank in range(4):
        check_by_default(torch.load(tmp_path / f"{rank}.pt", weights_only=True)["auto"], rank)
