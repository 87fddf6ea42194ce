"""Reads numeric columns of a `datasets` dataset as arrays, without a Python object for each number.

`Dataset.__getitems__` makes a list of Python integers of each row, which the collators here make an array again. For
these collators, and for columns of numbers or of lists of numbers, the rows are slices of the Arrow buffers instead;
the batches are the same bit for bit. In every other case, the dataset reads and the collator gets the usual rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.optional import is_installed, require
from paceline.pytorch.data.collate_language import DataCollatorForLanguageModeling
from paceline.pytorch.data.collate_seq2seq import DataCollatorForSeq2Seq
from paceline.pytorch.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from paceline.pytorch.data.padding import pads_as_base

PADDING_COLLATORS = (DataCollatorWithPadding, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq)
PADDED = (True, "longest", "max_length")
PLAIN_FEATURES = ("Value", "ClassLabel", "List", "LargeList", "Sequence")  # whose values are stored as they are read
Collate = Callable[[Any], Any]


def as_arrays(dataset: Any, collate: Collate) -> tuple[Any, Collate]:
    """Returns a dataset and a collator that make the same batches from arrays; the given ones if that is impossible.

    Args:
        dataset: any dataset.
        collate: `(samples) -> batch`.
    """
    kinds = dtypes_for(collate)
    if not kinds or not is_plain(dataset) or not dataset.column_names:
        return dataset, collate
    types = require("pyarrow", "datasets").types
    for column in dataset.data.columns:
        is_list = types.is_list(column.type) or types.is_large_list(column.type)
        kind = column.type.value_type if is_list else column.type
        is_known = types.is_integer(kind) or (types.is_floating(kind) and (not is_list or "f" in kinds))
        if not is_known or types.is_uint64(kind) or column.null_count:
            return dataset, collate
        if is_list and any(chunk.values.null_count for chunk in column.chunks):
            return dataset, collate
    return ArrayRows(dataset), CollateArrays(collate)


def dtypes_for(collate: Any) -> str:
    """Returns the kinds of numbers ("i", "f") whose arrays a collator treats as lists; empty for other collators."""
    if collate is default_data_collator:
        return "if"
    if any(callable(getattr(type(collate), name, None)) for name in getattr(collate, "__dict__", ())):
        return ""  # the object replaces a method of its class
    if type(collate) is DefaultDataCollator:
        return "if" if collate.return_tensors == "pt" else ""  # numpy makes float64 of lists
    if type(collate) not in PADDING_COLLATORS or not pads_as_base(collate.tokenizer):
        return ""
    return "i" if getattr(collate, "padding", True) in PADDED else ""


def is_plain(dataset: Any) -> bool:
    """Returns True for a `datasets.Dataset` without a format or a transform, whose columns need no decoding."""
    if not is_installed("pyarrow") or type(dataset) is not require("datasets", "datasets").Dataset:
        return False
    shown = dataset._format_columns  # None: all
    is_whole = shown is None or set(shown) == set(dataset.column_names)
    if dataset._format_type is not None or not is_whole or "__getitems__" in vars(dataset):
        return False
    features = [each for one in dataset.features.values() for each in (one, getattr(one, "feature", None))]
    return all(
        each is None or (type(each).__module__.startswith("datasets.") and type(each).__name__ in PLAIN_FEATURES)
        for each in features
    )


class ReadRows(list[dict[str, Any]]):
    """The samples of a batch: lists of numbers as arrays, numbers as Python numbers.

    Args:
        rows: the samples.
        read_again: returns the samples as the dataset itself reads them.
    """

    def __init__(self, rows: list[dict[str, Any]], read_again: Callable[[], list[Any]]) -> None:
        super().__init__(rows)
        self.read_again = read_again


@dataclass(eq=False)
class CollateArrays:
    """A collator that is called again with the usual samples if it cannot take arrays, so that its errors stay."""

    collate: Collate

    def __call__(self, rows: list[Any]) -> Any:
        if not isinstance(rows, ReadRows):
            return self.collate(rows)
        try:
            return self.collate(rows)
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError):
            return self.collate(rows.read_again())


class Column:
    """A column as arrays over its Arrow buffers, which are not copied.

    Args:
        column: numbers or lists of numbers, without a missing value.
    """

    def __init__(self, column: Any) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.starts = np.cumsum([0, *map(len, chunks)])
        self.is_list = hasattr(column.type, "value_type")
        kind = np.dtype((column.type.value_type if self.is_list else column.type).to_pandas_dtype()).kind
        self.dtype = np.float32 if kind == "f" else np.int64  # as torch makes of lists of numbers
        self.offsets: list[Any] = [chunk.offsets.to_numpy() if self.is_list else None for chunk in chunks]
        self.values = [(chunk.values if self.is_list else chunk).to_numpy() for chunk in chunks]

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Returns the values at some places: arrays of their own for lists, else Python numbers."""
        if len(self.values) == 1:
            places = [(0, index) for index in indices]
        else:
            chunks = np.searchsorted(self.starts, indices, side="right") - 1
            places = list(zip(chunks.tolist(), (np.asarray(indices) - self.starts[chunks]).tolist(), strict=True))
        if not self.is_list:
            return [self.values[chunk][place].item() for chunk, place in places]
        found = []
        for chunk, place in places:
            offsets = self.offsets[chunk]
            found.append(self.values[chunk][offsets[place] : offsets[place + 1]].astype(self.dtype))
        return found


class ArrayRows:
    """A dataset that reads samples from the Arrow data of a `datasets.Dataset`.

    Args:
        dataset: see `as_arrays`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._columns: dict[str, Column] | None = None
        self._order: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_columns": None, "_order": None}  # a started worker maps the files itself

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        size = len(self.dataset)
        if not all(type(index) is int and 0 <= index < size for index in indices):
            return self._read(indices)
        columns = self._open()
        places = indices if self._order is None else self._order[indices].tolist()
        rows: list[dict[str, Any]] = [{} for _ in indices]
        for name, column in columns.items():
            for row, value in zip(rows, column.take(places), strict=True):
                if column.is_list and not len(value):  # torch makes a float tensor of empty lists
                    return self._read(indices)
                row[name] = value
        return ReadRows(rows, lambda: self._read(indices))

    def _open(self) -> dict[str, Column]:
        if self._columns is None:
            dataset = self.dataset
            if dataset._indices is not None:
                self._order = dataset._indices.column(0).to_numpy()
            self._columns = {name: Column(dataset.data.column(name)) for name in dataset.column_names}
        return self._columns

    def _read(self, indices: list[Any]) -> list[Any]:
        rows: list[Any] = self.dataset.__getitems__(list(indices))
        return rows
