"""Token metrics and the z-loss of processes that share sequences: those of one process."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import terms_job
import torch
from invariance import check_same

from paceline.args.mesh import Mesh


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "meshes"),
    [(2, ["cp=2", "sp=2"]), pytest.param(4, ["dp_shard=2,cp=2", "sp=2,tp=2"], marks=pytest.mark.nightly)],
)
def test_sequences_in_parts_have_the_metrics_of_whole_ones(tmp_path: Path, size: int, meshes: list[str]) -> None:
    processes.run("terms_job.py", size, str(tmp_path), *meshes)
    found = {said: [torch.load(tmp_path / f"{said}-{rank}.pt") for rank in range(size)] for said in meshes}
    for name in terms_job.MODELS:
        one = terms_job.run(tmp_path / "one", name, Mesh())
        assert len(one["rows"]) > 1
        for ranks in found.values():
            check_same([each[name] for each in ranks], one)
            for each in ranks:
                assert each[name]["rows"] == [pytest.approx(row, rel=1e-5) for row in one["rows"]], name
                assert each[name]["evaluated"] == [pytest.approx(row, rel=1e-5) for row in one["evaluated"]], name
