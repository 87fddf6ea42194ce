"""Tiny models of transformers, made from their configurations, and data for them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def gpt2(dropout: float = 0.0, seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def bert(dropout: float = 0.0, seed: int = 0) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def t5(seed: int = 0) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=31,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return T5ForConditionalGeneration(config)


def bart(seed: int = 0) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=31,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=40,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        init_std=0.3,
        attn_implementation="eager",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BartForConditionalGeneration(config)


def whisper(seed: int = 0) -> Any:
    """Speech: 8 mel bins, 40 frames."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=31,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=40,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


WORDS = [f"word{number}" for number in range(27)]


def tokenizer(padding_side: str = "right") -> Any:
    """Words are tokens; 31 of them with padding (0), end (1), start (2) and unknown (3)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        padding_side=padding_side,
        model_input_names=["input_ids", "attention_mask"],
    )


def ids(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randint(2, 31, size, generator=generator)


def language(num_samples: int = 24, width: int = 8, seed: int = 1) -> list[dict[str, Tensor]]:
    """Token ids; the targets end at a different place in each sample, and one sample has none that counts."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        input_ids = ids(generator, width)
        labels = input_ids.clone()
        labels[1 + (index * 5) % width :] = -100
        samples.append(
            {"input_ids": input_ids, "attention_mask": torch.ones(width, dtype=torch.long), "labels": labels}
        )
    return samples


def sentences(num_samples: int = 24, width: int = 8, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": (tokens := ids(generator, width)),
            "attention_mask": torch.ones(width, dtype=torch.long),
            "labels": tokens[0] % 3,
        }
        for _ in range(num_samples)
    ]


def translations(num_samples: int = 24, width: int = 6, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        labels = ids(generator, width)
        labels[2 + index % (width - 1) :] = -100
        samples.append({"input_ids": ids(generator, width), "labels": labels})
    return samples


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, language),
    "bert": (bert, sentences),
    "t5": (t5, translations),
}
