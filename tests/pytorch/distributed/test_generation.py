"""Evaluations on generated text give the same rows, whatever holds the model, and wait for nobody for ever."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import generation_job
import numpy as np
import processes
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = ["ddp", "fsdp", *generation_job.MESHES, *(["zero3"] if importlib.util.find_spec("deepspeed") else [])]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("generation")
    processes.finish(processes.start("generation_job.py", 2, str(folder), *ENGINES), timeout=600)
    return {each: [torch.load(folder / f"{each}-{r}.pt", weights_only=False) for r in range(2)] for each in ENGINES}


@pytest.mark.parametrize("name", generation_job.MODELS)
def test_rows_are_those_of_one_process(tmp_path: Path, of_two: dict[str, list[Any]], name: str) -> None:
    one = generation_job.run(tmp_path, name, 1)
    assert len({tuple(row) for row in one["rows"].tolist()}) > 1
    for found in (each for engine, each in of_two.items() if name == "llama" or engine not in generation_job.MESHES):
        for process in found:
            np.testing.assert_array_equal(process[name]["rows"], one["rows"])
            np.testing.assert_array_equal(process[name]["labels"], one["labels"])
            np.testing.assert_allclose(process[name]["eval_loss"], one["eval_loss"], rtol=1e-5)
