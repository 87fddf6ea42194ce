"""Tensors that are one, turned, spread, or parts of one: their values, and which are one, come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights
from torch import Tensor, nn

from paceline import TrainerCallback
from paceline.pytorch.checkpoint.background import HostBuffers, HostCopy
from paceline.pytorch.checkpoint.tensors import load_tensors, save_tensors


def save_now(state: Any, path: Path) -> None:
    save_tensors(state, path)


def save_later(state: Any, path: Path) -> None:
    """Behind the training: what changes meanwhile is not in it."""
    copy = HostCopy(HostBuffers())
    copy.add_tensors(state, path)
    copy.buffers.finish()
    for tensor in {id(value): value for value in state.values() if isinstance(value, Tensor)}.values():
        if tensor.is_contiguous():
            tensor.add_(1)
    copy.write()


@pytest.mark.parametrize("save", [save_now, save_later])
def test_forms_come_back(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "one": torch.ones(3, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "square": torch.arange(9.0).reshape(3, 3) ** 2,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "spread": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "each second": torch.arange(10.0)[::2],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.0),
    }
    state["again"] = state["one"]
    state["square turned"] = state["square"].T
    state["like it"] = state["one"].clone()
    expected = {name: value.clone() for name, value in state.items()}
    strides = {name: state[name].stride() for name in ("turned", "channels last")}
    save(state, tmp_path / "state.pt")
    loaded = load_tensors(tmp_path / "state.pt")
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert {name: loaded[name].stride() for name in strides} == strides
    assert loaded["one"].data_ptr() == loaded["again"].data_ptr()
    assert loaded["one"].data_ptr() != loaded["like it"].data_ptr()
    assert loaded["rows"].untyped_storage().nbytes() == 48  # not all of what it was cut from
    loaded["again"].zero_()
    assert not loaded["one"].any()


class Forms(Classifier):
    """Weights that are tied, turned, and parts of one tensor; buffers that are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2, 8)
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(4, 8).T)
        self.upper, self.lower = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        track = torch.zeros(2, 8)
        self.register_buffer("mean", track[0])
        self.register_buffer("count", track[1])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0))
            self.count.add_(1)
        x = x * self.upper + self.lower
        loss, logits = super().forward(x, labels)
        return loss + 0.01 * (x @ self.turned).square().mean() + 0.01 * self.tied(x).square().mean(), logits


class TwoNames(torch.optim.SGD):
    """Keeps one tensor under two names, and a turned one, as a state that is read by both names needs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                if not entry:
                    entry["now"] = entry["then"] = torch.zeros_like(parameter)
                    entry["turned"] = torch.zeros(3, 2).T
                if parameter.grad is not None:
                    entry["now"].mul_(0.9).add_(parameter.grad)
                    entry["turned"].add_(1)
                    parameter.data.add_(entry["then"], alpha=-group["lr"])


class Stop(TrainerCallback):
    reads_checkpoint = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 4


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_a_run_goes_on_to_the_bit_from_every_form(tmp_path: Path, in_background: bool, checkpoint_format: str) -> None:
    """The optimizer's two names are still one tensor, in the run that goes on too."""

    def run(folder: str, *callbacks: TrainerCallback, **how: Any) -> Any:
        model = Forms()
        trainer = make_trainer(
            tmp_path / folder,
            model,
            classification(32),
            callbacks=list(callbacks),
            optimizers=(TwoNames(model.parameters(), lr=0.05), None),
            save_strategy="steps",
            save_steps=4,
            save_in_background=in_background,
            checkpoint_format=checkpoint_format,
        )
        trainer.train(**how)
        return trainer

    whole = run("whole")
    run("parts", Stop())
    resumed = run("parts", resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 8
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert all(map(torch.equal, resumed.model.buffers(), whole.model.buffers()))
    assert resumed.model.tied.weight is resumed.model.first.weight
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert one.stride() == other.stride()
        entries = whole.optimizer.state[one], resumed.optimizer.state[other]
        assert all(torch.equal(entries[0][name], entries[1][name]) for name in entries[0])
        assert entries[1]["now"].data_ptr() == entries[1]["then"].data_ptr()
        if checkpoint_format == "full":
            assert entries[1]["turned"].stride() == entries[0]["turned"].stride()
