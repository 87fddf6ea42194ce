"""Sequences in parts: masks, and what is refused; on a mesh of one process. Numbers are in `test_mesh`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mesh_job
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.distributed import ulysses
from paceline.pytorch.distributed.context_parallel import ContextParallel, Pass, with_target
from paceline.pytorch.distributed.parts_check import difference, formats_within
from paceline.pytorch.model.prepare import add_embedding_noise


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


def stretching() -> nn.Module:
    return mesh_job.llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


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
    (stretching, {}, "rotary positions of the type 'dynamic'"),
    (NoAttention, {"input_ids": IDS}, "did not call .*scaled_dot_product_attention"),
    (NotCausal, {"input_ids": IDS}, "attention that is not causal needs the attention_mask"),
    (NoAttention, {"input_ids": IDS[0]}, "whose second dimension could be cut"),
    (lambda: mesh_job.llama(sliding_window=4), {"input_ids": IDS}, "sliding_window in its configuration, and"),
    (lambda: mesh_job.llama(layer_types=["chunked_attention"] * 2), {}, "layers of the kind chunked_attention"),
    (mesh_job.llama, {"input_ids": IDS, "labels": torch.tensor([1])}, r"labels of shape \(1,\)"),
    (mesh_job.llama, {"input_ids": IDS, "attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask of 4 dimensions"),
    (mesh_job.llama, {"input_ids": IDS, "past_key_values": object()}, "a pass that goes on from past_key_values"),
]


@pytest.mark.parametrize(("make", "inputs", "problem"), REFUSED)
def test_what_would_not_be_exact_is_refused(mesh: DeviceMesh, make: Any, inputs: Any, problem: str) -> None:
    with pytest.raises(UnsupportedOption, match=rf"^parallel=\{{'cp': 1\}}.*{problem}"):
        call_in_parts(make(), mesh, inputs)


def test_a_window_that_is_as_long_as_the_text_leaves_nothing_out(mesh: DeviceMesh) -> None:
    assert call_in_parts(mesh_job.llama(sliding_window=5), mesh, {"input_ids": IDS}).logits.shape[1] == 5


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
    masks = []
    for size in (1, 2, 3):
        context.size, own = size, -(-8 // size)
        parts = []
        for rank in range(size):
            context.now = Pass(8, own, own * rank, own * size)
            parts.append(context._mask(inputs.get("attention_mask"), positions, (1, 8)))
        masks.append(torch.cat(parts, 2)[..., :8, :8])
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_two_models_in_one_process_do_not_know_of_each_other(mesh: DeviceMesh) -> None:
    ids = torch.arange(8)[None] + 1
    first, second, plain = mesh_job.llama(), mesh_job.qwen(), mesh_job.llama()
    expected = plain(input_ids=ids, labels=ids).loss
    ContextParallel(first, mesh, False)
    ContextParallel(second, mesh, False)
    second(input_ids=ids)
    torch.testing.assert_close(first(input_ids=ids, labels=ids).loss, expected)
    alike = type(plain)(first.config)  # of which the attention is the same by name
    alike.load_state_dict(plain.state_dict())
    torch.testing.assert_close(alike(input_ids=ids, labels=ids).loss, expected)


def test_a_model_that_is_gone_is_not_kept(mesh: DeviceMesh) -> None:
    model = mesh_job.llama()
    ContextParallel(model, mesh, False)
    model(input_ids=IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_noise_on_the_words_is_bounded_by_the_length_of_the_whole_text(mesh: DeviceMesh) -> None:
    model, ids = mesh_job.llama(), torch.arange(8)[None].repeat(16, 1)
    clean = model.get_input_embeddings()(ids)
    add_embedding_noise(model, alpha=5.0)
    context = ContextParallel(model, mesh, checkpoints=False)
    context.now = Pass(length=32, own=8, offset=0, total=32)
    for tokens, surroundings in ((32, nullcontext()), (8, context.uncut())):
        with surroundings:
            noise = model.get_input_embeddings()(ids) - clean
        bound = 5.0 / (tokens * clean.shape[-1]) ** 0.5
        assert 0.9 * bound < noise.abs().max() <= 1.001 * bound


def test_the_comparison_is_made_once_and_changes_nothing(mesh: DeviceMesh) -> None:
    model, calls = mesh_job.llama(), []
    model.model.layers[0].register_forward_hook(lambda module, *_: calls.append(module.training))
    model.train()
    ContextParallel(model, mesh, False)
    state = torch.get_rng_state()
    for _ in range(2):
        model(input_ids=IDS)
    assert calls == [False, False, True, True]
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("num_targets", [0, 1])
def test_a_part_without_a_target_has_a_made_up_one(num_targets: int) -> None:
    part, whole = torch.full((2, 3), -100), torch.tensor([[-100, 7]])
    part[1, 0] = 5 if num_targets else -100
    found = with_target(part, whole)
    assert int(found[0, 0]) == (-100 if num_targets else 7)
    assert torch.equal(found.flatten()[1:], part.flatten()[1:])
    assert int(part[0, 0]) == -100


WRONG = [("outputs", torch.ones(2, 5, 3) + torch.eye(5, 3)), ("", torch.ones(2, 5, 3) * (1 + 1e-5))]


@pytest.mark.parametrize(("said", "found"), WRONG)
def test_differences_are_those_of_single_tokens(mesh: DeviceMesh, said: str, found: Tensor) -> None:
    whole, present = torch.ones(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    assert difference({"logits": whole}, {"logits": found}, present) == said
    lost = found.clone()
    lost[0, 3, 0] = torch.nan
    assert difference((whole,), (lost,), present) == "outputs"
    assert difference(torch.tensor(2.0), torch.tensor(2.1), present) == "losses"
    assert difference(torch.tensor(torch.nan), torch.tensor(0.0), present) == ""  # a mean over no target
    present[0, 3] = False
    assert difference((whole,), (lost,), present) == said


def test_what_was_computed_in_16_bits_may_differ_by_their_rounding(mesh: DeviceMesh) -> None:
    class Widens(nn.Sequential):
        """As many language models do with their logits."""

        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values).float()

    whole, present = torch.ones(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    rounded = whole * (1 + 2**-8)
    for dtype, said in [(torch.bfloat16, ""), (torch.float32, "outputs")]:
        model = Widens(nn.Linear(3, 3)).to(dtype)
        with formats_within(model) as formats:
            assert model(whole.to(dtype)).dtype == torch.float32
        assert formats == {dtype}
        assert difference(whole, rounded, present, formats) == said
    assert not model[0]._forward_hooks


def test_heads_may_share_a_mask_of_tokens_and_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of one process of two; the collective itself is tested in `test_mesh`."""
    for name in ("tokens_for_heads", "heads_for_tokens"):
        monkeypatch.setattr(ulysses, name, lambda tensor, size, group: tensor)
    query = torch.randn(3, 2, 8, 4)
    mask = torch.ones(8, 8).tril().bool()
    expected = nn.functional.scaled_dot_product_attention(query, query, query, mask)
    torch.testing.assert_close(ulysses.attend_by_heads(query, query, query, mask, 2, None), expected)
    torch.testing.assert_close(ulysses.attend_by_heads(query, query, query, None, 2, None), expected)
    with pytest.raises(UnsupportedOption, match=r"'sp': 3}: 2 attention heads .* make sp a divisor, or use cp"):
        ulysses.attend_by_heads(query, query, query, None, 3, None)
    with pytest.raises(UnsupportedOption, match=r"'sp': 2}: .*of shape \(3, 8, 4\)"):
        ulysses.attend_by_heads(query[:, 0], query, query, None, 2, None)


@pytest.mark.parametrize("block", [1, 3, 8, 100])
@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_windows_in_blocks_are_those_of_a_mask(window: int, block: int) -> None:
    query, key, value = torch.randn(3, 2, 2, 11, 4)
    places = torch.arange(11)
    mask = (places <= places[:, None]) & (places > places[:, None] - window)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(ulysses.attend_in_blocks(query, key, value, window, block), expected)
