"""Checkpoints that accelerate writes under FSDP: read, gone on from, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file
from small_models import Tagger, make_trainer, tagging

from paceline.cli.main import main
from paceline.core.optional import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("accelerate"), reason="needs accelerate"),
]
KINDS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    processes.run("accelerate_fsdp_job.py", 2, str(folder))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_optimizer_are_those_of_before(folder: Path, tmp_path: Path, kind: str) -> None:
    from accelerate_fsdp_job import make_optimizer, step

    model: Any = Tagger(shifted=True, seed=3)
    optimizer = make_optimizer(model)
    trainer = make_trainer(tmp_path, model, tagging(6), optimizers=(optimizer, None))
    checkpoint = str(folder / kind / "checkpoint-1")
    trainer._load_from_checkpoint(checkpoint)
    trainer._load_optimizer_and_scheduler(checkpoint)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    step(model, optimizer)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(weights, torch.load(folder / "next.pt"), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_and_is_exported(folder: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = folder / kind / "checkpoint-1"
    model = Tagger(shifted=True, seed=3)
    trainer = make_trainer(tmp_path / "run", model, tagging(24), max_steps=2, weight_decay=0.1)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2
    state = next(iter(trainer.optimizer.state.values()))
    assert float(state["step"]) == 2  # one before, one now
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    fresh = Tagger(shifted=True)
    other = make_trainer(tmp_path / "other", fresh, tagging(6))
    other._load_from_checkpoint(str(checkpoint))
    assert exported.keys() == fresh.state_dict().keys()
    for name, value in fresh.state_dict().items():
        assert torch.equal(exported[name], value)
