"""Training on packed batches: the numbers of padded ones, exact resume, and nothing packed in part."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import PlainTexts, TakesBounds, TakesMask, TakesTokensAlone, llama, pad, texts
from small_models import losses, make_trainer, weights
from torch import nn

from paceline import Trainer, TrainerCallback
from paceline.args.errors import UnsupportedOption

PACKINGS = ("pack", "flatten", "group")


def run(model: nn.Module, folder: Path, packing: str | None, data: Any, **options: Any) -> Trainer:
    """One epoch of a copy of the model; the collator pads, and what it made is packed."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "data_collator": pad, **options}
    trainer = make_trainer(
        folder, copy.deepcopy(model), data, packing=packing, eval_dataset=data[:9], num_train_epochs=1, **settings
    )
    trainer.train()
    return trainer


def norms(trainer: Trainer) -> list[float]:
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, TakesMask, TakesBounds, lambda: TakesMask(shifted=False)])
def test_losses_gradients_and_weights_are_those_of_padded_batches(make: Any, tmp_path: Path) -> None:
    if make is llama:
        pytest.importorskip("transformers")
    model, data = make(), texts()
    options: dict[str, Any] = {"loss_weight": None if make is llama else "tokens"}
    if make in (TakesMask, TakesBounds):
        options["loss_weight"] = "shifted_tokens"
    padded = run(model, tmp_path / "padded", None, data, **options)
    for packing in ("pack", "flatten"):
        options.pop("loss_weight", None)  # it is seen
        packed = run(model, tmp_path / packing, packing, data, **options)
        assert losses(packed) == pytest.approx(losses(padded), rel=1e-5)
        assert norms(packed) == pytest.approx(norms(padded), rel=1e-5)
        assert packed.evaluate()["eval_loss"] == pytest.approx(padded.evaluate()["eval_loss"], rel=1e-5)
        torch.testing.assert_close(weights(packed.model), weights(padded.model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["pack", "flatten"]))
def test_any_texts_in_any_batches(seed: int, batch_size: int, accumulation: int, packing: str) -> None:
    pytest.importorskip("transformers")
    data = texts(11, seed=seed)
    options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(num_hidden_layers=1)
        padded = run(model, Path(folder, "padded"), None, data, **options)
        packed = run(model, Path(folder, "packed"), packing, data, **options)
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-5)
    assert norms(packed) == pytest.approx(norms(padded), rel=1e-5)


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("packing", slow_but(["pack"], PACKINGS))
def test_a_run_is_resumed_bit_for_bit_in_the_middle_of_an_epoch(packing: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "packing": packing, "num_train_epochs": 2}
    options |= {"data_collator": pad, "per_device_train_batch_size": 4}
    whole = make_trainer(tmp_path / "whole", llama(dropout=0.1), texts(), **options)
    whole.train()
    cut = make_trainer(tmp_path / "cut", llama(dropout=0.1), texts(), callbacks=[StopAt()], **options)
    cut.train()
    resumed = make_trainer(tmp_path / "cut", llama(dropout=0.1), texts(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_the_models_configuration_is_saved_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = llama()
    before = model.config.to_dict()
    trainer = make_trainer(
        tmp_path, model, texts(8), packing="flatten", max_steps=2, save_strategy="steps", save_steps=1
    )
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "config.json").read_text("utf-8"))
    assert "paceline" not in json.dumps(saved)
    assert model.config._attn_implementation == "sdpa"
    assert {**model.config.to_dict(), "use_cache": None} == {**before, "use_cache": None}
    assert not model._forward_pre_hooks


def test_samples_are_packed_without_a_collator_and_by_workers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    padded = run(llama(), tmp_path / "padded", None, texts())
    model = llama()
    for number, options in enumerate(({}, {"dataloader_num_workers": 1})):
        trainer = make_trainer(
            tmp_path / str(number), copy.deepcopy(model), texts(), packing="pack", packing_length=24,
            num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=2, **options,
        )  # fmt: skip
        trainer.train()
        assert losses(trainer) == pytest.approx(losses(padded), rel=1e-5)


@pytest.mark.parametrize("packing", ["pack", "flatten"])
def test_what_fills_the_rows_is_no_token_that_was_seen(packing: str, tmp_path: Path) -> None:
    """Token 5, the padding of the tokenizer, is one of the texts too."""
    options: dict[str, Any] = {"packing_length": 16} if packing == "pack" else {}
    data = texts(23)
    trainer = run(
        TakesMask(), tmp_path, packing, data, include_num_input_tokens_seen="non_padding", data_collator=None,
        processing_class=SimpleNamespace(pad_token_id=5), **options,
    )  # fmt: skip
    assert trainer.state.num_input_tokens_seen == sum(len(text["input_ids"]) for text in data)


def test_a_model_that_cannot_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, TakesTokensAlone(), texts(8), packing="pack", data_collator=pad)
    with pytest.raises(UnsupportedOption, match="TakesTokensAlone cannot isolate the documents of a row"):
        trainer.train()
    assert trainer.state.global_step == 0


class Leaks(PlainTexts):
    """Takes positions, and lets documents see each other."""

    def forward(self, input_ids: Any, position_ids: Any = None, labels: Any = None) -> Any:
        return self.with_loss(self.outputs(input_ids, position_ids, None), labels)


class Gated(Leaks):
    """Its attention is multiplied by a gate, as with ReZero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def outputs(self, input_ids: Any, position_ids: Any, seen: Any) -> Any:
        whole, head = super().outputs(input_ids, position_ids, seen), self.head
        return head(self.tokens(input_ids)) + self.gate * whole


def without_head(model: PlainTexts) -> PlainTexts:
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("make", [lambda: without_head(Leaks()), Gated])
def test_zeros_in_a_new_model_do_not_hide_that_documents_see_each_other(make: Any, tmp_path: Path) -> None:
    model = make()
    before = weights(model).clone()
    trainer = make_trainer(tmp_path, model, texts(8), packing="flatten", data_collator=pad)
    with pytest.raises(UnsupportedOption, match="cannot isolate the documents of a row"):
        trainer.train()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("shifted", [True, False])
def test_the_shift_of_the_loss_of_a_head_of_zeros(shifted: bool, tmp_path: Path) -> None:
    model = without_head(TakesMask(shifted=shifted))
    before = weights(model).clone()
    found = make_trainer(tmp_path, model, texts(8), packing="pack", data_collator=pad)._find_packing()
    assert found is not None
    assert found.form.shifts is shifted
    assert torch.equal(weights(model), before)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return [pad(texts(4))]


def test_a_loader_that_does_not_pack_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, TakesMask(), texts(8), cls=OwnLoader, packing="flatten")
    with pytest.raises(ValueError, match="packing='flatten': the training loader is OwnLoader's own"):
        trainer.train()


def test_an_own_loss_that_looks_across_documents_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def next_token(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), logits[:, 1:].argmax(-1).flatten())

    trainer = make_trainer(tmp_path, llama(), texts(8), packing="pack", compute_loss_func=next_token)
    with pytest.raises(UnsupportedOption, match="the loss of a row is not the mean over the targets"):
        trainer.train()
