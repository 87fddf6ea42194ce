"""Sequences in parts: masks, and what is refused; on a mesh of one process. Numbers are in `test_mesh`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mesh_job
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.args.errors import UnsupportedOption
from paceline.distributed.context_parallel import ContextParallel, Pass


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    torch.distributed.destroy_process_group()


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3)


class NoPositions(Takes):
    def forward(self, input_ids: Tensor) -> Any:
        return self.words(input_ids)


class ShiftsByItself(Takes):
    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Any:
        return self.words(input_ids)


class NoAttention(Takes):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self.words(input_ids)


class NotCausal(Takes):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.words(input_ids)
        return nn.functional.scaled_dot_product_attention(x, x, x)


def windowed() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**mesh_job.SIZES, **mesh_job.HEADS, sliding_window=4))


def classifier() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**mesh_job.SIZES, **mesh_job.HEADS, pad_token_id=0))


def call_in_parts(model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any]) -> Any:
    ContextParallel(model, mesh, False)
    return model(**inputs)


IDS = torch.tensor([[1, 2, 3, 1, 2]])
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (NoPositions, {}, "takes no position_ids"),
    (ShiftsByItself, {}, "takes labels and no shift_labels"),
    (classifier, {}, "takes labels and no shift_labels"),
    (NoAttention, {"input_ids": IDS}, "did not call .*scaled_dot_product_attention"),
    (NotCausal, {"input_ids": IDS}, "attention that is not causal needs the attention_mask"),
    (NoAttention, {"input_ids": IDS[0]}, "whose second dimension could be cut"),
    (windowed, {"input_ids": IDS}, "sliding_window"),
    (mesh_job.llama, {"input_ids": IDS, "labels": torch.tensor([1])}, r"labels of shape \(1,\)"),
    (mesh_job.llama, {"input_ids": IDS, "attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask of 4 dimensions"),
    (mesh_job.llama, {"input_ids": IDS, "past_key_values": object()}, "generating is not supported"),
]


@pytest.mark.parametrize(("make", "inputs", "problem"), REFUSED)
def test_what_would_not_be_exact_is_refused(mesh: DeviceMesh, make: Any, inputs: Any, problem: str) -> None:
    with pytest.raises(UnsupportedOption, match=rf"^parallel=\{{'cp': 1\}}.*{problem}"):
        call_in_parts(make(), mesh, inputs)


def test_activations_of_an_own_module_are_not_made_again(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedOption, match="activation_checkpointing=True with parallel"):
        ContextParallel(mesh_job.Reader(), mesh, True)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("inputs", [{}, {"position_ids": PACKED}, {"attention_mask": LEFT}])
def test_a_model_of_transformers_gives_the_same(mesh: DeviceMesh, inputs: dict[str, Tensor]) -> None:
    ids = torch.arange(8)[None] + 1
    model = mesh_job.llama()
    expected = model(input_ids=ids, labels=ids, use_cache=False, **inputs)
    context = ContextParallel(model, mesh, False)
    found = model(input_ids=ids, labels=ids, **inputs)
    seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(found.logits[seen], expected.logits[seen])
    if "attention_mask" not in inputs:
        torch.testing.assert_close(found.loss, expected.loss)
    assert context.now.num_attended == 2


@pytest.mark.parametrize("inputs", [{}, {"position_ids": PACKED}, {"attention_mask": LEFT}])
def test_the_masks_of_all_parts_are_that_of_the_whole(mesh: DeviceMesh, inputs: dict[str, Tensor]) -> None:
    context = ContextParallel(mesh_job.Reader(), mesh, False)
    positions = inputs.get("position_ids", torch.arange(8)[None])
    main, masks = torch.zeros(1, 8), []
    for size in (1, 2, 3):
        context.size, own = size, -(-8 // size)
        parts = []
        for rank in range(size):
            context.now = Pass(8, own, own * rank)
            parts.append(context._mask(inputs.get("attention_mask"), positions, main))
        masks.append(torch.cat(parts, 2)[..., :8, :8])
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
