"""Tokenizes text data into rows, or into blocks of equal length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, suggest
from paceline.cli.job_data import Splits, map_rows
from paceline.core.likely_label import find_likely_label

logger = logging.getLogger(__name__)

LONGEST_DEFAULT = 1024
LABEL_NAMES = ("label", "labels")
BLOCKS_PER_CALL = 256  # the remainder of each call is dropped: half a block in 256 on average


def tokenize(
    config: JobConfig,
    splits: Splits,
    model: object,
    tokenizer: object,
    inputs: Iterable[str],
    makes_blocks: bool = True,
) -> bool:
    """Converts text columns to token ids if the data has text and no ids.

    With a label column each row is one sample, truncated at `block_size`. Without one, the rows are concatenated and
    split into blocks, and the labels are the tokens themselves.

    Args:
        model: a model of any framework; only its `config` (if any) and its class name are read.
        inputs: the model's input columns; data with one of them is not tokenized.
        makes_blocks: True if the model compares each output with the next label, or is a masked language model. Other
            models need labels.

    Returns:
        True if the samples are blocks of equal length.

    Raises:
        UsageError: there is no tokenizer, no such column, too little text for one block, or no labels for a model
            that is not a language model.
    """
    section = config.get("data")
    settings = section if isinstance(section, Mapping) and "factory" not in section else {}
    inputs = {"input_ids", *inputs} - {*LABEL_NAMES, "text"}
    is_blocks = False
    for name, dataset in splits.given().items():
        column = find_text_column(dataset, settings.get("text_column"), inputs)
        if column is None:
            continue
        if tokenizer is None:
            if settings.get("text_column") is None and settings.get("block_size") is None:
                continue  # the model or the collator may take text
            raise UsageError("data: text has to be tokenized, and there is no tokenizer; give 'tokenizer'")
        size = find_block_size(settings.get("block_size"), model, tokenizer)
        num_proc = settings.get("num_proc")
        if any(label in dataset.column_names for label in LABEL_NAMES):
            check_labels(dataset, name)
            ensure_padding(tokenizer, model)
            cut = RowTokenizer(tokenizer, column, size)
            dataset = map_rows(dataset, cut, f"Tokenizing {name}", num_proc, [column], batched=True)
        elif not makes_blocks:
            raise UsageError(describe_unlabelled(dataset, name, model))
        else:
            is_blocks = True
            dataset = make_blocks(dataset, name, tokenizer, column, size, splits.is_lines, num_proc, model)
        setattr(splits, name, dataset)
    return is_blocks


def describe_unlabelled(dataset: Any, name: str, model: object) -> str:
    """Returns the message for text without labels and a model that needs them, with the column that looks like them."""
    kind = type(model).__name__
    likely = find_likely_label(dataset, dataset.column_names)
    remedy = f"for a {kind} give 'preprocess', a function that makes inputs and labels"
    if likely is not None:
        remedy = f"{likely!r} looks like the labels of a {kind}: rename that column to 'label'; or {remedy}"
    return (
        f"data: the {name} set is text without a label, which is cut into blocks for language models (its columns: "
        f"{', '.join(dataset.column_names)}); {remedy}"
    )


def check_labels(dataset: Any, name: str) -> None:
    """Refuses text labels, because a loss needs numbers.

    Raises:
        UsageError: the labels are text; the message names the column and the remedy.
    """
    for label in LABEL_NAMES:
        if label in dataset.column_names and len(dataset) and isinstance(dataset[0][label], str):
            raise UsageError(
                f"data: the column {label!r} of the {name} set holds text ({dataset[0][label]!r}), and a loss needs "
                "numbers: number the classes from 0, or give 'preprocess', a function that does"
            )


def find_text_column(dataset: object, wanted: object, inputs: Collection[str]) -> str | None:
    """Returns the text column: the given one, else `text`, else the only string column; None if there is none.

    Args:
        inputs: the model's input columns; data with one of them is not tokenized.
    """
    columns = getattr(dataset, "column_names", None)
    if not columns or not hasattr(dataset, "map"):
        return None
    if wanted is not None:
        if wanted not in columns:
            raise UsageError(f"data.text_column: the data has no {wanted!r}{suggest(str(wanted), columns)}")
        return str(wanted)
    if any(name in inputs for name in columns):
        return None
    if "text" in columns:
        return "text"
    features = getattr(dataset, "features", None) or {}
    texts = [name for name in columns if getattr(features.get(name), "dtype", None) in ("string", "large_string")]
    return texts[0] if len(texts) == 1 else None


def find_block_size(wanted: object, model: object, tokenizer: object) -> int:
    """Returns the tokens per block: the given number, else the model's or tokenizer's maximum, at most 1,024.

    Raises:
        UsageError: the given number is not above 1, or the model has fewer positions.
    """
    shape = getattr(model, "config", None)
    positions = getattr(shape, "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) and positions > 0 else None
    if wanted is None:
        longest = getattr(tokenizer, "model_max_length", None)
        return min(limit or LONGEST_DEFAULT, longest or LONGEST_DEFAULT, LONGEST_DEFAULT)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 2:
        raise UsageError(f"data.block_size: {wanted!r} is not a whole number above 1")
    if limit is not None and wanted > limit:
        raise UsageError(f"data.block_size: {wanted} tokens are more than the {limit} positions of the model")
    return wanted


def ensure_padding(tokenizer: Any, model: object) -> None:
    """Sets a missing padding token, needed for rows of different lengths, to the end token, with a warning.

    Raises:
        UsageError: the tokenizer has neither token.
    """
    if getattr(tokenizer, "pad_token", None) is None:
        if getattr(tokenizer, "eos_token", None) is None:
            raise UsageError("tokenizer: it has no padding token and no end token; add one and save it again")
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("The tokenizer has no padding token: its end token %r is used.", tokenizer.eos_token)
    shape = getattr(model, "config", None)
    if shape is not None and getattr(shape, "pad_token_id", None) is None:
        shape.pad_token_id = tokenizer.pad_token_id


def make_blocks(
    dataset: Any, name: str, tokenizer: object, column: str, size: int, is_lines: bool, num_proc: object, model: object
) -> Any:
    """Tokenizes the rows, concatenates them, and splits them into blocks of `size` tokens."""
    end = None if is_lines else getattr(tokenizer, "eos_token_id", None)
    columns = list(dataset.column_names)
    dataset = map_rows(
        dataset, DocumentTokenizer(tokenizer, column, end), f"Tokenizing {name}", num_proc, columns, batched=True
    )
    rows = count_rows_per_call(dataset, size)
    cut = BlockCutter(size, has_labels=not type(model).__name__.endswith("MaskedLM"))
    blocks = map_rows(dataset, cut, f"Cutting {name} into blocks", num_proc, True, batched=True, batch_size=rows)
    if hasattr(blocks, "__len__") and len(blocks) == 0:
        tokens = sum(map(len, dataset["input_ids"]))
        raise UsageError(f"data.{name}: {tokens} tokens are fewer than one block of {size}; set data.block_size")
    return blocks


def count_rows_per_call(dataset: Any, size: int) -> int:
    """Returns the number of rows for about `BLOCKS_PER_CALL` blocks, estimated from the first 100 rows."""
    if not hasattr(dataset, "__len__"):
        return 1000
    lengths = [len(ids) for ids in dataset[: min(100, len(dataset))]["input_ids"]]
    mean = max(sum(lengths) / max(len(lengths), 1), 1.0)
    return max(1, round(BLOCKS_PER_CALL * size / mean))


class DocumentTokenizer:
    """Converts rows of text to rows of ids with an end token. A class, so that `datasets` can cache the result."""

    def __init__(self, tokenizer: Any, column: str, end: int | None) -> None:
        self.tokenizer, self.column, self.end = tokenizer, column, end

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in rows[self.column]]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*row, self.end] for row in ids] if self.end is not None else ids}


class RowTokenizer:
    """Converts rows of text to the inputs of a model, truncated at `size` tokens."""

    def __init__(self, tokenizer: Any, column: str, size: int) -> None:
        self.tokenizer, self.column, self.size = tokenizer, column, size

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, Any]:
        encoded = self.tokenizer([text or "" for text in rows[self.column]], truncation=True, max_length=self.size)
        return dict(encoded)


class BlockCutter:
    """Concatenates rows of ids and splits them into blocks of `size`; drops the remainder of each call."""

    def __init__(self, size: int, has_labels: bool) -> None:
        self.size, self.has_labels = size, has_labels

    def __call__(self, rows: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = [index for row in rows["input_ids"] for index in row]
        last = len(joined) // self.size * self.size
        blocks = [joined[start : start + self.size] for start in range(0, last, self.size)]
        if not self.has_labels:
            return {"input_ids": blocks}
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}
