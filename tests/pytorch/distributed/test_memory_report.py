"""An out-of-memory error in training says what held the memory and what would help."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Tagger, make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.byte_sizes import format_mib
from paceline.pytorch.distributed.memory_report import find_activations, recording

VOCABULARY, WIDTH = 512, 16


def make_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


class Deep(nn.Module):
    """Four layers and logits over a vocabulary; fails in training as a device without room does."""

    def __init__(self, fails: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in "1234"
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.fails = fails
        self.calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        if self.fails and not isinstance(hidden, torch._subclasses.FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def notes_of(tmp_path: Path, model: nn.Module, **options: Any) -> str:
    trainer = make_trainer(tmp_path, model, tagging(16), **{"per_device_train_batch_size": 8, **options})
    with pytest.raises((torch.OutOfMemoryError, MemoryError)) as caught:
        trainer.train()
    return "\n".join(getattr(caught.value, "__notes__", []))


def test_the_error_says_what_held_the_memory(tmp_path: Path) -> None:
    model = Deep()
    text = notes_of(tmp_path, model)
    assert all(word in text for word in ("parameters ", "gradients ", "optimizer state ", "layers.*.1 "))
    assert "activations of 8 samples" in text
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=2" in text
    assert "gradient_checkpointing=True" in text
    assert "bf16=True" in text
    assert 'optim="adafactor"' in text
    assert 'optimizer_state_dtype="bfloat16"' in text
    assert "optimizer_in_backward=True, max_grad_norm=0" in text
    assert model.calls == 1  # a copy is run


def test_options_in_use_are_not_offered(tmp_path: Path) -> None:
    text = notes_of(
        tmp_path, Deep(), per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True, optim="sgd"
    )
    assert "activations of 1 samples" in text
    assert not any(word in text for word in ("bf16=True", "gradient_checkpointing=True", "optim=", "batch_size="))


def test_steps_inside_the_backward_pass_hold_the_largest_gradient(tmp_path: Path) -> None:
    text = notes_of(tmp_path, Deep(), optimizer_in_backward=True, max_grad_norm=0)
    largest = VOCABULARY * WIDTH * 4
    assert f"gradients {format_mib(largest)}" in " ".join(text.split())
    assert "optimizer_in_backward" not in text
    assert "optimizer_in_backward" not in notes_of(tmp_path, Deep(), gradient_accumulation_steps=2)


def test_a_search_that_ends_with_one_sample_reports_too(tmp_path: Path) -> None:
    assert "activations of 1 samples" in notes_of(tmp_path, Deep(), auto_find_batch_size=True)


def test_another_error_has_no_report(tmp_path: Path) -> None:
    class Broken(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            raise ValueError("broken")

    trainer = make_trainer(tmp_path, Broken(), tagging(8))
    with pytest.raises(ValueError, match="broken") as caught:
        trainer.train()
    assert not getattr(caught.value, "__notes__", [])


def test_a_model_that_reads_values_is_reported_without_activations(tmp_path: Path) -> None:
    class Reading(Deep):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.num_ids = int(input_ids.sum())
            return super().forward(input_ids, labels)

    text = notes_of(tmp_path, Reading())
    assert "parameters " in text
    assert "Activations come on top" in text


def test_activations_are_those_of_a_real_pass() -> None:
    model = Deep(fails=False)
    batch = {name: torch.randint(0, 9, (4, 12)) for name in ("input_ids", "labels")}
    found = find_activations(model, batch, torch.autocast("cpu", enabled=False))
    with recording(model) as real:
        model(**batch)
    assert found is not None
    assert found.total == real.total
    assert found.by_module == real.by_module
    assert found.of_width(VOCABULARY) >= 4 * 12 * VOCABULARY * 4
    assert found.in_blocks() == (sum(size for name, size in found.by_module.items() if name.startswith("layers.")), 4)


def test_a_model_of_transformers_is_run_without_data() -> None:
    """Tied weights, buffers made in forward and cached ones; the model is left as it was."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0))
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    ids = torch.randint(0, 64, (2, 8))
    found = find_activations(model, {"input_ids": ids, "labels": ids}, torch.autocast("cpu", enabled=False))
    assert found is not None
    twin = copy.deepcopy(model).train()
    with recording(twin) as real:
        twin(input_ids=ids, labels=ids)
    assert found.total == real.total
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert not model._forward_hooks


def test_a_report_that_fails_takes_no_error_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("odd optimizer")

    monkeypatch.setattr("paceline.pytorch.distributed.memory_report.count_memory", fail)
    assert notes_of(tmp_path, Deep()) == ""
    assert "could not be reported: KeyError" in caplog.text
