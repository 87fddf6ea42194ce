"""NVIDIA's Apex, by a stand-in that behaves as its documentation says: Apex itself needs CUDA and is built by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import classification, losses, make_trainer, weights
from torch import nn
from torch.nn import functional

from paceline import TrainerCallback, TrainingArguments

AMP = """
import contextlib, types
import torch
calls = []
state = {"loss_scale": 1024.0, "unskipped": 0}
overflow_at = []
steps = [0]

def initialize(model, optimizer, opt_level="O1", verbosity=1):
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("initialize was called twice for this optimizer")
    calls.append(("initialize", opt_level, verbosity))
    optimizer._amp_stash = True
    if opt_level == "O2":
        optimizer._pairs = []
        for group in optimizer.param_groups:
            masters = []
            for parameter in group["params"]:
                master = torch.nn.Parameter(parameter.detach().clone().float())
                optimizer._pairs.append((parameter, master))
                masters.append(master)
            group["params"] = masters
        plain = optimizer.step
        def step(closure=None):
            plain()
            for parameter, master in optimizer._pairs:
                parameter.data.copy_(master.data)
        optimizer.step = step
    return model, optimizer

@contextlib.contextmanager
def scale_loss(loss, optimizer):
    scale = state["loss_scale"]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stashed = [parameter.grad for parameter in own]
    for parameter in own:
        parameter.grad = None
    yield loss * scale
    for parameter, master in getattr(optimizer, "_pairs", []):
        master.grad = parameter.grad.float()
    steps[0] += 1
    if steps[0] in overflow_at:
        state["loss_scale"] /= 2
        usual = optimizer.step
        def skip(closure=None):
            optimizer.step = usual
        optimizer.step = skip
    for parameter, before in zip(own, stashed):
        if parameter.grad is not None:
            parameter.grad.div_(scale)
            if before is not None:
                parameter.grad.add_(before)
    state["unskipped"] += 1

def state_dict():
    return {"loss_scaler0": dict(state)}

def load_state_dict(saved):
    state.update(saved["loss_scaler0"])
"""
NORMS = """
import torch
class FusedLayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
class FusedRMSNorm(torch.nn.RMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
"""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.RMSNorm(16)
        self.odd = nn.LayerNorm(16, bias=False)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(torch.tanh(self.odd(self.scale(self.norm(self.first(x))))))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def forget_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [key for key in sys.modules if key.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, module)


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of Apex; gives its module amp."""
    folder = tmp_path / "packages"
    (folder / "apex").mkdir(parents=True)
    (folder / "apex" / "__init__.py").touch()
    (folder / "apex" / "amp.py").write_text(AMP)
    (folder / "apex" / "normalization.py").write_text(NORMS)
    forget_apex(monkeypatch)
    monkeypatch.syspath_prepend(str(folder))
    import apex.amp

    yield apex.amp
    forget_apex(monkeypatch)


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 3


class SeesNorms(TrainerCallback):
    kinds: tuple[str, ...] = ()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kinds = tuple(type(part).__name__ for part in (model.norm, model.scale, model.odd))


def go(folder: Path, resume: bool = False, **options: Any) -> Any:
    apex = {"fp16": True, "half_precision_backend": "apex"}
    trainer = make_trainer(folder, Normed(), classification(24), **{**apex, "learning_rate": 0.01, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plain(folder: Path, **options: Any) -> Any:
    return go(folder, fp16=False, half_precision_backend="auto", **options)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_loss_is_scaled_and_the_gradients_are_not(tmp_path: Path, apex: Any, level: str) -> None:
    seen = SeesNorms()
    trainer = go(tmp_path / "ours", fp16_opt_level=level, callbacks=[seen])
    assert apex.calls == [("initialize", level, 0)]
    assert apex.state["unskipped"] == 6
    expected = plain(tmp_path / "plain")
    assert torch.allclose(weights(trainer.model), weights(expected.model), atol=1e-6)
    norms = [row["grad_norm"] for row in expected.state.log_history[:-1]]
    assert [row["grad_norm"] for row in trainer.state.log_history[:-1]] == pytest.approx(norms)
    assert seen.kinds == ("FusedLayerNorm", "FusedRMSNorm", "LayerNorm")  # Apex has none without a bias
    assert type(trainer.model.norm) is nn.LayerNorm
    assert type(trainer.model.scale) is nn.RMSNorm


def test_accumulation(tmp_path: Path, apex: Any) -> None:
    trainer = go(tmp_path / "ours", gradient_accumulation_steps=2)
    expected = plain(tmp_path / "plain", gradient_accumulation_steps=2)
    assert apex.state["unskipped"] == 6
    assert torch.allclose(weights(trainer.model), weights(expected.model), atol=1e-6)


def test_an_update_that_overflowed_is_left_out_and_the_schedule_waits(tmp_path: Path, apex: Any) -> None:
    apex.overflow_at.append(2)
    trainer = go(tmp_path)
    assert apex.state["loss_scale"] == 512
    rates = [row["learning_rate"] for row in trainer.state.log_history[:-1]]
    assert rates[1] == rates[2]
    assert len(set(rates)) == 5


def test_the_scale_is_saved_and_resumed(tmp_path: Path, apex: Any) -> None:
    whole = go(tmp_path / "whole")
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    go(tmp_path / "parts", callbacks=[StopAt()], **options)
    saved = dict(apex.state)
    apex.state.update(loss_scale=1.0, unskipped=0)
    parts = go(tmp_path / "parts", resume=True, **options)
    assert apex.state["loss_scale"] == saved["loss_scale"]
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)


def test_without_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_apex(monkeypatch)
    words = r"half_precision_backend='apex': apex\.amp of NVIDIA's Apex is required.*leave the option out"
    with pytest.raises(ImportError, match=words):
        go(tmp_path)


def test_options_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="half_precision_backend='apex' requires fp16=True"):
        TrainingArguments("x", half_precision_backend="apex")
    with pytest.raises(ValueError, match="fp16_opt_level='O2' is a level of NVIDIA's Apex"):
        TrainingArguments("x", fp16=True, fp16_opt_level="O2")
    with pytest.raises(ValueError, match="fp16_opt_level"):
        TrainingArguments("x", fp16=True, half_precision_backend="apex", fp16_opt_level="O4")
    assert TrainingArguments("x", fp16=True, fp16_backend="apex").half_precision_backend == "apex"
    assert TrainingArguments("x", fp16_backend="cpu_amp").half_precision_backend == "auto"
