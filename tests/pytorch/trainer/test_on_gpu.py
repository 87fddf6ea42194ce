"""Options of speed and memory on a CUDA device: the numbers of the plain run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import llama, pad, texts
from small_models import losses, make_trainer

from paceline import Trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"packing": "pack"},
    "flattened": {"packing": "flatten"},
    "without logits": {"linear_cross_entropy": True},
    "checkpointed": {"activation_checkpointing": True},
    "offloaded": {"activation_offload": True},
    "stepped in the backward pass": {"optimizer_in_backward": True},
    "compiled": {"torch_compile": True},
    "CUDA graphs": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
    "timed": {"log_flops": True, "log_resources": True, "profile": "steps=2,snapshot"},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch, when it compiles
]


def train(folder: Path, **options: Any) -> Trainer:
    """Three optimizer steps on texts whose activations are large enough to be offloaded."""
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    pytest.importorskip("transformers")
    model = llama(hidden_size=64, max_position_embeddings=256)
    trainer = make_trainer(
        folder, model, texts(24, longest=200), eval_dataset=texts(8, longest=200, seed=1), data_collator=pad,
        use_cpu=False, max_steps=3, max_grad_norm=0.0, per_device_train_batch_size=8, learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", OPTIONS)
def test_the_numbers_are_those_of_the_plain_run(tmp_path: Path, name: str) -> None:
    plain = train(tmp_path / "plain", linear_cross_entropy=False)
    found = train(tmp_path / "found", **{"linear_cross_entropy": False, **OPTIONS[name]})
    assert losses(found) == pytest.approx(losses(plain), rel=1e-4)
    assert found.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)


def test_the_numbers_by_the_kernel_of_liger_are_those_of_the_plain_run(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    plain, found = (train(tmp_path / str(option), linear_cross_entropy=option) for option in (False, "liger"))
    assert losses(found) == pytest.approx(losses(plain), rel=1e-4)
    assert found.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_kernels_for_documents(tmp_path: Path, attention: str) -> None:
    """Rows of several documents have the losses of padded batches, to the rounding of 16 bits."""
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    if attention.startswith("flash"):
        pytest.importorskip("flash_attn")
    found = []
    for number, packing in enumerate((None, "pack")):
        model = llama(hidden_size=64, max_position_embeddings=256).bfloat16()
        model.set_attn_implementation(attention)
        trainer = make_trainer(
            tmp_path / str(number), model, texts(24, longest=200), data_collator=pad, use_cpu=False, bf16=True,
            max_steps=3, per_device_train_batch_size=8, packing=packing,
        )  # fmt: skip
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=2e-2)
