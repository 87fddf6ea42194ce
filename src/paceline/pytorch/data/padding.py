"""Pads whole rows at once instead of token by token, with the same results as `tokenizer.pad`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.core.optional import require

Row = np.ndarray[Any, np.dtype[np.int64]]
OPTIONS = {"padding", "max_length", "pad_to_multiple_of", "return_tensors"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def pad_features(tokenizer: Any, features: Sequence[Any], **options: Any) -> Any:
    """Returns the batch of `tokenizer.pad(features, **options)`.

    It is computed here if the tokenizer pads like transformers' base class and the samples contain rows of integers.
    Otherwise the tokenizer computes it; its advice to call it on text is suppressed, because samples are tokens.

    Args:
        tokenizer: a tokenizer or any other processor with `pad`.
        features: samples, at least one; lists, tuples, arrays or tensors by name.
        options: the options of `pad`.

    Returns:
        A BatchEncoding of arrays of shape (samples, longest), or the result of the processor's `pad`.
    """
    if options.keys() <= OPTIONS and pads_as_base(tokenizer):
        batch = pad_at_once(tokenizer, features, **options)
        if batch is not None:
            return batch
    told = getattr(tokenizer, "deprecation_warnings", None)
    if not isinstance(told, dict):
        return tokenizer.pad(features, **options)
    key = "Asking-to-pad-a-fast-tokenizer"
    before = told.get(key, False)
    told[key] = True
    try:
        return tokenizer.pad(features, **options)
    finally:
        told[key] = before


def pads_as_base(tokenizer: object) -> bool:
    """Returns True if neither the class nor the object overrides the padding of transformers' tokenizers."""
    return all(is_base_method(tokenizer, name) for name in ("pad", "_pad", "_get_padding_truncation_strategies"))


def is_base_method(tokenizer: object, name: str, owners: Sequence[str] = ("PreTrainedTokenizerBase",)) -> bool:
    """Returns True if a method is inherited unchanged from one of transformers' base tokenizer classes."""
    method = getattr(type(tokenizer), name, None)
    if method is None or name in getattr(tokenizer, "__dict__", ()):
        return False
    is_theirs = str(getattr(method, "__module__", "")).startswith("transformers.tokenization_")
    return is_theirs and getattr(method, "__qualname__", "") in [f"{owner}.{name}" for owner in owners]


def pad_at_once(
    tokenizer: Any,
    features: Sequence[Any],
    padding: bool | str = True,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    return_tensors: str | None = None,
) -> Any:
    """Returns the padded batch in the usual case; None in any other.

    None is also returned for invalid samples, so that the tokenizer raises its own error.
    """
    main = tokenizer.model_input_names[0]
    if return_tensors not in ("pt", "np") or not all(isinstance(sample, Mapping) for sample in features[:1]):
        return None
    try:
        columns = {name: [sample[name] for sample in features] for name in features[0]}
        rows = to_rows(columns[main])
    except (KeyError, IndexError):
        return None
    if rows is None:
        return None
    lengths = [len(row) for row in rows]
    if "attention_mask" in tokenizer.model_input_names:
        columns.setdefault("attention_mask", [np.ones(length, np.int64) for length in lengths])
    fillers = find_fillers(tokenizer, main)
    padded = {name: to_rows(columns[name]) for name in fillers if name in columns and name != main}
    if not all(found is not None and [len(row) for row in found] == lengths for found in padded.values()):
        return None
    strategy, _, max_length, _ = tokenizer._get_padding_truncation_strategies(padding=padding, max_length=max_length)
    width = choose_width(lengths, strategy, max_length, pad_to_multiple_of)
    if width is None or tokenizer.padding_side not in ("left", "right"):
        return None
    is_python = isinstance(columns[main][0], list | tuple)
    batch: dict[str, Any] = {}
    for name, values in columns.items():
        found = rows if name == main else padded.get(name)
        if found is not None:
            filled = fill_rows(found, width, fillers[name], tokenizer.padding_side)
            batch[name] = torch.from_numpy(filled) if return_tensors == "pt" else filled
        else:
            batch[name] = values if is_python else [to_python(value) for value in values]
    return require("transformers", "transformers").BatchEncoding(batch, tensor_type=return_tensors)


def find_fillers(tokenizer: Any, main: str) -> dict[str, Any]:
    """Returns the padding value of each input; other inputs are not padded."""
    fillers = {"token_type_ids": tokenizer.pad_token_type_id, "special_tokens_mask": 1}
    if "attention_mask" in tokenizer.model_input_names:
        fillers["attention_mask"] = 0
    return {**fillers, main: tokenizer.pad_token_id}


def choose_width(lengths: Sequence[int], strategy: object, max_length: int | None, multiple: int | None) -> int | None:
    """Returns the padded length in tokens; None if there is no padding, or a row is longer than that length."""
    width = max(lengths) if strategy == "longest" else max_length
    if width is None or strategy not in ("longest", "max_length"):
        return None
    width = round_up(width, multiple)
    return None if max(lengths) > width else width


def round_up(width: int, multiple: int | None) -> int:
    """Returns `width` rounded up to a multiple; None does not round."""
    return -(-width // multiple) * multiple if multiple else width


def to_rows(values: Sequence[Any]) -> list[Row] | None:
    """Returns rows of integers as int64 arrays; None if the values are anything else, or of several types."""
    first = values[0]
    kind, convert = next((pair for pair in CONVERTERS if isinstance(first, pair[0])), ((), list_to_row))
    if not all(isinstance(value, kind) for value in values):
        return None
    if convert is list_to_row and type(next((row[0] for row in values if len(row)), None)) is not int:
        return None
    rows = [row for value in values if (row := convert(value)) is not None]
    return rows if len(rows) == len(values) else None


def list_to_row(values: Any) -> Row | None:
    """Returns a list as an array, in a third of numpy's time; None if it contains other values than integers."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, OverflowError):
        return None


def array_to_row(values: Any) -> Row | None:
    """Returns the array as int64, without a copy if possible; None for another shape or dtype, or for uint64."""
    if values.ndim != 1 or values.dtype.kind not in "iu" or values.dtype == np.uint64:
        return None
    row: Row = values.astype(np.int64, copy=False)
    return row


def tensor_to_row(values: Any) -> Row | None:
    """Returns a tensor as an int64 array, without a copy if possible; None for another shape, dtype or device."""
    if values.ndim != 1 or values.dtype not in INTEGERS or values.device.type != "cpu":
        return None
    return array_to_row(values.detach().numpy())


CONVERTERS: tuple[tuple[Any, Any], ...] = (
    ((list, tuple), list_to_row),
    (torch.Tensor, tensor_to_row),
    (np.ndarray, array_to_row),
)


def fill_rows(rows: Sequence[Any], width: int, filler: int, side: str) -> Row:
    """Returns the rows as a new int64 array of shape (rows, width), padded on `side`."""
    filled = np.full((len(rows), width), filler, dtype=np.int64)
    if side == "right":
        for target, row in zip(filled, rows, strict=True):
            target[: len(row)] = row
    else:
        for target, row in zip(filled, rows, strict=True):
            target[width - len(row) :] = row
    return filled


def to_python(value: object) -> Any:
    """Converts arrays and tensors to lists and numbers, at any depth."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [to_python(item) for item in value]
    return value


def pad_token_rows(tokenizer: Any, examples: Sequence[Any], return_tensors: str, multiple: int | None = None) -> Any:
    """Pads rows of token ids to the longest row, with the tokenizer's padding token.

    Args:
        tokenizer: has `pad_token_id` and `padding_side`.
        examples: lists, arrays or tensors of token ids.
        return_tensors: `pt` or `np`.
        multiple: round the length up to a multiple of this number.

    Returns:
        The padded rows, (examples, longest); int64, or the dtype of the first array or tensor if transformers keeps it.

    Raises:
        ValueError: padding is required, and the tokenizer has no padding token.
    """
    rows = [np.asarray(row) for row in examples] if (found := to_rows(examples)) is None else found
    longest = max(len(row) for row in rows)
    width = round_up(longest, multiple)
    if any(len(row) < width for row in rows) and tokenizer.pad_token_id is None:
        raise ValueError(
            f"The samples of a batch have {min(map(len, rows))} to {longest} tokens, to be padded to {width}, and "
            f"{type(tokenizer).__name__} has no padding token: set tokenizer.pad_token, for instance to "
            "tokenizer.eos_token."
        )
    filled = fill_rows(rows, width, tokenizer.pad_token_id or 0, tokenizer.padding_side)
    first = examples[0]
    if return_tensors == "np":
        return filled.astype(first.dtype, copy=False) if isinstance(first, np.ndarray) else filled
    tensor = torch.from_numpy(filled)
    return tensor.to(first.dtype) if isinstance(first, torch.Tensor) else tensor
