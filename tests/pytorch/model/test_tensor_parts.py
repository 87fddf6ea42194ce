"""The functions that all strategies with sharded tensors share, and the assembly of a model's state."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import fake_pg

from paceline.pytorch.distributed.precision import Precision
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.tensor_parts import differing_names, local_part, map_tensors, placed_like, whole


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


@pytest.mark.parametrize(("rank", "rows"), [(0, (0, 3)), (1, (5, 8)), (2, (3, 5)), (3, (8, 10))])
def test_parts_of_different_sizes_on_two_axes(rank: int, rows: tuple[int, int]) -> None:
    """Of ten rows, tensor parallelism has five on each process, of which FSDP makes three and two."""
    distributed.init_process_group("fake", rank=rank, world_size=4, store=fake_pg.FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        cut = [_StridedShard(0, split_factor=2), Shard(0)]
        own, value = torch.empty(rows[1] - rows[0], 3), torch.arange(30.0).view(10, 3)
        like = DTensor.from_local(own, mesh, cut, run_check=False, shape=value.shape, stride=value.stride())
        placed = placed_like(value, like)
        assert (placed.shape, placed.placements) == (like.shape, like.placements)
        assert torch.equal(local_part(placed), value[slice(*rows)])
        assert placed_like(value, own) is value
    finally:
        distributed.destroy_process_group()
