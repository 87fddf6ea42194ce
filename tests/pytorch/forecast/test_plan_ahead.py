"""`Trainer.plan`: what a run will take, without an effect on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging, weights
from torch import nn

from paceline import Trainer, UnsupportedOption
from paceline.pytorch import parts
from paceline.pytorch.short_runs import module_memory

WITHIN = 0.10


class Perceptron(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    forward = Perceptron.forward


def vectors() -> list[Any]:
    return [{"x": torch.randn(32), "labels": index % 10} for index in range(256)]


def images() -> list[Any]:
    return [{"x": torch.randn(3, 32, 32), "labels": index % 10} for index in range(64)]


def texts() -> list[Any]:
    return [{"input_ids": (ids := torch.randint(0, 500, (32,))), "labels": ids} for _ in range(64)]


def labelled() -> list[Any]:
    return [{"input_ids": torch.randint(0, 500, (32,)), "labels": index % 2} for index in range(64)]


def bert(head: str, frozen: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=500
    )
    model: nn.Module = getattr(transformers, f"BertFor{head}")(config)
    for parameter in model.bert.parameters() if frozen else ():
        parameter.requires_grad_(False)
    return model


def gpt(adapted: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=500)
    )
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=500))


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32, "vocab_size": 500}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


Case = tuple[Callable[[], nn.Module], Callable[[], list[Any]], int, dict[str, Any]]
CASES: dict[str, Case] = {
    "perceptron, small batch": (Perceptron, vectors, 8, {}),
    "perceptron, large batch": (Perceptron, vectors, 64, {}),
    "perceptron, SGD": (Perceptron, vectors, 8, {"optim": "sgd"}),
    "perceptron, Adafactor": (Perceptron, vectors, 8, {"optim": "adafactor"}),
    "perceptron, adamw_torch": (Perceptron, vectors, 8, {"optim": "adamw_torch"}),
    "perceptron, bf16": (Perceptron, vectors, 32, {"bf16": True}),
    "perceptron, not clipped": (Perceptron, vectors, 32, {"max_grad_norm": 0}),
    "perceptron, accumulation": (Perceptron, vectors, 16, {"gradient_accumulation_steps": 4}),
    "convolutions": (Convolutions, images, 16, {}),
    "convolutions, SGD": (Convolutions, images, 8, {"optim": "sgd"}),
    "GPT-2": (gpt, texts, 8, {}),
    "GPT-2, checkpointing": (gpt, texts, 8, {"gradient_checkpointing": True}),
    "GPT-2, activation checkpointing": (gpt, texts, 8, {"activation_checkpointing": True}),
    "GPT-2, bf16": (gpt, texts, 8, {"bf16": True}),
    "GPT-2, LoRA": (lambda: gpt(True), texts, 8, {}),
    "Llama": (llama, texts, 8, {}),
    "BERT, masked": (lambda: bert("MaskedLM"), texts, 8, {}),
    "BERT, classification": (lambda: bert("SequenceClassification"), labelled, 8, {}),
    "BERT, frozen": (lambda: bert("SequenceClassification", True), labelled, 8, {}),
    "T5": (t5, texts, 8, {}),
}


class ThirdStep(module_memory.MemoryWatch):
    """Watches the third step, which makes no pass that probes the loss, over all of its micro-batches."""

    handle: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        if state.global_step != 2:
            return

        def forget(module: nn.Module, _: Any) -> None:
            if module is model and self._tracker is not None:
                self._tracker.reset_mod_stats()

        self.handle = nn.modules.module.register_module_forward_pre_hook(forget)
        state.global_step = 1
        super().on_step_begin(args, state, control, model, **kwargs)
        state.global_step = 2

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        if self.handle is not None:
            self.handle.remove()


def measured(trainer: Trainer) -> int:
    watch = ThirdStep(trainer.strategy.device)
    parts.try_run(trainer, {"max_steps": 3, "loss_weight": "samples"}, watch)
    assert watch.found is not None
    return watch.found.peak


def ratio(name: str, folder: Path) -> float:
    make, data, size, options = CASES[name]
    torch.manual_seed(0)
    trainer = make_trainer(folder, make(), data(), per_device_train_batch_size=size, **options)
    memory = trainer.plan().memory
    assert memory is not None
    return memory.peak / measured(trainer)


@pytest.mark.parametrize("name", ["perceptron, small batch", "perceptron, accumulation", "convolutions"])
def test_the_peak_is_that_of_a_step(name: str, tmp_path: Path) -> None:
    assert ratio(name, tmp_path) == pytest.approx(1, abs=WITHIN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_many_models(name: str, tmp_path: Path) -> None:
    found = ratio(name, tmp_path)
    print(f"{name}: predicted / measured = {found:.3f}")
    assert found == pytest.approx(1, abs=WITHIN)


def test_nothing_remains_of_it(tmp_path: Path) -> None:
    runs = []
    for is_planned in (False, True):
        trainer = make_trainer(tmp_path, Tagger(dropout=0.2), tagging(24), gradient_accumulation_steps=2)
        torch.manual_seed(7)
        if is_planned:
            before = torch.get_rng_state()
            trainer.plan(time=True)
            assert torch.equal(before, torch.get_rng_state())
            assert trainer.optimizer is None
            assert not list(tmp_path.iterdir())
        trainer.train()
        runs.append((losses(trainer), weights(trainer.model)))
        for path in tmp_path.iterdir():
            path.unlink()
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_sizes_of_checkpoints_and_evaluations(tmp_path: Path) -> None:
    model, data = Classifier(), classification(48)
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, "eval_strategy": "steps"}
    trainer = make_trainer(
        tmp_path, model, data, eval_dataset=data[:10], eval_steps=4, per_device_eval_batch_size=4, **options
    )
    found = trainer.plan()
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert (found.plan.max_steps, found.samples) == (12, 48)
    assert (found.disk.weights, found.disk.num_saves, found.disk.num_kept) == (size, 6, 4)
    assert found.disk.optimizer == pytest.approx(2 * size, abs=64)
    assert found.disk.journal == 12 * 60
    assert (found.evaluations.number, found.evaluations.samples, found.evaluations.batches) == (3, 10, 3)
    assert found.seconds_per_step is None
    assert "peak of a step" in str(found)
    assert "eval_steps" in found.changed
    assert "seed" not in found.changed
    trainer.train()
    trainer.save_model()
    taken = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert found.disk.total is not None
    assert taken <= found.disk.total


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    class Reading(Classifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            assert float(x.sum()) != 12345.0
            return super().forward(x, labels)

    found = make_trainer(tmp_path, Reading(), classification(8)).plan()
    assert found.memory is None
    assert "measure_memory() measures it" in str(found)
    once = make_trainer(tmp_path, Classifier(), iter(classification(8)), max_steps=2)
    with pytest.raises(UnsupportedOption, match="read only once"):
        once.plan()
