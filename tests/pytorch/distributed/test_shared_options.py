"""Options on two processes, each against the same training on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import shared_options
import torch

pytestmark = pytest.mark.slow
ROUNDED = {
    "fp16 exchange": 1e-2, "bf16 exchange": 1e-2, "late exchange in bf16": 1e-2, "bf16": 1e-3, "fp16": 1e-3,
    "shards in bf16": 1e-3, "shards in fp16": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("options")
    processes.run("shared_options.py", 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", shared_options.OPTIONS)
def test_an_option_gives_the_numbers_of_one_process(tmp_path: Path, results: list[dict[str, Any]], name: str) -> None:
    one, tolerance = shared_options.run(tmp_path, 1, name), ROUNDED.get(name, 1e-4)
    for found in (result[name] for result in results):
        torch.testing.assert_close(found["weights"], one["weights"], rtol=tolerance, atol=tolerance)
        assert found["loss"] == pytest.approx(one["loss"], rel=tolerance)
        assert found["evaluation"] == pytest.approx(one["evaluation"], rel=tolerance)
        assert found["evaluation"] == results[0][name]["evaluation"]
