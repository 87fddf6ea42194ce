"""Plans of tensor parallel: what they come to, and what is refused; on a mesh of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mesh_job
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.distributed.tensor_parallel import (
    add_tied,
    check_heads,
    check_module,
    parallelize,
    plan_of,
    styles_of,
)
from paceline.pytorch.distributed.tensor_parallel import tied_names as tied


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(4), nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x) * self.scale)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.layers[1].scale.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"}


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


def test_a_cut_model_gives_the_same_and_keeps_what_is_tied_and_frozen(mesh: DeviceMesh) -> None:
    ids, model = torch.arange(8)[None], Net()
    expected = model(ids)
    names = [name for name, _ in model.named_parameters()]
    assert parallelize(model, mesh, PLAN) == 6  # the embedding too, whose weight is the head's
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.head.weight is model.words.weight
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["layers.1.scale"]
    output = model(ids)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters() if p.requires_grad)
    assert not any("weight" in vars(module) or "scale" in vars(module) for module in model.modules())


WRONG: list[tuple[Any, type[Exception], str]] = [
    ({"layers.*.upp": "colwise"}, ValueError, r"no module of Net is called 'layers\.\*\.upp'; did you mean 'layers"),
    ({"layers.*.up": "columns"}, UnsupportedOption, "'columns'} is not supported: use colwise"),
    ({"layers.*.up": "packed_colwise"}, UnsupportedOption, "tp_plan of your own replaces the model's"),
]


@pytest.mark.parametrize(("plan", "kind", "problem"), WRONG)
def test_a_wrong_plan_is_an_error(plan: Any, kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        styles_of(Net(), plan)


def test_hooks_on_an_embedding_that_is_cut_see_its_whole_output(mesh: DeviceMesh) -> None:
    """As the noise of NEFTune, which cannot be added to a part of a sum."""
    model, ids, seen = Net(), torch.tensor([[0, 3, 7]]), []
    expected = model.words(ids)
    model.words.register_forward_hook(lambda module, args, output: seen.append(output))
    parallelize(model, mesh, PLAN)
    model(ids)
    assert type(seen[0]) is not DTensor
    torch.testing.assert_close(seen[0], expected)


def test_a_model_without_a_plan_is_an_error() -> None:
    with pytest.raises(ValueError, match="Net has no plan of its own"):
        plan_of(Net(), None)


def test_what_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \(6, 4\) cannot be cut into 4 equal parts along dimension 0"):
        check_module("up", nn.Linear(4, 6), "colwise", 4)
    with pytest.raises(UnsupportedOption, match="not supported for a LayerNorm"):
        check_module("norm", nn.LayerNorm(4), "colwise", 2)
    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be divided by 3"):
        check_heads(mesh_job.llama(), 3)


def test_the_tied_partner_is_cut_too_or_the_plan_refused(mesh: DeviceMesh) -> None:
    model = Net()
    assert add_tied(model, {"head": "colwise_gather_output"}, tied(model))["words"] == "embedding_rowwise"
    with pytest.raises(ValueError, match=r"tied weights words\.weight and head\.weight in different ways"):
        parallelize(model, mesh, {"head": "colwise_gather_output", "words": "embedding_colwise"})
