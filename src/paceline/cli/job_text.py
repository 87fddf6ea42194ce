"""Text into token ids: tokenised by the model's tokenizer, joined, and cut into blocks of one length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, suggest
from paceline.cli.job_data import Splits, map_rows

logger = logging.getLogger(__name__)

LONGEST_DEFAULT = 1024
LABEL_NAMES = ("label", "labels")
BLOCKS_PER_CALL = 256  # the tail of each call is dropped: half a block in 256 on average


def tokenize(
    config: JobConfig, splits: Splits, model: Any, tokenizer: Any, inputs: Iterable[str], makes_blocks: bool = True
) -> bool:
    """Turn text columns into token ids where the data has text and no ids yet.

    With a label column each row is one sample, cut at `block_size`; without one, the rows are joined and cut into
    blocks, and the labels are the tokens themselves.

    Args:
        model: of any framework; what is read of it is its `config`, where it has one.
        inputs: columns that it takes; data that has one of them is ready.
        makes_blocks: whether it compares each output with the next label, or takes no labels.

    Returns:
        Whether the samples are blocks, all of one length.

    Raises:
        UsageError: there is no tokenizer, no such column, too little text for one block, or no labels and a model that
            blocks are not for.
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
            raise UsageError("data: text has to be tokenised, and there is no tokenizer; give 'tokenizer'")
        size = find_block_size(settings.get("block_size"), model, tokenizer)
        num_proc = settings.get("num_proc")
        if any(label in dataset.column_names for label in LABEL_NAMES):
            check_labels(dataset, name)
            ensure_padding(tokenizer, model)
            cut = RowTokenizer(tokenizer, column, size)
            dataset = map_rows(dataset, cut, f"Tokenising {name}", num_proc, [column], batched=True)
        elif not makes_blocks:
            raise UsageError(
                f"data: the {name} set is text without a label, which is cut into blocks for language models of "
                f"transformers; for a {type(model).__name__} give 'preprocess', a function that makes inputs and labels"
            )
        else:
            is_blocks = True
            dataset = make_blocks(dataset, name, tokenizer, column, size, splits.is_lines, num_proc, model)
        setattr(splits, name, dataset)
    return is_blocks


def check_labels(dataset: Any, name: str) -> None:
    """Refuse labels that are words: a loss needs numbers.

    Raises:
        UsageError: they are; the message names the column and says how to number them.
    """
    for label in LABEL_NAMES:
        if label in dataset.column_names and len(dataset) and isinstance(dataset[0][label], str):
            raise UsageError(
                f"data: the column {label!r} of the {name} set holds text ({dataset[0][label]!r}), and a loss needs "
                "numbers: number the classes from 0, or give 'preprocess', a function that does"
            )


def find_text_column(dataset: Any, wanted: Any, inputs: Collection[str]) -> str | None:
    """The column of text: as wanted, else `text`, else the only one of strings; None where there is nothing to do.

    Args:
        inputs: columns that the model takes; data that has one of them is ready.
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


def find_block_size(wanted: Any, model: Any, tokenizer: Any) -> int:
    """Tokens of a block: as wanted, else as many as model and tokenizer take, at most 1,024.

    Raises:
        UsageError: it is no number above 1, or the model has fewer positions.
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


def ensure_padding(tokenizer: Any, model: Any) -> None:
    """Rows of several lengths need a padding token; where there is none, the end token is taken, and that is said.

    Raises:
        UsageError: the tokenizer has neither.
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
    dataset: Any, name: str, tokenizer: Any, column: str, size: int, is_lines: bool, num_proc: Any, model: Any
) -> Any:
    """Tokenise the rows, join them, cut them into blocks of `size` tokens."""
    end = None if is_lines else getattr(tokenizer, "eos_token_id", None)
    columns = list(dataset.column_names)
    dataset = map_rows(
        dataset, DocumentTokenizer(tokenizer, column, end), f"Tokenising {name}", num_proc, columns, batched=True
    )
    rows = count_rows_per_call(dataset, size)
    cut = BlockCutter(size, has_labels=not type(model).__name__.endswith("MaskedLM"))
    blocks = map_rows(dataset, cut, f"Cutting {name} into blocks", num_proc, True, batched=True, batch_size=rows)
    if hasattr(blocks, "__len__") and len(blocks) == 0:
        tokens = sum(map(len, dataset["input_ids"]))
        raise UsageError(f"data.{name}: {tokens} tokens are fewer than one block of {size}; set data.block_size")
    return blocks


def count_rows_per_call(dataset: Any, size: int) -> int:
    """How many rows make about `BLOCKS_PER_CALL` blocks, by the first hundred."""
    if not hasattr(dataset, "__len__"):
        return 1000
    lengths = [len(ids) for ids in dataset[: min(100, len(dataset))]["input_ids"]]
    mean = max(sum(lengths) / max(len(lengths), 1), 1.0)
    return max(1, round(BLOCKS_PER_CALL * size / mean))


class DocumentTokenizer:
    """Rows of text to rows of ids, each ended by the end token. A class, so that `datasets` can cache what it does."""

    def __init__(self, tokenizer: Any, column: str, end: int | None) -> None:
        self.tokenizer, self.column, self.end = tokenizer, column, end

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in rows[self.column]]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*row, self.end] for row in ids] if self.end is not None else ids}


class RowTokenizer:
    """Rows of text to the inputs of a model, cut at `size` tokens."""

    def __init__(self, tokenizer: Any, column: str, size: int) -> None:
        self.tokenizer, self.column, self.size = tokenizer, column, size

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, Any]:
        encoded = self.tokenizer([text or "" for text in rows[self.column]], truncation=True, max_length=self.size)
        return dict(encoded)


class BlockCutter:
    """Rows of ids, joined and cut into blocks of `size`; what is left over at the end of a call is dropped."""

    def __init__(self, size: int, has_labels: bool) -> None:
        self.size, self.has_labels = size, has_labels

    def __call__(self, rows: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = [index for row in rows["input_ids"] for index in row]
        last = len(joined) // self.size * self.size
        blocks = [joined[start : start + self.size] for start in range(0, last, self.size)]
        if not self.has_labels:
            return {"input_ids": blocks}
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}
