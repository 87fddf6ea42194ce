"""Collators for language modelling: next-token prediction, masked tokens, masked words, permutations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from paceline.pytorch.data.collators import DataCollatorMixin, take_column
from paceline.pytorch.data.padding import fill_rows, is_base_method, pad_features, pad_token_rows

Mask = NDArray[np.bool_]
IGNORED = -100  # the label that losses ignore
REPLACING_BY_DEFAULT = (0.8, 0.1)
# transformers classes whose get_special_tokens_mask looks ids up in all_special_ids
LOOK_UP_IDS = ("PreTrainedTokenizerBase", "PythonBackend", "PreTrainedTokenizer")


@dataclass
class DataCollatorForLanguageModeling(DataCollatorMixin):
    """Pads texts and makes the labels of language modelling: masked tokens (`mlm=True`), or the tokens themselves.

    Samples are dicts (or BatchEncodings) with `input_ids`, or rows of token ids. `labels` of the samples are replaced.
    With `special_tokens_mask` in the samples (`return_special_tokens_mask=True`) no lookup of special tokens is
    needed. For the same generator state, masks equal those of transformers.

    With a `seed`, the collator has its own generator, a different one in each worker process, which restarts when a run
    is resumed. Without a `seed`, masks come from the global generators, whose state a resumed run restores.

    Attributes:
        tokenizer: has `pad`, `mask_token`, `pad_token_id`, and a length.
        mlm: mask tokens; otherwise the labels are the inputs, with padding ignored.
        whole_word_mask: mask all tokens of a word or none. Words are derived from `offset_mapping` of the samples
            (`return_offsets_mapping=True`). All masked tokens become the mask token, regardless of `mask_replace_prob`
            and `random_replace_prob`; a warning is issued if these are not the defaults.
        mlm_probability: probability that a token, or word, is masked.
        mask_replace_prob: share of the masked tokens that become the mask token.
        random_replace_prob: share of the masked tokens that become a random token. The rest is unchanged.
        pad_to_multiple_of: round the length up to a multiple, for tensor cores and fewer compilations.
        return_tensors: `pt` or `np`.
        seed: the seed of the masks; None: the global generator of torch or numpy is used.

    Raises:
        ValueError: a probability is outside 0 to 1, the tokenizer has no mask token, or offsets are missing for words.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.mlm:
            check_mask_token(self.tokenizer, "mlm=True", "or set mlm=False to learn to predict the next token")
            self.mlm_probability = check_share("mlm_probability", self.mlm_probability)
        elif self.whole_word_mask:
            raise ValueError("whole_word_mask=True masks tokens, and mlm=False masks none: set mlm=True.")
        self.mask_replace_prob = check_share("mask_replace_prob", self.mask_replace_prob)
        self.random_replace_prob = check_share("random_replace_prob", self.random_replace_prob)
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob} and random_replace_prob={self.random_replace_prob} are "
                "shares of the same tokens: lower one, so that they add up to 1 or less."
            )
        if self.whole_word_mask:
            self._mask_all()
        self.generator: Any = None

    def _mask_all(self) -> None:
        """Sets the shares for whole words, which are always replaced by mask tokens."""
        shares = (self.mask_replace_prob, self.random_replace_prob)
        if shares not in ((1.0, 0.0), REPLACING_BY_DEFAULT):
            warnings.warn(
                f"whole_word_mask=True: mask_replace_prob={shares[0]} is taken as 1, random_replace_prob={shares[1]} "
                "as 0; a masked word becomes mask tokens.",
                UserWarning,
                stacklevel=4,
            )
        self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0

    def get_generator(self, seed: int, return_tensors: str | None = None) -> Any:
        """Returns a new generator: torch's for tensors, numpy's for arrays."""
        kind = return_tensors or self.return_tensors
        return torch.Generator().manual_seed(seed) if kind == "pt" else np.random.default_rng(seed)

    def create_rng(self, return_tensors: str | None = None) -> None:
        """Creates the generator from `seed` plus the worker id in worker processes."""
        worker = get_worker_info()
        seed = (self.seed or 0) + (0 if worker is None else worker.id)
        self.generator = self.get_generator(seed, return_tensors)

    def collate(self, examples: Sequence[Any], kind: str) -> Any:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        if self.seed is not None and self.generator is None:
            self.create_rng(kind)
        batch, offsets = self._pad(examples, kind)
        specials = batch.pop("special_tokens_mask", None)
        ids = batch["input_ids"]
        if self.mlm:
            mask_tokens = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
            batch["input_ids"], batch["labels"] = mask_tokens(ids, special_tokens_mask=specials, offset_mapping=offsets)
            return batch
        labels = ids.clone() if kind == "pt" else ids.copy()
        if self.tokenizer.pad_token_id is not None:
            labels[labels == self.tokenizer.pad_token_id] = IGNORED
        batch["labels"] = labels
        return batch

    def _pad(self, examples: Sequence[Any], kind: str) -> tuple[Any, NDArray[np.int64] | None]:
        """Returns the padded inputs, and with whole words the token offsets, (samples, longest, 2), else None."""
        if not isinstance(examples[0], Mapping):
            return {"input_ids": pad_token_rows(self.tokenizer, examples, kind, self.pad_to_multiple_of)}, None
        unused = ("labels", "offset_mapping")
        batch = pad_features(
            self.tokenizer,
            [{name: value for name, value in example.items() if name not in unused} for example in examples],
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=kind,
        )
        if not self.whole_word_mask or "offset_mapping" not in examples[0]:
            return batch, None
        rows = [np.asarray(example["offset_mapping"]).reshape(-1, 2) for example in examples]
        width, side = batch["input_ids"].shape[1], self.tokenizer.padding_side
        return batch, np.stack([fill_rows([row[:, end] for row in rows], width, 0, side) for end in (0, 1)], axis=2)

    def torch_mask_tokens(
        self,
        inputs: Any,
        special_tokens_mask: object = None,
        offset_mapping: object = None,
    ) -> tuple[Any, Any]:
        """Masks a batch.

        Args:
            inputs: token ids, int64 of shape (samples, longest); changed in place.
            special_tokens_mask: 1 for tokens that are never masked; None: the tokenizer's special tokens.
            offset_mapping: the start and end of each token in the text, (samples, longest, 2); for whole words only.

        Returns:
            The masked inputs, and the labels: the original token if it was masked, else -100.
        """
        fixed, words = self._find_fixed(inputs, special_tokens_mask, offset_mapping)
        odds = torch.full(inputs.shape, self.mlm_probability or 0.0).masked_fill_(torch.from_numpy(fixed), 0.0)
        masked = torch.bernoulli(odds, generator=self.generator).bool()
        if words is not None:
            masked = torch.from_numpy(spread_over_words(words, masked.numpy()))
        labels = inputs.masked_fill(~masked, IGNORED)
        replaced = self._draw_tensor(inputs, self.mask_replace_prob) & masked
        inputs.masked_fill_(replaced, self.tokenizer.mask_token_id)
        if self.mask_replace_prob < 1 and self.random_replace_prob > 0:
            share = self.random_replace_prob / (1 - self.mask_replace_prob)
            chosen = self._draw_tensor(inputs, share) & masked & ~replaced
            tokens = torch.randint(len(self.tokenizer), inputs.shape, generator=self.generator)
            inputs[chosen] = tokens[chosen].to(inputs.dtype)
        return inputs, labels

    def _draw_tensor(self, like: Tensor, share: float) -> Tensor:
        # a tensor of probabilities: with a plain number torch draws differently, and masks differ from transformers'
        return torch.bernoulli(torch.full(like.shape, share), generator=self.generator).bool()

    @staticmethod
    def _calc_word_ids_and_prob_mask(offsets: object, special_tokens_mask: object) -> tuple[Any, Any]:
        """Returns each token's word, -1 for none, and the mask of tokens that may not start a mask; for overrides."""
        words, starts = find_words(np.asarray(offsets), np.asarray(special_tokens_mask).astype(bool))
        return np.where(words == 0, -1, words), ~starts

    @staticmethod
    def _whole_word_mask(word_ids: Any, mask: Any) -> Any:
        """Returns the mask extended to all tokens of each partly masked word; for overrides."""
        return spread_over_words(np.maximum(word_ids, 0), np.asarray(mask))

    def numpy_mask_tokens(
        self,
        inputs: Any,
        special_tokens_mask: object = None,
        offset_mapping: object = None,
    ) -> tuple[Any, Any]:
        """Masks arrays like `torch_mask_tokens`, with numpy's generator."""
        fixed, words = self._find_fixed(inputs, special_tokens_mask, offset_mapping)
        odds = np.where(fixed, 0.0, self.mlm_probability or 0.0)
        generator = self.generator or np.random
        masked = generator.binomial(1, odds, size=odds.shape).astype(bool)
        if words is not None:
            masked = spread_over_words(words, masked)
        labels = np.where(masked, inputs, IGNORED)
        replaced = generator.binomial(1, self.mask_replace_prob, size=inputs.shape).astype(bool) & masked
        inputs[replaced] = self.tokenizer.mask_token_id
        if self.mask_replace_prob < 1 and self.random_replace_prob > 0:
            share = self.random_replace_prob / (1 - self.mask_replace_prob)
            chosen = generator.binomial(1, share, size=inputs.shape).astype(bool) & masked & ~replaced
            draw = np.random.randint if self.generator is None else self.generator.integers
            inputs[chosen] = draw(0, len(self.tokenizer), size=np.count_nonzero(chosen), dtype=np.int64)
        return inputs, labels

    def _find_fixed(self, inputs: object, specials: object, offsets: object) -> tuple[Mask, NDArray[np.int64] | None]:
        """Returns a mask of the tokens at which no masking may start, and with whole words the word of each token."""
        fixed = find_special(self.tokenizer, inputs) if specials is None else np.asarray(specials).astype(bool)
        if not self.whole_word_mask:
            return fixed, None
        if offsets is None:
            raise ValueError(
                "whole_word_mask=True needs 'offset_mapping' in every sample: call the tokenizer with "
                "return_offsets_mapping=True, and keep that column (remove_unused_columns=False)."
            )
        words, starts = find_words(np.asarray(offsets), fixed)
        return ~starts, words


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """A `DataCollatorForLanguageModeling` with `whole_word_mask=True`; the class of transformers until 4.57."""

    whole_word_mask: bool = True

    def __post_init__(self) -> None:
        self.whole_word_mask = True
        super().__post_init__()


@dataclass
class DataCollatorForSOP(DataCollatorForLanguageModeling):
    """A `DataCollatorForLanguageModeling` with sentence order labels; in transformers until 4.57.

    Samples are dicts with `input_ids`, `token_type_ids` and `sentence_order_label`, an integer. The batch has
    `sentence_order_label` as int64 of shape (samples,). Only padding is excluded from the attention; transformers
    excluded masked tokens too.
    """

    def collate(self, examples: Sequence[Any], kind: str) -> Any:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        name = "sentence_order_label"
        orders = np.array([int(order) for order in take_column(examples, name)], dtype=np.int64)
        rest = [{key: value for key, value in example.items() if key != name} for example in examples]
        batch = super().collate(rest, kind)
        batch[name] = torch.from_numpy(orders) if kind == "pt" else orders
        return batch


@dataclass
class DataCollatorForPermutationLanguageModeling(DataCollatorMixin):
    """Masks spans of tokens and draws the order in which they are predicted, for XLNet.

    Samples are dicts with `input_ids`, or rows of token ids; their padded length must be even. The batch has
    `input_ids` and `labels` (int64, (samples, length)), `perm_mask` (1 if the token of the row must not attend to the
    token of the column) and `target_mapping` (the identity), both float32 of shape (samples, length, length). Tensors
    equal those of transformers for the same state of torch's global generator. Arrays are drawn from numpy's global
    generator; there transformers' spans are up to `max_span_length + 1` long.

    Attributes:
        tokenizer: has `mask_token`, `pad_token_id`, `padding_side`.
        plm_probability: approximate share of masked tokens: a span of n tokens is masked in every n / share tokens.
        max_span_length: in tokens.
        return_tensors: `pt` or `np`.

    Raises:
        ValueError: the tokenizer has no mask token, or the length is odd.
    """

    tokenizer: Any
    plm_probability: float = 1 / 6
    max_span_length: int = 5
    return_tensors: str = "pt"

    def collate(self, examples: Sequence[Any], kind: str) -> dict[str, Any]:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        rows = [example["input_ids"] for example in examples] if isinstance(examples[0], Mapping) else examples
        mask_tokens = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
        names = ("input_ids", "perm_mask", "target_mapping", "labels")
        return dict(zip(names, mask_tokens(pad_token_rows(self.tokenizer, rows, kind)), strict=True))

    def torch_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """Returns inputs, perm_mask, target_mapping and labels of a batch of token ids."""
        cell = torch.empty(1, dtype=torch.int64)  # reused: takes half the time of a new tensor for each number
        masked = self._mask_spans(inputs, lambda low, high: int(cell.random_(low, high)))
        num_samples, half = inputs.shape[0], inputs.shape[1] // 2
        orders = torch.stack([torch.randperm(half) for _ in range(num_samples)]).numpy()
        arrays = self._finish(inputs.numpy().astype(np.int64), masked, orders)
        return tuple(map(torch.from_numpy, arrays))  # type: ignore[return-value]

    def numpy_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """Masks arrays like `torch_mask_tokens`, with numpy's global generator."""
        masked = self._mask_spans(inputs, lambda low, high: int(np.random.randint(low, high)))
        orders = np.stack([np.random.permutation(inputs.shape[1] // 2) for _ in range(len(inputs))])
        return self._finish(inputs.astype(np.int64), masked, orders)

    def _mask_spans(self, inputs: Any, draw: Any) -> Mask:
        """Returns a mask of spans at random positions; `draw(low, high)` returns an integer in [low, high)."""
        check_mask_token(self.tokenizer, type(self).__name__, "or use another collator")
        num_samples, length = inputs.shape
        if length % 2:
            raise ValueError(
                f"A batch of permutation language modelling is {length} tokens long; the halves of a text are permuted "
                "apart, which needs an even number: cut or pad the texts to an even length."
            )
        masked = np.zeros((num_samples, length), dtype=bool)
        for row in masked:
            done = 0
            while done < length:
                span = draw(1, self.max_span_length + 1)
                context = int(span / self.plm_probability)
                start = done + draw(0, context - span + 1)
                row[start : start + span] = True
                done += context
        return masked

    def _finish(self, inputs: NDArray[np.int64], masked: Mask, orders: NDArray[np.int64]) -> tuple[Any, Any, Any, Any]:
        """Returns inputs, perm_mask, target_mapping and labels.

        Args:
            inputs: token ids, (samples, length).
            masked: the masked spans.
            orders: a permutation of half the length for each sample.
        """
        num_samples, length = inputs.shape
        functional = find_special(self.tokenizer, inputs)
        if self.tokenizer.pad_token_id is not None:
            functional |= inputs == self.tokenizer.pad_token_id
        masked &= ~functional
        labels = np.where(masked, inputs, IGNORED)
        inputs = np.where(masked, self.tokenizer.mask_token_id, inputs)
        ranks = np.concatenate([orders, orders + length // 2], axis=1)
        ranks[~masked & ~functional] = -1  # visible to all tokens, and sees no masked token
        may_not_see = ranks[:, :, None] <= ranks[:, None, :]
        may_not_see &= masked[:, None, :]
        same_place = np.broadcast_to(np.eye(length, dtype=np.float32), (num_samples, length, length)).copy()
        return inputs, may_not_see.astype(np.float32), same_place, labels


def check_share(name: str, value: float | None) -> float:
    """Returns a probability as float.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if value is None or not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not a probability: expected a value from 0 to 1.")
    return float(value)


def check_mask_token(tokenizer: Any, option: str, otherwise: str) -> None:
    """Checks that a tokenizer has a mask token.

    Raises:
        ValueError: it has none.
    """
    if tokenizer.mask_token is None:
        raise ValueError(
            f"{option} needs a mask token and {type(tokenizer).__name__} has none: add one "
            f'(tokenizer.add_special_tokens({{"mask_token": "<mask>"}}), and resize the embeddings), {otherwise}.'
        )


def find_special(tokenizer: Any, inputs: Any) -> Mask:
    """Returns a mask of the tokenizer's special tokens in a batch of token ids, (samples, longest)."""
    if is_base_method(tokenizer, "get_special_tokens_mask", LOOK_UP_IDS):
        return np.isin(np.asarray(inputs), tokenizer.all_special_ids)
    rows = [tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in inputs.tolist()]
    return np.array(rows, dtype=bool)


def find_words(offsets: NDArray[np.int64], special: Mask) -> tuple[NDArray[np.int64], Mask]:
    """Returns the word of each token.

    A token starts a word if it follows a gap in the text or a special token.

    Args:
        offsets: starts and ends of tokens in the text, (samples, longest, 2).
        special: mask of the tokens that belong to no word.

    Returns:
        The number of each token's word in its row (0 if it has none), and a mask of the first tokens of words.
    """
    starts = np.ones(special.shape, dtype=bool)
    starts[:, 1:] = (offsets[:, 1:, 0] != offsets[:, :-1, 1]) | special[:, :-1]
    starts &= ~special
    words = np.cumsum(starts, axis=1)
    words[special] = 0
    return words, starts


def spread_over_words(words: NDArray[np.int64], masked: Mask) -> Mask:
    """Returns the mask extended to all tokens of each word with a masked token.

    Args:
        words: word numbers from `find_words`.
        masked: masked tokens.
    """
    rows = np.arange(len(words))[:, None]
    chosen = np.zeros((len(words), words.shape[1] + 1), dtype=bool)
    chosen[np.broadcast_to(rows, words.shape)[masked], words[masked]] = True
    chosen[:, 0] = False
    found: Mask = chosen[rows, words]
    return found
