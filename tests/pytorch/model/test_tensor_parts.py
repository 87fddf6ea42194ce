"""The functions that all strategies with sharded tensors share, and the assembly of a model's state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.pytorch.distributed.precision import Precision
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.tensor_parts import differing_names, local_part, map_tensors, whole


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def get_extra_state(self) -> str:
        return "told"


class Doubled(SingleDevice):
    """Gives each tensor times two, and notes which it was asked for."""

    asked: list[str]

    def whole_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.asked.append(name)
        return value.detach() * 2


@pytest.fixture
def alone() -> World:
    return World(torch.device("cpu"))


def test_a_strategy_is_asked_once_for_each_tensor(alone: World) -> None:
    model, strategy = Tied(), Doubled(alone, Precision(alone.device))
    strategy.asked = []
    weights = strategy.full_weights(model)
    assert list(weights) == list(model.state_dict())
    assert strategy.asked == [name for name in weights if name not in ("second.weight", "_extra_state")]
    assert weights["second.weight"] is weights["first.weight"]
    assert torch.equal(weights["first.weight"], model.first.weight.detach() * 2)
    assert weights["_extra_state"] == "told"


def test_one_device_gives_the_state_as_it_is(alone: World) -> None:
    model = Tied()
    weights, expected = SingleDevice(alone, Precision(alone.device)).full_weights(model), model.state_dict()
    assert type(weights) is type(expected)
    assert vars(weights) == vars(expected)  # the versions that modules load by
    assert not any(value.requires_grad for value in weights.values() if isinstance(value, torch.Tensor))
    assert weights["first.weight"].data_ptr() == model.first.weight.data_ptr()


def test_names_that_differ() -> None:
    own = Tied().state_dict(keep_vars=True)
    given = [name for name in own if name not in ("second.weight", "norm.bias")]
    assert differing_names(own, [*given, "other"]) == (["norm.bias"], ["other"])


def test_tensors_that_are_whole() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert whole(parameter) is parameter
    assert whole("text") == "text"
    assert not local_part(parameter).requires_grad
    nest = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert map_tensors(lambda tensor: tensor + 1, nest) == {"a": [torch.full((1,), 2.0), 2], "b": (torch.ones(1),)}
