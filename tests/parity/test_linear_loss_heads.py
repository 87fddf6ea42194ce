"""`linear_cross_entropy=True` with heads of transformers: loss and gradient of the logits' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_trainer

from paceline import Trainer

transformers = pytest.importorskip("transformers")

CLASSES = 97
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ENCODER = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0}
BOTH = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
BOTH |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
HEADS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {**BOTH, "dropout": 0.0},
    "BertForMaskedLM": ENCODER,
    "CohereForCausalLM": DECODER,  # scales its logits
    "Gemma2ForCausalLM": {**DECODER, "head_dim": 8, "final_logit_softcapping": 5.0},
    "GPT2LMHeadModel": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "GraniteForCausalLM": {**DECODER, "logits_scaling": 3.0},
    "LlamaForCausalLM": {**DECODER, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": DECODER,
    "RobertaForMaskedLM": ENCODER,
    "T5ForConditionalGeneration": {
        "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip


class KeepsGradients(Trainer):
    """Keeps the gradients of the one step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.gradient = torch.cat([gradient.detach().flatten() for gradient in gradients])
        return loss


def step(folder: Path, name: str, by_chunks: bool) -> tuple[float, torch.Tensor]:
    """Returns loss and gradient of one step of a tiny model."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(vocab_size=CLASSES, **HEADS[name]))
    generator = torch.Generator().manual_seed(1)
    data = []
    for _ in range(4):
        ids = torch.randint(3, CLASSES, (12,), generator=generator)
        labels = torch.where(torch.rand(12, generator=generator) < 0.5, ids, -100)
        data.append({"input_ids": ids, "labels": labels})
    trainer = make_trainer(folder, model, data, cls=KeepsGradients, max_steps=1, linear_cross_entropy=by_chunks)
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.gradient


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradient_are_those_with_logits(tmp_path: Path, name: str) -> None:
    loss, gradient = step(tmp_path / "logits", name, by_chunks=False)
    by_chunks, chunked = step(tmp_path / "chunks", name, by_chunks=True)
    assert by_chunks == pytest.approx(loss, rel=1e-6)
    # of the whole: some parameters have a gradient of rounding errors alone, as the biases of keys
    assert float((chunked - gradient).norm() / gradient.norm()) < 1e-5
