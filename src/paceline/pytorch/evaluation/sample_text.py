"""Generated text of evaluation samples: prompts from rows, generation with padding on the left, and decoding."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.core.rows import PADDING
from paceline.pytorch.evaluation import sample_cells
from paceline.pytorch.model.generation import (
    check_config,
    check_names,
    find_generator,
    find_pad_token,
    select_inputs,
    with_default_length,
)
from paceline.pytorch.model.objective import accepts

CAUSAL, ENCODER_DECODER = "causal", "encoder-decoder"
IDS = "input_ids"
# options of a generation config that draw, or search; None is their neutral value
DRAWS = (
    "temperature",
    "top_p",
    "top_k",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "penalty_alpha",
    "num_return_sequences",
    "early_stopping",
)


def kind_of(model: nn.Module, batch: object, label_names: Sequence[str]) -> str | None:
    """Returns how a model generates from a batch: "causal" or "encoder-decoder"; None if it does not generate."""
    try:
        generator = find_generator(model)
    except UnsupportedOption:
        return None
    if not isinstance(batch, Mapping):
        return None
    is_encoder_decoder = getattr(getattr(generator, "config", None), "is_encoder_decoder", None)
    ids = batch.get(IDS)
    if is_encoder_decoder or not isinstance(ids, Tensor) or ids.ndim != 2:
        return ENCODER_DECODER
    labels = labels_in(batch, label_names)
    return CAUSAL if is_encoder_decoder is False or labels is None or labels.shape == ids.shape else ENCODER_DECODER


def labels_in(batch: Mapping[str, Any], label_names: Sequence[str]) -> Tensor | None:
    """Returns the target tokens of a batch, shape (samples, length); None without them."""
    found = (batch.get(name) for name in (*label_names, "labels"))
    return next((each for each in found if isinstance(each, Tensor) and each.ndim == 2), None)


def settings_of(model: nn.Module, options: Mapping[str, Any] | None, max_new_tokens: int) -> dict[str, Any]:
    """Returns keyword arguments of `generate`: greedy decoding, or the options over the model's own config.

    Raises:
        ValueError: an option is misspelt, or its value is invalid.
    """
    generator = find_generator(model)
    config = copy.deepcopy(getattr(generator, "generation_config", None))
    if not hasattr(config, "validate"):
        return {"max_new_tokens": max_new_tokens, **(options or {})}
    assert config is not None
    if options is None:
        config.do_sample = False
        for name in DRAWS:
            if hasattr(config, name):
                setattr(config, name, None)
    check_names(options or {}, vars(config))
    for name, value in (options or {}).items():
        setattr(config, name, value)
    if not {"max_new_tokens", "max_length"} & set(options or {}):
        config.max_length, config.max_new_tokens = type(config)().max_length, max_new_tokens
    check_config(config)
    return with_default_length(model, {"generation_config": config})


# ---- prompts


@dataclass(frozen=True)
class Splitter:
    """Splits rows into a prompt and the reference that follows it.

    Attributes:
        kind: "causal": a row holds both, and the labels of a prompt are masked (-100). Without such labels, the first
            `prompt_tokens` are the prompt. "encoder-decoder": the labels are the reference.
        label_names: names of the labels in a batch.
        prompt_tokens: length of a prompt in tokens; None: half of the row.
        most: tokens of a reference to a row without a masked prompt.
        positions: tokens that the model has positions for, of which prompts leave one at least; None: not known.
    """

    kind: str
    label_names: Sequence[str]
    prompt_tokens: int | None
    most: int
    positions: int | None = None

    def rows(self, batch: Mapping[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the token ids of prompt and reference of each sample."""
        ids, labels = batch.get(IDS), labels_in(batch, self.label_names)
        count = next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)
        mask = batch.get("attention_mask")
        is_masked = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape
        for index in range(count):
            tokens = ids[index].tolist() if isinstance(ids, Tensor) and ids.ndim == 2 else []
            keep = mask[index].tolist() if is_masked and mask is not None else [1] * len(tokens)
            targets = labels[index].tolist() if labels is not None else []
            if self.kind == ENCODER_DECODER:
                yield list(picked(tokens, keep)), [each for each in targets if each != PADDING]
            else:
                prompt, reference = self._divided(list(picked(tokens, keep)), list(picked(targets, keep)))
                yield prompt if self.positions is None else prompt[1 - self.positions :], reference

    def _divided(self, tokens: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Returns prompt and reference of a text; of an empty prompt, the first token."""
        first = next((place for place, each in enumerate(targets) if each != PADDING), 0)
        if first:
            last = next((place for place in range(first, len(targets)) if targets[place] == PADDING), len(targets))
            return tokens[:first], tokens[first:last]
        first = min(max(self.prompt_tokens or len(tokens) // 2, 1), len(tokens))
        return tokens[:first], tokens[first : first + self.most]


def picked(values: Iterable[int], keep: Iterable[Any]) -> Iterator[int]:
    """Yields the values that are kept."""
    return (value for value, kept in zip(values, keep, strict=False) if kept)


# ---- generation


def continuations(tools: Any, batch: Mapping[str, Any], settings: Mapping[str, Any], split: Splitter) -> Tensor:
    """Returns the token ids that a model generates for a batch, shape (samples, length), padded with -100.

    Prompts are padded on the left, with a mask, so that each is continued as it would be alone. A model that takes no
    mask gets them one by one.

    Args:
        tools: an `EvaluationTools`.
        batch: on the device.
        settings: keyword arguments of `generate`.
        split: finds the prompts.

    Raises:
        UnsupportedOption: a sharded model takes no mask, and the processes would make different passes.
    """
    if split.kind == ENCODER_DECODER:
        settings = within_positions(settings, tools.model, 1)
        tokens = first_of_each(tools.generate(select_inputs(batch, tools.label_names), settings))
        return torch.cat([tokens[:, :1], ended(tokens[:, 1:], tools)], 1)  # the first one starts the decoder
    ids: Tensor = batch[IDS]
    prompts = [torch.tensor(prompt, device=ids.device, dtype=ids.dtype) for prompt, _ in split.rows(batch)]
    settings = within_positions(settings, tools.model, max(map(len, prompts)))
    others = {
        name: value
        for name, value in select_inputs(batch, tools.label_names).items()
        if not (isinstance(value, Tensor) and value.shape[:2] == ids.shape)
    }
    generator = find_generator(tools.model)
    takes_mask = accepts(generator.forward, "attention_mask") or accepts(generator.generate, "attention_mask")
    if takes_mask:
        length = max(map(len, prompts))
        pad = find_pad_token(tools.processing_class, tools.model) or 0
        padded = torch.stack([nn.functional.pad(each, (length - len(each), 0), value=pad) for each in prompts])
        mask = torch.stack(
            [nn.functional.pad(torch.ones_like(each), (length - len(each), 0), value=0) for each in prompts]
        )
        inputs = {**others, IDS: padded, "attention_mask": mask}
        return ended(first_of_each(tools.generate(inputs, settings))[:, length:], tools)
    if tools.shards:
        raise UnsupportedOption(
            f"EvaluationSamples of a sharded {type(generator).__name__}, which takes no attention_mask, is not "
            "supported: train replicas instead, or leave the samples out."
        )
    rows = [
        first_of_each(tools.generate({**row_of(others, index), IDS: each[None]}, settings))[0, len(each) :]
        for index, each in enumerate(prompts)
    ]
    return ended(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING), tools)


def num_positions(model: nn.Module) -> int | None:
    """Returns the number of tokens that a model of transformers has positions for; None if it is not known."""
    config: Any = getattr(find_generator(model), "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 1 else None


def within_positions(settings: Mapping[str, Any], model: nn.Module, length: int) -> Mapping[str, Any]:
    """Returns keyword arguments of `generate` that end before the model's positions do, after `length` tokens."""
    config, most = settings.get("generation_config"), num_positions(model)
    asked = getattr(config, "max_new_tokens", None)
    if most is None or asked is None or length + asked <= most:
        return settings
    config = copy.deepcopy(config)
    assert config is not None
    config.max_new_tokens = max(most - length, 1)
    return {**settings, "generation_config": config}


def row_of(inputs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns the inputs of one sample as a batch."""
    return {name: value[index : index + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def first_of_each(tokens: Tensor) -> Tensor:
    """Returns the first of several sequences per sample, shape (samples, length)."""
    return tokens[:, 0] if tokens.ndim == 3 else tokens


def ended(tokens: Tensor, tools: Any) -> Tensor:
    """Returns rows of token ids whose tokens after an end token are -100."""
    config = getattr(find_generator(tools.model), "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    if not ends or not tokens.numel():
        return tokens
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device, dtype=tokens.dtype)).long()
    return tokens.masked_fill(is_end.cumsum(1) - is_end > 0, PADDING)


# ---- decoding


class Reader:
    """Turns token ids and class numbers into text.

    Args:
        processing_class: a tokenizer, or a processor with one; None: token ids are shown as numbers.
        model: its config may name the classes.
    """

    def __init__(self, processing_class: object, model: nn.Module) -> None:
        decoder: Any = processing_class if callable(getattr(processing_class, "decode", None)) else None
        self.decoder: Any = decoder or getattr(processing_class, "tokenizer", None)
        names = getattr(getattr(model, "config", None), "id2label", None)
        self.names: Mapping[int, str] = names if isinstance(names, Mapping) else {}

    @property
    def has_decoder(self) -> bool:
        """True if tokens have texts."""
        return self.decoder is not None

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids; -100 is skipped."""
        kept = [int(token) for token in tokens if int(token) != PADDING]
        if not callable(getattr(self.decoder, "decode", None)):
            return sample_cells.shortened(" ".join(map(str, kept)))
        assert self.decoder is not None
        return sample_cells.shortened(str(self.decoder.decode(kept, skip_special_tokens=True)))

    def answer(self, tokens: np.ndarray) -> str:
        """Returns the text of a generated row, shape (length,) or (sequences, length)."""
        return self.text((tokens[0] if tokens.ndim == 2 else tokens).tolist())

    def input(self, value: object, row: object) -> str:
        """Returns the input of a model as text: texts of the row, decoded tokens, or numbers."""
        own = sample_cells.input_of(row)
        if own or not isinstance(value, np.ndarray):
            return own
        is_tokens = self.decoder is not None and value.ndim == 1 and value.dtype.kind in "iu"
        return self.text(value.tolist()) if is_tokens else sample_cells.numbers(value)

    def name(self, number: int) -> str | int:
        """Returns the name of a class, or its number without one."""
        return self.names.get(number, number)
