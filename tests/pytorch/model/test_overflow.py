"""`DebugUnderflowOverflow`: what it reports, beside the installed transformers, and how often it reads the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import DebugUnderflowOverflow


class Growing(nn.Module):
    """Multiplies its input by `factor` in each of its layers."""

    def __init__(self, factor: float, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(depth))
        for layer in self.layers:
            nn.init.eye_(layer.weight)
            layer.weight.data *= factor

    def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


def test_the_report_leads_to_the_first_module() -> None:
    model = Growing(1e20)
    DebugUnderflowOverflow(model, max_frames_to_save=2)
    with pytest.raises(ValueError, match=r"inf or NaN in output of layers\.1 Linear, in batch 0") as caught:
        model(torch.ones(1, 2))
    assert str(caught.value).splitlines()[1:] == [
        "abs min  abs max  metadata",
        "                  layers.0 Linear",
        "0.00e+00 1.00e+20 weight",
        "1.00e+00 1.00e+00 input[0]",
        "1.00e+20 1.00e+20 output",
        "                  layers.1 Linear",
        "0.00e+00 1.00e+20 weight",
        "1.00e+20 1.00e+20 input[0]",
        "     inf      inf output",
    ]


def test_frames_as_the_reference_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    debug_utils = pytest.importorskip("transformers.debug_utils")
    texts = []
    for kind in (DebugUnderflowOverflow, debug_utils.DebugUnderflowOverflow):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        kind(model, trace_batch_nums=[1])
        for _ in range(3):
            model(torch.randn(5, 3))
        lines = capsys.readouterr().out.splitlines()
        texts.append([line.split() for line in lines if line.strip() and "atch" not in line])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 1 + 5 + 3 + 5 + 3


def test_batches_go_on_and_the_run_can_be_ended() -> None:
    model = Growing(1.0)
    watch = DebugUnderflowOverflow(model, abort_after_batch_num=1)
    model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="abort_after_batch_num=1"):
        model(torch.ones(1, 2))
    assert watch.batch_number == 2
    watch.remove()
    model(torch.full((1, 2), math.nan))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_weights_and_inputs_count_too(value: float) -> None:
    model = Growing(1.0)
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match=r"in input\[0\], output of layers\.0"):
        model(torch.tensor([[value, 1.0]]))
    model.layers[3].weight.data[0, 0] = value  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"in weight, output of layers\.3"):
        model(torch.ones(1, 2))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scores()

    def forward(self, mask: Tensor) -> Tensor:
        result: Tensor = self.inner(mask)
        return result


class Scores(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return mask.softmax(-1)


def test_a_mask_of_minus_infinities_is_no_overflow() -> None:
    model = Masked()
    DebugUnderflowOverflow(model)
    assert model(torch.tensor([0.0, -math.inf])).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"in input\[0\]"):
        model(torch.tensor([0.0, math.inf]))


class Odd(nn.Module):
    """Outputs of all kinds."""

    def forward(self, x: Tensor) -> Any:
        complex_ = torch.complex(x, x)
        return {"ids": x.int(), "kept": (x > 0, None, "text"), "none": x[:0], "complex": complex_, "half": x.half()}


def test_outputs_of_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    model = Odd()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(torch.ones(2))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1.00e+00", "1.00e+00", "output[ids]"] in lines
    assert ["1.41e+00", "1.41e+00", "output[complex]"] in lines
    assert ["None", "output[kept][1]"] in lines
    assert ["empty", "output[none]"] in lines


class Recomputed(Growing):
    def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return {"x": x}


def test_activation_checkpointing() -> None:
    model = Recomputed(1.0)
    watch = DebugUnderflowOverflow(model)
    for _ in range(2):
        model(torch.ones(1, 2))["x"].sum().backward()
    assert (watch.batch_number, watch._depth) == (2, 0)


def test_part_of_a_model_and_a_forward_that_raises() -> None:
    model = Growing(1e20)
    watch = DebugUnderflowOverflow(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    model.layers[0](torch.ones(1, 2))  # without the model around it
    with pytest.raises(ValueError, match=r"layers\.1"):
        model.layers[1](torch.full((1, 2), 1e20))
    assert watch._depth == 0


def test_one_read_of_the_device_for_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: reads.append(1) or original(self))
    model = Growing(1.0, depth=50)
    DebugUnderflowOverflow(model)
    for _ in range(3):
        model(torch.ones(1, 2))
    assert len(reads) == 3
