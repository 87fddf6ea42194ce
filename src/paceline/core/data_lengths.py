"""Describes the samples of a dataset for the header of a run: their lengths in tokens, or the shapes of their tensors.

No code of the user runs, and no random number is drawn: rows are read from arrays, lists, `TensorDataset`s and
`datasets` without a transform only. Any other dataset, and a stream, is left unread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.fingerprint import MOST_ROWS, array_columns, is_passive, spread
from paceline.core.optional import LateModule

if TYPE_CHECKING:
    from paceline.core import stored_lengths
else:
    stored_lengths = LateModule("paceline.core.stored_lengths")

SECONDS = 0.02  # no further row is read after this time
MOST_STORED = 1_000_000  # rows whose lengths are taken from the offsets of Arrow data: about 10 ms
_MOST_TEXT = 66  # characters of a line, so that it fits 80 columns
_MOST_NAME = 24  # characters of a field's name

Shape = tuple[int | None, ...]


def describe_samples(dataset: object, input_name: str = "input_ids") -> list[str]:
    """Returns [line about the samples of a dataset]; [] if the line would require running the dataset's code.

    Args:
        dataset: the training data, of any kind.
        input_name: the field of a sample that holds its tokens.
    """
    with suppress(Exception):  # a damaged file, or an object that only looks like one of these: training reports it
        text = _stored(dataset, input_name) or _from_specification(dataset) or _from_rows(dataset, input_name)
        return [text] if text else []
    return []


def _stored(dataset: Any, input_name: str) -> str:
    """Returns the line from the offsets of Arrow data, which covers every sample; empty for other data."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or input_name not in names or not 0 < len(dataset) <= MOST_STORED:
        return ""
    lengths = stored_lengths.list_lengths(dataset, input_name)
    return "" if lengths is None else _lengths_line(lengths, "")


def _from_specification(dataset: object) -> str:
    """Returns the line of a `tf.data.Dataset`, which declares the shapes of its elements; empty for other data."""
    found: dict[str, list[Shape]] = {}
    for name, spec in _fields(getattr(dataset, "element_spec", None)):
        shape: Any = getattr(spec, "shape", None)
        if getattr(shape, "rank", None) is not None:
            found[name] = [tuple(shape)]
    return _shapes_line(found, "")


def _from_rows(dataset: Any, input_name: str) -> str:
    """Returns the line from up to 64 rows that are spread over the dataset; empty if it cannot be read safely."""
    columns: Sequence[Any] = array_columns(dataset)
    if not columns and not is_passive(dataset):
        return ""
    if type(dataset).__name__ == "TensorDataset":
        columns = dataset.tensors
    rows = [_row_of_arrays(dataset, columns)] if columns else _read(dataset)
    found: dict[str, list[Shape]] = {}
    sizes: list[int | None] = []
    for row in rows:
        for name, value in _fields(row):
            shape = _shape_of(value)
            if shape is not None:
                found.setdefault(name, []).append(shape)
            if _printable(name) == input_name and shape is not None and len(shape) == 1 and _is_whole(value):
                sizes.append(shape[0])
    is_whole = bool(columns) or len(rows) == len(dataset)
    part = "" if is_whole else f" in {len(rows):,} of {len(dataset):,} samples"
    return (
        _lengths_line(np.array(sizes, dtype=np.int64), part)
        if len(sizes) == len(rows) > 0
        else _shapes_line(found, part)
    )


def _row_of_arrays(dataset: Any, columns: Sequence[Any]) -> Any:
    """Returns the first sample of arrays; the other samples have its shape."""
    values = tuple(column[0] for column in columns)
    return dict(zip(dataset, values, strict=True)) if isinstance(dataset, Mapping) else values


def _read(dataset: Any) -> list[Any]:
    """Returns samples that are spread over a dataset, as many as are read in `SECONDS`; at least one."""
    begun = time.perf_counter()
    rows = []
    for index in spread(len(dataset), MOST_ROWS):
        rows.append(dataset[index])
        if time.perf_counter() - begun > SECONDS:
            break
    return rows


def _lengths_line(lengths: np.ndarray, part: str) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    about = "about " if part else ""
    text = f"{low:,} tokens each" if low == high else f"{low:,} to {high:,} tokens, mean {lengths.mean():,.1f}"
    return f"lengths    {about}{text}{part}"


def _shapes_line(found: Mapping[str, Sequence[Shape]], part: str) -> str:
    """Returns the line of the shapes by field, as many of them as fit; empty if there are none."""
    texts = [f"{_printable(name)} {_shape_text(shapes)}".strip() for name, shapes in found.items()]
    about = "about " if part and any(len(set(shapes)) > 1 for shapes in found.values()) else ""
    shown = len(texts)
    while shown > 1 and len(_joined(texts, shown)) + len(about) + len(part) > _MOST_TEXT:
        shown -= 1
    return f"shapes     {about}{_joined(texts, shown)}{part}" if texts else ""


def _joined(texts: Sequence[str], shown: int) -> str:
    more = [f"{len(texts) - shown} more"] if shown < len(texts) else []
    return ", ".join([*texts[:shown], *more])


def _shape_text(shapes: Sequence[Shape]) -> str:
    """Returns the shape that several samples have in common, with the range of each size that differs."""
    ranks = sorted({len(shape) for shape in shapes})
    if len(ranks) > 1:
        return f"of {ranks[0]} to {ranks[-1]} dimensions"
    sizes = []
    for each in zip(*shapes, strict=True):
        known = sorted({size for size in each if size is not None})
        ends = dict.fromkeys([known[0], known[-1]]) if known else ["?"]
        sizes.append("-".join(map(str, ends)))
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _fields(row: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the fields of a sample: of a mapping by their keys, of a tuple by their places."""
    if isinstance(row, Mapping):
        for key, value in row.items():
            yield from _fields(value, f"{name}.{key}" if name else str(key))
    elif isinstance(row, tuple):
        for place, value in enumerate(row):
            yield from _fields(value, name or f"[{place}]")
    else:
        yield name, row


def _shape_of(value: object) -> Shape | None:
    """Returns the shape of a tensor, an array, a number or nested lists of numbers; None for anything else."""
    if isinstance(value, int | float | np.number | np.bool_):
        return ()
    if isinstance(value, list):
        inner: Shape | None = _shape_of(value[0]) if value else ()
        return None if inner is None else (len(value), *inner)
    shape = getattr(value, "shape", None)
    is_numeric = getattr(getattr(value, "dtype", None), "kind", "f") not in "OSU"
    return tuple(int(size) for size in shape) if isinstance(shape, tuple) and is_numeric else None


def _is_whole(value: object) -> bool:
    """Returns True for a list, a tensor or an array of whole numbers."""
    if isinstance(value, list):
        return all(isinstance(number, int) for number in value[:1])
    return "int" in str(getattr(value, "dtype", ""))


def _printable(name: str) -> str:
    """Returns the name of a field for the terminal, without its place in a tuple."""
    own = name.partition("]")[2].lstrip(".") if name.startswith("[") else name
    return "".join(letter if letter.isprintable() else "?" for letter in own[:_MOST_NAME])
