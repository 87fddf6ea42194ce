"""The numbers of a run do not depend on how many processes make it: weights, losses, norms, evaluations, predictions.

One start of real processes (gloo) goes through all scenarios of `tests/support/shared_job.py`; each is compared with
the same global batch on one process. With PACELINE_WRITE_DOCS=1 the nightly test writes its tables of
docs/invariance.md; `test_mesh.py` writes those of models with attention, and `test_xla.py` those of XLA devices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import processes
import pytest
import shared_job
import torch
import xla_job
from invariance import Matrix, check_complete, check_same

from paceline.args.errors import UnsupportedOption
from paceline.args.sharding import read_sharding

Found = dict[str, Any]
HEADING = "Sequential models"
COLUMNS = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp+offload", 2), ("hsdp", 4)]
COLUMNS += [("tp", 2), ("tp+fsdp", 4)]
COLUMNS += [("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 2), ("1f1b+ddp", 4)]
COLUMNS += [("zero2", 2), ("zero3", 2)]
OFTEN = ("ddp", "fsdp", "tp", "1f1b", "zero3")  # one of each kind


def results_of(folder: Path, size: int, *engines: str) -> dict[str, list[dict[str, Found]]]:
    """Returns the results of each process, by engine and scenario."""
    processes.finish(processes.start("shared_job.py", size, str(folder), *engines), timeout=800)
    ranks = range(size)
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in ranks] for name in engines}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Found]]]:
    return results_of(tmp_path_factory.mktemp("two"), 2, *OFTEN)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", shared_job.SCENARIOS)
def test_two_processes(tmp_path: Path, of_two: dict[str, list[dict[str, Found]]], name: str) -> None:
    one = shared_job.SCENARIOS[name](tmp_path, 1)
    for several in of_two.values():
        check_same([found[name] for found in several], one)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # DeepSpeed compiles a part of itself when it is used for the first time
def test_every_engine_and_the_tables_of_the_docs(tmp_path: Path) -> None:
    by_size: dict[int, list[str]] = {}
    for engine, size in COLUMNS:
        by_size.setdefault(size, []).append(engine)
    found = {size: results_of(tmp_path / str(size), size, *engines) for size, engines in by_size.items()}
    matrix = Matrix(HEADING, COLUMNS)
    for name, run in shared_job.SCENARIOS.items():
        one = run(tmp_path / "one", 1)
        if name == "twenty_updates":
            check_complete(one)
        matrix.add(name, [[each[name] for each in found[size][engine]] for engine, size in COLUMNS], one)
    if os.environ.get("PACELINE_WRITE_DOCS"):
        matrix.write()


def test_the_page_has_every_scenario_and_engine() -> None:
    Matrix(HEADING, COLUMNS).check_page(shared_job.SCENARIOS)
    runs = xla_job.SCENARIOS.items()
    blanks = [(name, n) for name, on in runs for n, layout in enumerate(xla_job.COLUMNS) if layout not in on]
    Matrix(xla_job.HEADING, xla_job.COLUMNS.values(), xla_job.LIMITS).check_page(xla_job.SCENARIOS, blanks)


def test_what_is_wrong_with_a_sharding_is_said() -> None:
    with pytest.raises(ValueError, match="'half_shard' is unknown"):
        read_sharding("half_shard", None)
    with pytest.raises(UnsupportedOption, match="fsdp='no_shard' is not supported: set parallel='ddp'"):
        read_sharding("no_shard", None)
    with pytest.raises(ValueError, match="no setting 'wrap'"):
        read_sharding(True, {"wrap": 1})
    with pytest.raises(ValueError, match="keep one"):
        read_sharding(True, {"transformer_layer_cls_to_wrap": ["A"], "min_num_params": 3})
    with pytest.raises(ValueError, match="use_orig_params"):
        read_sharding(True, {"use_orig_params": False})
    assert read_sharding("full_shard auto_wrap offload", {"fsdp_min_num_params": 7}).least_parameters == 7
    assert not read_sharding("shard_grad_op", None).reshard
