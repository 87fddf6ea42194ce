"""check_targets: which token an output is compared with, whoever shifted it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Classifier, Tagger, classification, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, check_targets

CLASSES = 50


class Causal(nn.Module):
    """Reads its own token and the one before; `by_loss`: how far its loss shifts the labels."""

    def __init__(self, by_loss: int = 1, reach: int = 1, shape: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 8)
        self.mix = nn.Linear(16, 8)
        self.head = nn.Linear(8, CLASSES)
        self.by_loss, self.reach, self.shape = by_loss, reach, shape

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        other = torch.roll(x, self.reach, 1)  # reach 1: the token before; -1: the next one
        result: Tensor = self.head(torch.tanh(self.mix(torch.cat([x, other], -1))))
        return result

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = self.logits(input_ids)
        moved = torch.roll(labels, -self.by_loss, 1)
        if self.by_loss:
            moved[:, -self.by_loss :] = -100
        loss = functional.cross_entropy(logits.flatten(0, 1), moved.flatten())
        if self.shape == "fused":
            return {"loss": loss}
        return {"loss": loss, "logits": logits.movedim(1, -1) if self.shape == "classes second" else logits}


def tokens(samples: int = 3, length: int = 12) -> Tensor:
    return torch.randint(0, CLASSES, (samples, length), generator=torch.Generator().manual_seed(1))


def shifted(ids: Tensor, by: int) -> Tensor:
    labels = torch.roll(ids, -by, 1)
    if by:
        labels[:, -by:] = -100
    return labels


def batch_of(by_batch: int) -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": shifted(ids, by_batch)}


CASES = [
    (0, 1, "right"),
    (1, 0, "right"),
    (0, 0, "not shifted"),
    (1, 1, "shifted twice"),
    (2, 1, "shifted wrongly"),
]


@pytest.mark.parametrize("shape", ["dict", "classes second", "fused"])
@pytest.mark.parametrize(("by_batch", "by_loss", "verdict"), CASES)
def test_right_never_and_twice(by_batch: int, by_loss: int, verdict: str, shape: str) -> None:
    model = Causal(by_loss, shape=shape)
    found = check_targets(model, batch_of(by_batch))
    assert found.verdict == verdict
    assert (found.shift, found.by_batch, found.by_loss) == (by_batch + by_loss, by_batch, by_loss)
    assert found.is_wrong == (verdict != "right")
    assert str(found) == found.sentence
    assert f"shifted by {by_batch}, the loss shifts them by {by_loss}" in found.sentence
    assert verdict.split()[0] in found.sentence.lower()


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9), st.integers(0, 1000))
def test_prompts_and_padding_do_not_count(by_batch: int, by_loss: int, prompt: int, seed: int) -> None:
    """Labels left out at either end: the rest tells the same."""
    ids = torch.randint(0, 10_000, (2, 24), generator=torch.Generator().manual_seed(seed)) % CLASSES
    ids[0] = torch.randperm(CLASSES)[:24]
    labels = shifted(ids, by_batch)
    labels[:, :prompt] = -100
    labels[1, 18:] = -100
    assert check_targets(Causal(by_loss), {"input_ids": ids, "labels": labels}).shift == by_batch + by_loss


def test_a_model_that_sees_what_it_predicts() -> None:
    found = check_targets(Causal(reach=-1), batch_of(0))
    assert found.verdict == "visible"
    assert found.is_wrong
    assert "not causal" in found.sentence
    assert check_targets(Causal(reach=2), batch_of(0)).verdict == "right"


def test_nothing_is_changed() -> None:
    model = Causal()
    model.mix.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    batch = batch_of(1)
    copies = {name: value.clone() for name, value in batch.items()}
    assert check_targets(model, batch).verdict == "shifted twice"  # frozen models too
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert (model.training, model.mix.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, copies[name]) for name, value in batch.items())
    assert not any(module._forward_hooks for module in model.modules())


def test_tuples_and_other_names() -> None:
    class Named(Causal):
        def forward(self, idx: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            logits = self.logits(idx)
            return logits.flatten(0, 1), functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    class LossFirst(Named):
        def forward(self, idx: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            return tuple(reversed(super().forward(idx, targets)))

    ids = tokens()
    assert check_targets(LossFirst(), (ids, shifted(ids, 1))).verdict == "right"
    assert check_targets(LossFirst(), [ids, ids]).verdict == "not shifted"


def test_what_is_no_language_model() -> None:
    found = check_targets(Tagger(CLASSES), {"input_ids": tokens(), "labels": (tokens() * 7 + 3) % CLASSES})
    assert found.verdict == "unrelated"
    assert not found.is_wrong
    assert found.by_loss == 0
    data = classification(3)
    with pytest.raises(ValueError, match="no integer tokens"):
        check_targets(Classifier(), {name: torch.stack([s[name] for s in data]) for name in ("x", "labels")})


def test_a_batch_that_does_not_tell() -> None:
    same = torch.ones(2, 8, dtype=torch.long)
    found = check_targets(Causal(), {"input_ids": same, "labels": same})
    assert (found.verdict, found.shift) == ("unknown", None)
    assert not found.is_wrong
    ignored = {"input_ids": tokens(), "labels": torch.full_like(tokens(), -100)}
    ignored["labels"][2] = 1
    assert check_targets(Causal(shape="fused"), ignored).verdict == "unknown"


def test_a_module_needs_a_batch() -> None:
    with pytest.raises(ValueError, match="needs a batch"):
        check_targets(Causal())


# ---- a Trainer's own way to the loss


def copies(by_batch: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": shifted(ids[None], by_batch)[0]} for ids in tokens(8)]


class ShiftsInTrainer(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model.logits(**inputs)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, logits) if return_outputs else loss


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_a_trainers_batches_and_loss(tmp_path: Path) -> None:
    model = Causal(0)
    assert check_targets(make_trainer(tmp_path, model, copies(1))).verdict == "right"
    assert check_targets(make_trainer(tmp_path, model, copies(0))).verdict == "not shifted"
    assert check_targets(make_trainer(tmp_path, model, copies(0), cls=ShiftsInTrainer)).verdict == "right"
    found = check_targets(make_trainer(tmp_path, model, copies(1), cls=ShiftsInTrainer))
    assert (found.verdict, found.by_batch, found.by_loss) == ("shifted twice", 1, 1)
    trainer = make_trainer(tmp_path, Causal(1), copies(0), compute_loss_func=loss_of)
    assert check_targets(trainer).verdict == "not shifted"
    trainer = make_trainer(tmp_path, Causal(1), copies(0), label_smoothing_factor=0.1)
    assert check_targets(trainer).verdict == "right"
    trainer.train()  # nothing stands in the way of training


# ---- models and collators of transformers


def transformers_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=CLASSES, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        )
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=CLASSES, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=CLASSES, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return transformers.BertForMaskedLM(config)
    config = transformers.T5Config(
        vocab_size=CLASSES, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_models_of_transformers(tmp_path: Path, kind: str) -> None:
    model = transformers_model(kind)
    found = check_targets(model, batch_of(0))
    assert (found.verdict, found.by_batch, found.by_loss) == ("right", 0, 1)
    assert check_targets(model, batch_of(1)).verdict == "shifted twice"
    ids = tokens()
    already = {"input_ids": ids, "labels": ids, "shift_labels": shifted(ids, 1)}
    assert check_targets(model, already).verdict == "right"
    assert check_targets(make_trainer(tmp_path, model, copies(0), bf16=True)).verdict == "right"


def test_other_models_of_transformers() -> None:
    ids = tokens().clamp(min=2)
    masked = torch.where(torch.rand(ids.shape) < 0.5, 1, ids)
    labels = torch.where(masked == 1, ids, -100)
    assert check_targets(transformers_model("bert"), {"input_ids": masked, "labels": labels}).verdict == "unrelated"
    assert check_targets(transformers_model("bert"), {"input_ids": ids, "labels": ids}).verdict == "not shifted"
    t5 = transformers_model("t5")
    found = check_targets(t5, {"input_ids": ids, "labels": ids.flip(1)})
    assert (found.verdict, found.by_loss) == ("right", 0)
    decoder = t5.prepare_decoder_input_ids_from_labels(labels=ids)
    moved = {"input_ids": ids, "labels": shifted(ids, 1), "decoder_input_ids": decoder}
    assert check_targets(t5, moved).verdict == "shifted twice"


def test_collators_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<pad>": 0, "<unk>": 1, **{f"w{index}": index for index in range(2, CLASSES)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")
    data = [{"input_ids": ids[: 6 + index].tolist()} for index, ids in enumerate(tokens(4, 20).clamp(min=2))]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    model = transformers_model("llama")
    assert check_targets(model, collate(data)).verdict == "right"
    assert check_targets(Causal(0), dict(collate(data))).verdict == "not shifted"
    flat = transformers.DataCollatorWithFlattening(return_position_ids=True)(
        [{"input_ids": item["input_ids"], "labels": item["input_ids"]} for item in data]
    )
    assert check_targets(model, flat).verdict == "right"
    trainer = make_trainer(tmp_path, model, data, data_collator=collate)
    assert check_targets(trainer).verdict == "right"
