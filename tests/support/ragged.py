"""Ragged texts, causal models of transformers for them, and a plain module that keeps documents apart."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 61
Sample = dict[str, list[int]]


def texts(num_samples: int = 37, longest: int = 15, seed: int = 0) -> list[Sample]:
    """Samples of 2 to `longest` tokens, whose labels are the tokens."""
    generator = random.Random(seed)
    rows = [
        [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(2, longest))] for _ in range(num_samples)
    ]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def pad(samples: list[Any]) -> dict[str, Tensor]:
    """Collates to rows of the longest sample, padded on the right."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, value: int) -> Tensor:
        return torch.tensor([list(sample[name]) + [value] * (width - len(sample[name])) for sample in samples])

    ones = [{"attention_mask": [1] * len(sample["input_ids"])} for sample in samples]
    mask = torch.tensor([each["attention_mask"] + [0] * (width - len(each["attention_mask"])) for each in ones])
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": mask}


def llama(attention: str = "sdpa", dropout: float = 0.0, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {**sizes, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **options}
    config = LlamaConfig(**settings, pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_dropout=dropout)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def tiny(kind: str, attention: str) -> Any:
    """A model of transformers by the name of its class."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special: dict[str, dict[str, Any]] = {
        "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16},
        "RobertaForMaskedLM": {"pad_token_id": 1},
        "MistralForCausalLM": {"sliding_window": 4, "num_key_value_heads": 1},
    }
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    options = {**sizes, "max_position_embeddings": 64, **tokens, **special.get(kind, {})}
    if "ffn_dim" not in options:
        options["intermediate_size"] = 24
    config = cls.config_class(**options)
    config._attn_implementation = attention
    return cls(config)


class PlainTexts(nn.Module):
    """A causal attention layer over token ids; no config anywhere.

    Args:
        shifted: the loss compares the output at i with the label at i + 1.
    """

    def __init__(self, shifted: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)
        self.shifted = shifted

    def outputs(self, input_ids: Tensor, position_ids: Tensor | None, seen: Tensor | None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.places(places)
        query, key, value = (each[:, None] for each in self.mix(hidden).chunk(3, -1))
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        mixed = functional.scaled_dot_product_attention(query, key, value, causal if seen is None else causal & seen)
        logits: Tensor = self.head(torch.tanh(hidden + mixed[:, 0]))
        return logits

    def with_loss(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        if labels is None:
            return {"logits": logits}
        left, right = (logits[:, :-1], labels[:, 1:]) if self.shifted else (logits, labels)
        return {"loss": functional.cross_entropy(left.flatten(0, 1), right.flatten()), "logits": logits}


class TakesMask(PlainTexts):
    """Keeps documents apart by a mask over pairs of tokens."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attn_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        return self.with_loss(self.outputs(input_ids, position_ids, attn_mask), labels)


class TakesAttentionMask(PlainTexts):
    """Keeps documents apart by a mask over pairs of tokens, (rows, 1, tokens, tokens), which sequence parallelism makes
    for the tokens of each process. Its loss is made of targets that come shifted.
    """

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if attention_mask is not None and attention_mask.dim() == 2:  # padding, of which no token is a target
            attention_mask = None
        outputs = {"logits": self.attend(input_ids, position_ids, attention_mask)}
        if labels is not None or shift_labels is not None:
            if shift_labels is None:
                shift_labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
            outputs["loss"] = functional.cross_entropy(outputs["logits"].flatten(0, 1), shift_labels.flatten())
        return outputs

    def attend(self, input_ids: Tensor, position_ids: Tensor | None, seen: Tensor | None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.places(places)
        query, key, value = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.mix(hidden).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None)
        logits: Tensor = self.head(torch.tanh(hidden + mixed.transpose(1, 2).flatten(-2)))
        return logits


class TakesBounds(PlainTexts):
    """Keeps documents apart by the places where they begin."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        seen = None
        if cu_seqlens is not None:
            sizes = torch.diff(cu_seqlens)
            document = torch.repeat_interleave(torch.arange(len(sizes)), sizes).view(input_ids.shape)
            seen = (document[:, :, None] == document[:, None, :])[:, None]
        return self.with_loss(self.outputs(input_ids, position_ids, seen), labels)


class TakesTokensAlone(PlainTexts):
    """Sees no documents."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return self.with_loss(self.outputs(input_ids, None, None), labels)


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
