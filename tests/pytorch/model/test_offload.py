"""Activations in host memory. The hooks are called on CPU tensors here: a copy, as from any other device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_job import Layered
from small_models import make_trainer
from torch import Tensor, nn

from paceline import UnsupportedOption
from paceline.pytorch.model.checkpointing import enable_checkpointing
from paceline.pytorch.model.compilation import compile_model, undo_compilation
from paceline.pytorch.model.offload import ActivationOffload, offload_activations

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
IDS = (torch.arange(64) % 11).view(4, 16)


def gradients(model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    model(IDS, IDS)["loss"].backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_checkpointed": True}, {"is_compiled": True}], ids=str)
def test_gradients_are_the_same_bits(tmp_path: Path, options: dict[str, bool]) -> None:
    model = Layered()
    if options.get("is_checkpointed"):
        enable_checkpointing(model)
    if options.get("is_compiled"):
        compile_model(model, make_trainer(tmp_path, model, torch_compile=True, torch_compile_backend="aot_eager").args)
    plain = gradients(model)
    offload = ActivationOffload(min_bytes=0)
    _, undo = offload_activations(model, offload)
    torch.testing.assert_close(gradients(model), plain, rtol=0, atol=0)
    assert offload.num_moved > 4
    moved = offload.num_moved
    undo()
    gradients(model)
    with torch.no_grad():
        model(IDS, IDS)
    assert offload.num_moved == moved
    undo_compilation(model)


def test_checkpointed_blocks_move_their_inputs_only() -> None:
    moved = []
    for is_checkpointed in (False, True):
        model, offload = Layered(), ActivationOffload(min_bytes=0)
        if is_checkpointed:
            enable_checkpointing(model)
        offload_activations(model, offload)
        gradients(model)
        moved.append(offload.bytes_moved)
    assert 0 < moved[1] < moved[0] / 2


class Shared(nn.Module):
    """Three layers save one input, which is changed in place afterwards; a slice and a repeated tensor are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(x) * 1
        first, second = (layer(hidden) for layer in self.layers[:2])
        part = hidden[:, 2:6] * second[:, 2:6]
        return (first * second).sum() + (part * part.new_ones(1).expand_as(part)).square().sum()


def test_a_tensor_is_copied_once_and_parameters_stay() -> None:
    model, offload = Shared(), ActivationOffload(min_bytes=0)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).backward()
    plain = [x.grad, *(layer.weight.grad for layer in model.layers)]
    x.grad = None
    model.zero_grad()
    packed: list[tuple[Any, Any]] = []
    pack = offload.pack
    offload.pack = lambda tensor: packed.append((tensor, pack(tensor))) or packed[-1][1]  # type: ignore[method-assign]
    offload_activations(model, offload)
    loss = model(x)
    weights = {layer.weight.data_ptr() for layer in model.layers}
    assert {tensor.data_ptr() for tensor, kept in packed if isinstance(kept, Tensor)} >= weights - {
        model.layers[2].weight.data_ptr()
    }
    assert offload.num_moved < sum(not isinstance(kept, Tensor) for _, kept in packed)
    packed.clear()
    loss.backward()
    torch.testing.assert_close([x.grad, *(layer.weight.grad for layer in model.layers)], plain, rtol=0, atol=0)


def test_strides_are_kept_and_new_versions_copied() -> None:
    offload = ActivationOffload(min_bytes=0)
    for tensor in (torch.arange(12.0).view(3, 4).t(), torch.arange(12.0).view(3, 4)[:, 1:3]):
        back = offload.unpack(offload.pack(tensor))
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)
    changed = torch.zeros(3)
    before = offload.pack(changed)
    changed.add_(1)
    after = offload.pack(changed)
    assert offload.unpack(before).sum() == 0
    assert offload.unpack(after).sum() == 3
    assert isinstance(ActivationOffload().pack(changed), Tensor)  # too small


def test_a_failed_forward_leaves_no_hooks() -> None:
    model, offload = Layered(), ActivationOffload(min_bytes=0)
    offload_activations(model, offload)
    with pytest.raises(IndexError):
        model(IDS + 90, IDS)
    moved = offload.num_moved
    torch.ones(3, requires_grad=True).exp().sum().backward()
    assert offload.num_moved == moved


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"activation_offload=True .*not supported.*[Ll]eave"):
        make_trainer(tmp_path, Layered(), activation_offload=True)


def test_casts_of_weights_stay() -> None:
    model, offload = Layered(), ActivationOffload(min_bytes=0)
    plain, moved = offload.pack, []

    def pack(tensor: Tensor) -> Any:
        packed = plain(tensor)
        moved.extend([tensor.shape] if packed is not tensor else [])
        return packed

    offload.pack = pack  # type: ignore[method-assign]
    offload_activations(model, offload)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, IDS)["loss"]
    loss.backward()
    weights = {shape for each in model.parameters() for shape in (each.shape, each.t().shape) if each.dim() == 2}
    assert moved
    assert not weights & set(moved)
