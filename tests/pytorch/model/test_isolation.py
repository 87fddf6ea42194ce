"""Documents of packed rows are kept apart, by every way that there is; a model that cannot is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ragged import PlainTexts, TakesBounds, TakesMask, TakesTokensAlone, llama, tiny
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.model.attention_windows import windows_of
from paceline.pytorch.model.checkpointing import enable_checkpointing
from paceline.pytorch.model.isolation import Isolation, find_isolation, isolated

CAUSAL = ["GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "MistralForCausalLM"]
MASKED = ["BertForMaskedLM", "RobertaForMaskedLM"]
OWN_MASKS = {"GPT2LMHeadModel", "GPTNeoXForCausalLM", "MistralForCausalLM"}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(**batch)["loss"]


def find(model: nn.Module, **options: Any) -> Isolation:
    return find_isolation(model, loss_of, is_compiled=options.pop("is_compiled", False), **options)


def check(model: nn.Module, found: Isolation) -> None:
    """A change of the first document changes no output of the others, and gives them no gradient."""
    lengths, first = (4, 12, 3, 7, 6), found.first_position
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 30, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) + first for length in lengths])[None]
    rows = torch.cat([ids, ids.flip(1)])  # documents of other lengths in the second row
    both = torch.cat([positions, torch.cat([torch.arange(n) + first for n in reversed(lengths)])[None]])
    changed = rows.clone()
    changed[0, : lengths[0]] += 1
    model.eval()
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    seen: list[Tensor] = []
    with isolated(model, found.way):
        handle = next(each for each in model.modules() if isinstance(each, nn.Embedding)).register_forward_hook(
            lambda module, inputs, output: seen.append(output.requires_grad_()) or output
        )
        before = model(input_ids=rows, position_ids=both)["logits"]
        (gradient,) = torch.autograd.grad(before[0, lengths[0] :].square().sum(), seen[0])
        handle.remove()
        after = model(input_ids=changed, position_ids=both)["logits"]
    assert gradient[0, : lengths[0]].abs().max() == 0
    assert gradient[1].abs().max() == 0
    assert gradient[0, lengths[0] :].abs().max() > 0
    torch.testing.assert_close(after[0, lengths[0] :], before[0, lengths[0] :], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-6)
    assert (after[0, : lengths[0]] - before[0, : lengths[0]]).abs().max() > 1e-4
    alone = model(input_ids=rows[:1, 4:16])["logits"]
    torch.testing.assert_close(before[:1, 4:16], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*CAUSAL, *MASKED])
def test_models_of_transformers(kind: str, attention: str) -> None:
    pytest.importorskip("transformers")
    model = tiny(kind, attention)
    found = find(model)
    assert found.shifts is (kind in CAUSAL)
    assert found.first_position == (2 if kind == "RobertaForMaskedLM" else 0)
    if attention == "sdpa" and kind != "MistralForCausalLM":  # whose window only its own masks know
        assert found.way.name == "attention by document"
    elif kind in OWN_MASKS:
        assert found.way.name == f"the model's own masks for {attention}"
    else:
        assert found.way.name == f"a mask over pairs of tokens for {attention}"
    check(model, found)
    assert model.config._attn_implementation == attention


def test_grouped_heads_by_document_give_the_gradient_of_the_models_own_masks() -> None:
    pytest.importorskip("transformers")
    model = llama().double()
    by_document = find(model).way
    own = find(model, is_compiled=True).way
    assert (by_document.name, own.name) == ("attention by document", "the model's own masks for sdpa")
    model.config.use_cache = False
    lengths = (9, 2, 8, 1, 13, 3)
    ids = torch.randint(3, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    gradients = []
    for way in (by_document, own):
        twin = copy.deepcopy(model)
        with isolated(twin, way):
            twin(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


def test_checkpointed_activations_are_computed_again_by_document() -> None:
    pytest.importorskip("transformers")
    model = llama()
    way = find(model).way
    ids = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(9), torch.arange(5)])[None]
    gradients = []
    for checkpoints in (False, True):
        twin = copy.deepcopy(model).train()
        twin.config.use_cache = False
        if checkpoints:
            enable_checkpointing(twin, None)
        with isolated(twin, way):
            twin(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
    torch.testing.assert_close(*gradients)


def test_batches_that_are_not_packed_are_computed_as_before() -> None:
    pytest.importorskip("transformers")
    model = tiny("BertForMaskedLM", "sdpa").eval()
    way = find(model).way
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        with isolated(model, way):
            within = model(input_ids=ids, attention_mask=mask).logits
            one = model(input_ids=ids[:1, :1]).logits
        assert torch.equal(within, before)
        assert torch.equal(one, model(input_ids=ids[:1, :1]).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and transformers, when they compile it
@pytest.mark.nightly
def test_flex_attention() -> None:
    pytest.importorskip("transformers")
    model = llama("flex_attention", hidden_size=64)
    found = find(model)
    assert found.way.name == "the model's own masks for flex_attention"


# ---- flash attention, by a stand-in: its kernels need a GPU


def flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention of rows, (rows, tokens, heads, width)."""
    repeats = query.shape[-2] // key.shape[-2]
    key, value = (each.repeat_interleave(repeats, -2) for each in (key, value))
    parts = (each.transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    **rest: Any,
) -> Tensor:
    """Attention of sequences that lie behind each other, (tokens, heads, width)."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert (cu_seqlens_q.dtype, int(torch.diff(cu_seqlens_q).max())) == (torch.int32, max_seqlen_q)
    sizes = torch.diff(cu_seqlens_q).tolist()
    parts = zip(*(each.split(sizes) for each in (query, key, value)), strict=True)
    return torch.cat([flash(q[None], k[None], v[None], rest["causal"])[0] for q, k, v in parts])


def flash_llama(monkeypatch: pytest.MonkeyPatch, make: Any = llama) -> Any:
    """A model whose flash attention is computed by the functions above."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")

    def arguments(is_causal: bool, **rest: Any) -> dict[str, Any]:
        return {"causal": is_causal, **{name: value for name, value in rest.items() if name == "max_seqlen_q"}}

    functions = (flash, flash_varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: (functions, (arguments, arguments)))
    model = make()
    model.config._attn_implementation = "flash_attention_2"
    return model


def test_flash_attention_is_told_the_documents_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = flash_llama(monkeypatch)
    found = find(model)
    assert found.way.name == "the bounds of documents for flash_attention_2"
    check(model, found)


def test_flash_attention_that_finds_the_documents_of_one_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        model = llama()

        class Narrow(type(model)):  # type: ignore[misc]
            def forward(
                self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None
            ) -> Any:
                return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)

        model.__class__ = Narrow
        return model

    model = flash_llama(monkeypatch, make)
    assert find(model, num_rows=1).way.name == "the model's own masks for flash_attention_2"
    with pytest.raises(UnsupportedOption, match="flash_attention_2: outputs are not those of each document"):
        find(model)


@pytest.mark.parametrize("cls", [TakesMask, TakesBounds])
@pytest.mark.parametrize("shifted", [True, False])
def test_plain_modules(cls: Any, shifted: bool) -> None:
    model = cls(shifted)
    found = find(model)
    assert found.shifts is shifted
    check(model, found)


class TakesBlockMask(PlainTexts):
    """Gives its mask to `flex_attention`, which has no backward pass on a CPU."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        block_mask: BlockMask | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.places(places)
        query, key, value = (each[:, None] for each in self.mix(hidden).chunk(3, -1))
        mixed = flex_attention(query, key, value, block_mask=block_mask)
        assert isinstance(mixed, Tensor)
        return self.with_loss(self.head(torch.tanh(hidden + mixed[:, 0])), labels)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_plain_module_gets_a_mask_of_flex_attention() -> None:
    found = find(TakesBlockMask(shifted=False))
    assert (found.way.name, found.shifts) == ("a mask of flex_attention as block_mask", False)


class LeaksInTraining(TakesMask):
    """Its outputs depend on all tokens of a batch while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(61)

    def with_loss(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        return super().with_loss(self.norm(logits.transpose(1, 2)).transpose(1, 2), labels)


class MeanOverSamples(TakesMask):
    """Its loss is a mean over rows."""

    def with_loss(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        found = super().with_loss(logits, labels)
        return {**found, "loss": found["loss"] * logits.shape[1]} if labels is not None else found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (TakesTokensAlone, "takes none of position_ids, cu_seqlens and attention_mask"),
        (LeaksInTraining, "a change of one document changed the outputs of another"),
        (MeanOverSamples, "the loss of a row is not the mean over the targets of its documents"),
    ],
)
def test_plain_modules_that_cannot_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"{reason}.*Use packing='group'"):
        find(make())


@pytest.mark.parametrize("kind", ["BertForTokenClassification", "LlamaForTokenClassification"])
def test_fewer_classes_than_tokens(kind: str) -> None:
    """The labels that try the loss are classes: others end the work with a CUDA device."""
    pytest.importorskip("transformers")
    model = tiny(kind, "sdpa")
    assert model.config.num_labels == 2
    found = find(model)
    assert found.shifts is False
    check(model, found)


class Demands(TakesMask):
    """Its code raises an error that no other module does."""

    def outputs(self, *args: Any) -> Tensor:
        raise AssertionError("lengths are needed")


def test_any_error_of_a_module_is_a_reason_to_refuse_it() -> None:
    with pytest.raises(UnsupportedOption, match=r"AssertionError: lengths are needed.*Use packing='group'"):
        find(Demands())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("BertForSequenceClassification", "its outputs have not one row for each token"),
        ("MambaForCausalLM", "outputs are not those of each document alone"),
    ],
)
def test_models_of_transformers_that_cannot_are_refused(kind: str, reason: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind.startswith("Mamba"):
        model = transformers.MambaForCausalLM(
            transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=61, state_size=4)
        )
    else:
        model = tiny(kind, "eager")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedOption, match=f"{reason}.*Use packing='group'"):
        find(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def modern_bert(**options: Any) -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(**sizes, **tokens, vocab_size=61, **options)
    config._attn_implementation = "sdpa"
    return ModernBertForMaskedLM(config)


def test_a_mask_that_would_replace_windows_is_not_taken() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UnsupportedOption, match=r"the model's own masks for sdpa: .*Use packing='group'") as caught:
        find(modern_bert(local_attention=32))
    assert "a mask over pairs" not in str(caught.value)


def nested(window: int | None) -> nn.Module:
    """A model of images and text, whose text has a window."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 61, "max_position_embeddings": 8192, "pad_token_id": 0}
    text = MistralConfig(**sizes, **tokens, num_key_value_heads=1, sliding_window=window, initializer_range=0.5)
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=60))


def test_windows_of_a_config_within_are_seen() -> None:
    pytest.importorskip("transformers")
    assert find(nested(16)).way.name == "the model's own masks for sdpa"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_large_window_is_tried_as_a_small_one(attention: str) -> None:
    """Rows and documents are longer than the window of 600 tokens; the probe made it 32."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(**sizes, num_key_value_heads=1, vocab_size=61, sliding_window=600, initializer_range=0.3)
    config._attn_implementation = attention
    model = MistralForCausalLM(config)
    way = find(model).way
    assert way.name == f"the model's own masks for {attention}"
    assert config.sliding_window == 600
    assert not any(vars(module).get("sliding_window") not in (None, 600) for module in model.modules())
    config.use_cache = False
    documents = [
        torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length)) for length in (650, 9)
    ]
    positions = torch.cat([torch.arange(each.shape[1]) for each in documents])[None]
    with torch.no_grad(), isolated(model, way):
        together = model(input_ids=torch.cat(documents, 1), position_ids=positions).logits.split((650, 9), 1)
    for document, found in zip(documents, together, strict=True):
        torch.testing.assert_close(found, model(input_ids=document).logits, rtol=1e-4, atol=1e-4)
    config.sliding_window = None
    assert (model(input_ids=documents[0]).logits - together[0]).abs().max() > 1e-3


class HidesItsWindow(TakesMask):
    """Its attention does not read the window of its config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 61})()
        self.config.sliding_window = 4096


def test_a_window_that_cannot_be_made_smaller_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match=r"sliding_window=4096, could not be made smaller.*Use packing='group'"):
        find(HidesItsWindow())


class ByLayer:
    """A config whose window differs by layer, as those of transformers that raise an error of their own."""

    max_position_embeddings, vocab_size = 64, 61
    per_layer_config = (SimpleNamespace(sliding_window=None), SimpleNamespace(sliding_window=20))

    @property
    def sliding_window(self) -> int:
        raise LookupError("it is a per-layer attribute")


def test_windows_of_each_layer_are_seen() -> None:
    assert windows_of(ByLayer()) == {"sliding_window": 20}


class IgnoresWindows(TakesMask):
    """Its attention has a window, which a mask over pairs of tokens replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"sliding_window": 20, "max_position_embeddings": 64, "vocab_size": 61})()

    def outputs(self, input_ids: Tensor, position_ids: Tensor | None, seen: Tensor | None) -> Tensor:
        if seen is None:
            seen = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).triu(-19)
        return super().outputs(input_ids, position_ids, seen)


def test_the_probe_has_a_document_longer_than_the_window() -> None:
    with pytest.raises(UnsupportedOption, match="outputs are not those of each document alone"):
        find(IgnoresWindows())
