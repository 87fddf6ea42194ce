"""`log_flops`: counted operations, FLOP/s and MFU; the numbers of the training stay."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, classification, make_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from paceline import TrainerCallback
from paceline.args.errors import UnsupportedOption
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from paceline.pytorch.model.linear_head import Head
from paceline.pytorch.step_parts import flops
from paceline.pytorch.step_parts.flops import FlopMeter, OperationCounter, check_countable, peak_of, precision_of


class OneLayer(nn.Module):
    """A matrix of 16 x 4, of which the operations are known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def step(model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs)["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 16), "labels": torch.zeros(size, dtype=torch.long)}


def test_each_shape_is_counted_once_forward_and_backward() -> None:
    meter = FlopMeter(step, lambda inputs: 0, peak=1e6)
    model = OneLayer()
    forward = (
        2 * 8 * 16 * 4
    )  # a multiplication and an addition; as many for the weights' gradient, none for the input's
    meter.training_step(model, batch(8))
    assert meter.operations == 2 * forward
    meter.training_step(model, batch(8))
    meter.training_step(model, batch(4))
    assert meter.operations == 5 * forward
    row = meter.row({"time/data": 0.5, "time/forward": 0.5, "time/evaluate": 100.0, "time/setup": 100.0})
    assert row == {"model_flops_per_second": 5 * forward / 1.0, "mfu": round(5 * forward / 1e6, 4)}
    assert meter.row({"time/forward": 1.0}) == {}, "nothing since"
    assert "of the peak of the device (MFU)" in meter.describe()


def test_a_layer_that_is_thawed_is_counted_anew() -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), OneLayer())
    model.forward = lambda x, labels: model[1](model[0](x)[:, :16], labels)  # type: ignore[method-assign]
    model[0].requires_grad_(False)
    meter = FlopMeter(step, lambda inputs: 0, peak=None, parameters=lambda: list(model.parameters()))
    counts = []
    for is_trained in (False, False, True, False):
        model[0].requires_grad_(is_trained)
        before = meter.operations
        meter.training_step(model, batch(8))
        counts.append(meter.operations - before)
    first, second = 2 * 8 * 16 * 32, 2 * 8 * 16 * 4  # of the forward passes
    assert counts == [first + 2 * second, first + 2 * second, 2 * first + 3 * second, first + 2 * second]


@dataclass
class Named:
    x: torch.Tensor
    labels: torch.Tensor


def test_batches_of_any_kind_have_shapes() -> None:
    sizes = [flops.shapes_of(Named(torch.ones(size, 3), torch.ones(size))) for size in (2, 4)]
    assert sizes[0] != sizes[1] != flops.shapes_of(Named(torch.ones(4, 5), torch.ones(4)))
    assert flops.shapes_of({"x": np.ones((2, 3))}) != flops.shapes_of({"x": np.ones((4, 3))})


def test_counting_changes_no_bit_and_counts_what_torch_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 4))  # torch's mode splits the gradient of SiLU
    x = torch.randn(32, 16)
    gradients = []
    for counter in (nullcontext(), counted := OperationCounter(), torchs := FlopCounterMode(display=False)):
        model.zero_grad()
        with counter:
            model(x).logsumexp(1).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[1], strict=True))
    assert counted.operations == torchs.get_total_flops() > 0


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted(is_reentrant: bool) -> None:
    """The operations of the model: otherwise checkpointing would raise the MFU, and slow the run."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(8, 16, requires_grad=True)
    counts = []
    for checkpoints in (False, True):
        with OperationCounter() as counter:
            outputs = checkpoint(model, x, use_reentrant=is_reentrant) if checkpoints else model(x)
            outputs.square().sum().backward()
        counts.append(counter.operations)
    assert counts == [3 * 2 * 8 * (16 * 32 + 32 * 4)] * 2


def test_a_gradient_that_is_differentiated_again_is_counted() -> None:
    layer, x = nn.Linear(16, 4, bias=False), torch.randn(8, 16, requires_grad=True)
    with OperationCounter() as counter:
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    product = 2 * 8 * 16 * 4
    assert counter.operations == 6 * product, "two forward, of which each has two gradients"


def test_a_loss_by_chunks_has_the_operations_of_its_logits() -> None:
    rows, weight = torch.randn(64, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    targets = torch.randint(0, 31, (64,))
    with OperationCounter() as logits:
        nn.functional.cross_entropy(rows @ weight.T, targets).backward()
    with OperationCounter() as chunks:
        linear_cross_entropy(rows, targets, Head(weight, None, None), CrossEntropy(), chunk_rows=16).backward()
    assert chunks.operations == logits.operations == 3 * 2 * 64 * 16 * 31


def test_a_compiled_model_is_estimated_and_one_without_an_estimate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    meter = FlopMeter(step, lambda inputs: 1000, peak=None, is_compiled=True)
    meter.training_step(OneLayer(), batch(8))
    assert meter.operations == 1000
    assert meter.row({"time/forward": 0.5}) == {"model_flops_per_second": 2000.0}
    unknown = FlopMeter(step, lambda inputs: 0, peak=None, is_compiled=True)
    unknown.training_step(OneLayer(), batch(8))
    unknown.training_step(OneLayer(), batch(4))
    assert caplog.text.count("override floating_point_ops") == 1
    assert unknown.describe() == ""


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", False, 756e12),
        ("NVIDIA H200", "fp16", False, 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312e12),
        ("NVIDIA A100-SXM4-80GB", "full", True, 156e12),
        ("NVIDIA A100-SXM4-80GB", "full", False, 19.5e12),
        ("NVIDIA L40S", "bf16", False, 362e12),
        ("NVIDIA L4", "bf16", False, 121e12),
        ("NVIDIA A10G", "bf16", False, 70e12),
        ("Tesla T4", "full", True, 8.1e12),
        ("Tesla T4", "fp16", False, 65e12),
        ("Tesla T4", "bf16", False, None),
        ("NVIDIA A1000 Laptop", "bf16", False, None),
        ("A device of another maker", "bf16", False, None),
        ("NVIDIA GH200 480GB", "bf16", False, 989.4e12),
        ("NVIDIA GB200", "bf16", False, None),
        ("NVIDIA H200 NVL", "bf16", False, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", False, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", False, None),
    ],
)
def test_peaks_by_name_and_dtype(name: str, precision: str, tf32: bool, peak: float | None) -> None:
    assert peak_of(name, precision, tf32) == (None if peak is None else pytest.approx(peak))


@pytest.mark.parametrize(
    ("precision", "shards", "dtype", "expected"),
    [
        ("bf16", None, torch.float32, "bf16"),
        ("apex-O1", None, torch.float32, "fp16"),
        ("full", None, torch.bfloat16, "bf16"),
        ("full", "param_dtype float16", torch.float32, "fp16"),
        ("full", None, torch.float32, "full"),
    ],
)
def test_the_precision_of_the_products(precision: str, shards: str | None, dtype: torch.dtype, expected: str) -> None:
    assert precision_of(precision, shards, OneLayer().to(dtype)) == expected


def test_what_cannot_be_counted_is_refused() -> None:
    check_countable(False, False)
    with pytest.raises(UnsupportedOption, match=r"log_flops=True is not supported with a pipeline.*leave it out"):
        check_countable(True, False)
    with pytest.raises(UnsupportedOption, match="an XLA device"):
        check_countable(False, True)


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


def test_a_run_logs_its_rate_and_its_numbers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    meters: list[FlopMeter] = []
    monkeypatch.setattr(flops, "FlopMeter", lambda *args, **kw: meters.append(FlopMeter(*args, **kw)) or meters[-1])
    for log_flops in (False, True):
        rows = Rows()
        options: dict[str, Any] = {"max_steps": 6, "logging_steps": 3, "log_flops": log_flops, "callbacks": [rows]}
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path, Classifier(), classification(64), gradient_accumulation_steps=2, **options)
        losses.append(trainer.train().training_loss)
        told = [row for row in rows.rows if "model_flops_per_second" in row]
        assert len(told) == (2 if log_flops else 0)
        assert not any("mfu" in row for row in told), "a CPU has no peak here"
        assert all(row["model_flops_per_second"] > 0 for row in told)
    assert losses[0] == losses[1]
    forward = 2 * 4 * (8 * 16 + 16 * 4)
    gradients = forward + 2 * 4 * 16 * 4  # of the weights, and of the input of the second layer
    assert meters[0].operations == 12 * (forward + gradients), "without the passes that probe the loss"
