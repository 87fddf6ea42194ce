"""The estimated memory of a process in training, compared with its memory after an optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Classifier, classification
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.training_memory import Memory
from paceline.pytorch.distributed.memory import count_memory, total

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_an_update_leaves(name: str) -> None:
    model = Classifier()
    model.first.weight.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    told = count_memory(model, optimizer)
    assert not optimizer.state
    batch = {key: torch.stack([sample[key] for sample in classification(4)]) for key in ("x", "labels")}
    model(**batch)[0].backward()
    optimizer.step()
    schedule.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    largest = max(total([gradient]) for gradient in gradients)
    assert told == Memory(total(model.parameters()), total(gradients), total(held), largest)
    assert count_memory(model, optimizer).optimizer == told.optimizer


def test_tensors_without_data_count_alike() -> None:
    real = Classifier()
    expected = count_memory(real, torch.optim.AdamW(real.parameters()))
    with FakeTensorMode():
        fake = Classifier()
        assert count_memory(fake, torch.optim.AdamW(fake.parameters())) == expected


class Own(torch.optim.SGD):
    """Of another package, for all one can tell."""


@pytest.mark.parametrize("kind", [Own, torch.optim.Adafactor])  # the second reads values that are not there
def test_what_cannot_be_known_is_said(kind: Any) -> None:
    model = Classifier()
    told = count_memory(model, kind(model.parameters()))
    assert told.optimizer is None
    assert "known after the first optimizer step" in told.describe()
