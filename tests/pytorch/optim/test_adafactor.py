"""Adafactor against the reference, its state, and its schedule."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from paceline.pytorch.optim.adafactor import Adafactor
from paceline.pytorch.optim.schedulers import get_adafactor_schedule, get_scheduler

EXTERNAL = {"lr": 1e-2, "relative_step": False, "scale_parameter": False}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (7,), (3, 4, 2), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, parameters, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        EXTERNAL,
        {**EXTERNAL, "beta1": 0.9, "weight_decay": 0.1, "clip_threshold": 0.5},
        {"scale_parameter": True, "relative_step": True, "warmup_init": True},
        {"scale_parameter": True, "relative_step": True},
        {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "weight_decay": 0.01},
    ],
)
def test_equals_the_reference_and_states_go_both_ways(options, dtype):
    reference = pytest.importorskip("transformers.optimization")
    ours, theirs = weights(dtype), weights(dtype)
    mine, other = Adafactor(ours, **options), reference.Adafactor(theirs, **options)
    for half in range(2):
        train(mine, ours, 10, seed=half)
        train(other, theirs, 10, seed=half)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype != torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-2}
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        saved, other_saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(other.state_dict())
        mine, other = Adafactor(ours, **options), reference.Adafactor(theirs, **options)
        mine.load_state_dict(other_saved)
        other.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact(dtype):
    through, stopped = weights(dtype), weights(dtype)
    train(Adafactor(through, **EXTERNAL), through, 8)
    first = Adafactor(stopped, **EXTERNAL)
    generator = torch.Generator().manual_seed(1)
    for index in range(8):
        if index == 4:
            buffer = io.BytesIO()
            torch.save(first.state_dict(), buffer)
            first = Adafactor(stopped, **EXTERNAL)
            first.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
        for parameter in stopped:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        first.step()
    assert all(torch.equal(a, b) for a, b in zip(through, stopped, strict=True))


def test_keeps_rows_and_columns_only():
    parameter = torch.nn.Parameter(torch.zeros(50, 40))
    optimizer = Adafactor([parameter], **EXTERNAL)
    train(optimizer, [parameter], 1)
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) == 90


def test_closure_runs_with_gradients():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = Adafactor([parameter], **EXTERNAL)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0
    assert parameter.detach().max() < 1.0


@pytest.mark.parametrize(
    "options", [{"lr": 1e-3}, {"relative_step": False}, {"lr": 1e-3, "relative_step": False, "warmup_init": True}]
)
def test_options_that_contradict_each_other(options):
    with pytest.raises(ValueError, match="relative_step"):
        Adafactor(weights(), **options)


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = Adafactor(embedding.parameters(), **EXTERNAL)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_the_schedule_shows_the_rates_that_the_optimizer_sets():
    reference = pytest.importorskip("transformers.optimization")
    ours, theirs = weights(), weights()
    mine, other = Adafactor(ours, warmup_init=True), reference.Adafactor(theirs, warmup_init=True)
    schedule, expected = get_adafactor_schedule(mine, 0.5), reference.get_adafactor_schedule(other, 0.5)
    assert schedule.get_last_lr() == expected.get_last_lr() == [0.5]
    for step in range(4):
        train(mine, ours, 1, seed=step)
        train(other, theirs, 1, seed=step)
        schedule.step()
        expected.step()
        assert schedule.get_last_lr() == pytest.approx([float(rate) for rate in expected.get_last_lr()])
    again = get_adafactor_schedule(mine)
    again.load_state_dict(schedule.state_dict())
    assert (again.last_epoch, again.base_lrs) == (4, [0.5])
    with pytest.raises(TypeError, match="Adafactor"):
        get_adafactor_schedule(torch.optim.SGD(ours, lr=0.1))


def test_another_schedule_cannot_scale_rates_that_the_optimizer_sets():
    with pytest.raises(ValueError, match=r"lr=None.*AdafactorSchedule\(optimizer\)"):
        get_scheduler("linear", Adafactor(weights(), lr=None), num_warmup_steps=0, num_training_steps=4)
