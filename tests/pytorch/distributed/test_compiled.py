"""torch.compile on two processes, against the same training without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from compilers import needs_compiler

ENGINES = ("ddp", "fsdp", "tp", "ddp+budget", "fsdp+budget")
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    processes.run("compile_job.py", 2, str(folder), "aot_eager", *ENGINES)
    return folder


def check(folder: Path, engine: str) -> None:
    for rank in range(2):
        found = torch.load(folder / f"{engine}-{rank}.pt", weights_only=False)
        plain, compiled = found["plain"], found["compiled"]
        assert plain["num_compilations"] == 0
        # in training and in evaluation; hooks of tensor parallel blocks are of each block
        assert compiled["num_compilations"] == 2 * (NUM_LAYERS if engine == "tp" else 1)
        torch.testing.assert_close(compiled["weights"], plain["weights"], rtol=1e-5, atol=1e-5)
        for name in ("loss", "grad_norm", "eval_loss"):
            values: Any = plain[name]
            assert values
            assert compiled[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_numbers_are_those_without_compilation(results: Path, engine: str) -> None:
    check(results, engine)


@pytest.mark.slow
@needs_compiler
@pytest.mark.nightly
def test_the_numbers_of_kernels(tmp_path: Path) -> None:
    processes.run("compile_job.py", 2, str(tmp_path), "inductor", "tp")
    check(tmp_path, "tp")
