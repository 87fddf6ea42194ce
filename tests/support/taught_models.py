"""Small students and teachers with their data, and a callback that keeps the log rows of a run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline import TrainerCallback

TINY = {"vocab_size": 23, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}


class Net(nn.Module):
    """A classifier of vectors, whose outputs are of the given form."""

    def __init__(self, seed: int, width: int = 6, form: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.form = form
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.body(x)))
        if self.form == "tensor":
            return logits
        loss = functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits} if self.form == "dict" else (loss, logits)


def rows(number: int = 24) -> list[dict[str, Tensor]]:
    xs = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": x[:4].argmax()} for x in xs]


def sentences(number: int = 8, padded: int = 0) -> list[dict[str, Tensor]]:
    """Samples of several lengths, with ignored targets; `padded` further positions change no loss."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(number):
        length = 5 + index % 4
        ids = torch.randint(1, 23, (12 + padded,), generator=torch.Generator().manual_seed(index))
        mask = torch.arange(12 + padded) < length
        labels = torch.where(mask, ids, -100)
        labels[: 1 + int(torch.randint(3, (1,), generator=generator))] = -100
        made.append({"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long(), "labels": labels})
    return made


def gpt2(seed: int, width: int = 16) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**TINY, "n_embd": width}, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))  # fmt: skip


def bert(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


class Rows(TrainerCallback):
    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.rows = stop, []  # type: ignore[var-annotated]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.stop
