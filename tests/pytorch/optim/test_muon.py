"""Muon and AdamW as one optimizer: equal to torch's two, through schedulers, checkpoints and copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from paceline.pytorch.optim.groups import parameter_groups
from paceline.pytorch.optim.muon import MuonWithAdamW
from paceline.pytorch.optim.schedulers import get_scheduler

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))


def make_optimizer(model, **options):
    return MuonWithAdamW(parameter_groups(model, 0.1, "muon"), lr=1e-2, **options)


def train(model, num_steps, *optimizers, schedulers=(), start=0):
    for index in range(start, start + num_steps):
        inputs = torch.arange(5).add(index).remainder(7)
        model(inputs).square().mean().backward()
        for part in (*optimizers, *schedulers):
            part.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def assert_equal(a, b):
    for mine, other in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_equals_torch_muon_and_adamw_side_by_side():
    model = make_model()
    expected = copy.deepcopy(model)
    hidden, decayed, rest = parameter_groups(expected, 0.1, "muon")
    muon = torch.optim.Muon(hidden["params"], lr=1e-2, weight_decay=0.1, eps=1e-8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([decayed, rest], lr=1e-2)
    train(model, 5, make_optimizer(model))
    train(expected, 5, muon, adamw)
    assert_equal(model, expected)


def test_a_scheduler_reaches_both():
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = get_scheduler("linear", optimizer, 0, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, 3, optimizer, schedulers=[scheduler])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-3] * 3)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scheduler.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, 1, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [None, True])
def test_resume_is_exact(fused):
    through = make_model()
    stopped = copy.deepcopy(through)
    train(through, 8, make_optimizer(through, fused=fused))
    optimizer = make_optimizer(stopped, fused=fused)
    train(stopped, 4, optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    optimizer = make_optimizer(stopped, fused=fused)
    optimizer.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    train(stopped, 4, optimizer, start=4)
    assert_equal(through, stopped)


def test_copies_and_pickles_go_on():
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, 2, optimizer)
    other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, 2, optimizer, start=2)
    train(other_model, 2, other, start=2)
    assert_equal(model, other_model)


def test_groups_can_be_added():
    model = make_model()
    optimizer = make_optimizer(model)
    late = nn.Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": [late], "use_muon": True})
    late.grad = torch.ones(3, 3)
    optimizer.step()
    assert late.detach().max() < 1.0
    assert "momentum_buffer" in optimizer.state[late]


def test_closure_and_refusal_of_vectors():
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = MuonWithAdamW([{"params": [parameter], "use_muon": True}], lr=1e-2)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])
