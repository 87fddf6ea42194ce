"""Losses by chunks of a head whose classes are split over processes: the numbers of the logits."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch


@pytest.mark.slow
def test_the_numbers_are_those_of_the_logits(tmp_path: Path) -> None:
    processes.run("vocabulary_job.py", 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for found in ranks:
        for case, (plain, chunked) in found["cases"].items():
            rounding = 1e-2 if case == "autocast" else 1e-5
            assert chunked["by_chunks"] is True, case
            assert chunked["losses"] == pytest.approx(plain["losses"], rel=rounding), case
            assert chunked["losses"] == ranks[0]["cases"][case][1]["losses"], case
            assert chunked["eval_loss"] == pytest.approx(plain["eval_loss"], rel=rounding), case
            assert (chunked["weights"] - plain["weights"]).norm() <= rounding * plain["weights"].norm(), case
        plain = found["cases"]["bias"][0]
        assert found["auto"]["by_chunks"] is not True
        assert found["auto"]["losses"] == plain["losses"]
        read = found["read"]
        assert (read["is_lazy False"], read["is_lazy True"]) == (False, True)
        for name in ("logits", "gradient"):
            torch.testing.assert_close(read[f"{name} True"], read[f"{name} False"], rtol=1e-4, atol=1e-5)
        assert "linear_cross_entropy=True is not possible: the classes are split over processes" in read["refused"]
