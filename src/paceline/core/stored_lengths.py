"""Lengths of the samples of a `datasets` dataset without reading the samples.

They come from the offsets of its Arrow data. Where a transform makes the samples, they are measured once and cached in
a file beside the dataset's own files, under its fingerprint, which changes with the data and the transform.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.optional import is_installed, require

logger = logging.getLogger(__name__)

Lengths = np.ndarray[Any, np.dtype[np.int64]]
FORMAT = "2"  # part of the file name
DIGEST_SIZE = hashlib.sha256().digest_size
NUM_CHECKED = 16  # samples that are measured again to check cached lengths


# ---- from Arrow data


def list_lengths(dataset: Sized, name: str) -> Lengths | None:
    """Returns the length of each list in a column, int64 of shape (len(dataset),).

    Returns None if the dataset holds no Arrow table, a transform makes its samples, or the column holds no lists.
    """
    column = stored_column(dataset, name)
    if column is None:
        return None
    types, kind = require("pyarrow", "datasets").types, column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return None
    return as_integers(dataset, require("pyarrow.compute", "datasets").list_value_length(column))


def stored_numbers(dataset: Sized, name: str) -> Lengths | None:
    """Returns a column of whole numbers, int64 of shape (len(dataset),); None as for `list_lengths`."""
    column = stored_column(dataset, name)
    if column is None or not require("pyarrow", "datasets").types.is_integer(column.type):
        return None
    return as_integers(dataset, column)


def stored_column(dataset: object, name: str) -> Any:
    """Returns a column of a dataset's Arrow table, whose rows may be in another order.

    Returns None if there is none, or a transform makes the samples.
    """
    kind: Any = getattr(dataset, "format", None)
    table: Any = getattr(dataset, "data", None)
    if not isinstance(kind, Mapping) or kind.get("type") == "custom" or not is_installed("pyarrow"):
        return None
    names = getattr(table, "column_names", None)
    if names is None or name not in names or not callable(getattr(table, "column", None)):
        return None
    return table.column(name)


def as_integers(dataset: Sized, column: Any) -> Lengths | None:
    """Returns a column of whole numbers in the dataset's order; None if a value is missing."""
    if column.null_count:
        return None
    values: Lengths = np.asarray(column.to_numpy(), dtype=np.int64)
    order = getattr(dataset, "_indices", None)
    if order is not None:  # of select, shuffle, filter: the rows of the table that the dataset consists of
        values = values[np.asarray(order.column(0).to_numpy(), dtype=np.int64)]
    return values if len(values) == len(dataset) else None


# ---- from a file


def cached(dataset: Sized, name: str, measure: Callable[[], Lengths], measure_one: Callable[[int], int]) -> Lengths:
    """Returns lengths from the dataset's cache; measures them and writes the cache if there are none.

    The file is written under another name and renamed, so that processes may do so at the same time. A few samples are
    measured again when it is read: a fingerprint does not cover code that a transform imports, or randomness. A
    file that is damaged, or does not fit, is replaced.

    Args:
        dataset: cached only if it has a fingerprint and files of its own.
        name: what is measured, such as the name of a column.
        measure: reads all samples.
        measure_one: reads the sample with an index.
    """
    path = cache_path(dataset, name)
    if path is None:
        return measure()
    known = read_cache(path, len(dataset))
    if known is not None and fits(known, measure_one):
        logger.info("The lengths of %d samples were read from %s.", len(known), path)
        return known
    lengths = measure()
    try:
        write_cache(path, lengths)
    except OSError as error:
        logger.info("The lengths of the samples are not cached: %s.", error)
    return lengths


def fits(lengths: Lengths, measure_one: Callable[[int], int]) -> bool:
    """Returns True if cached lengths are those of a few samples spread over the dataset."""
    places = np.unique(np.linspace(0, len(lengths) - 1, NUM_CHECKED).astype(np.int64)) if len(lengths) else lengths
    for index in places.tolist():
        found = measure_one(index)
        if found != lengths[index]:
            logger.warning(
                "Sample %d has the length %d, and the cached one is %d: the samples are measured anew.",
                *(index, found, lengths[index]),
            )
            return False
    return True


def cache_path(dataset: Sized, name: str) -> Path | None:
    """Returns the path of the cache beside the dataset's files; None without a fingerprint or files."""
    fingerprint, files = getattr(dataset, "_fingerprint", None), getattr(dataset, "cache_files", None)
    if not isinstance(fingerprint, str) or not fingerprint or not isinstance(files, list) or not files:
        return None
    first = files[0].get("filename") if isinstance(files[0], Mapping) else None
    if not first:
        return None
    key = hashlib.sha256("\0".join((FORMAT, fingerprint, name, str(len(dataset)))).encode()).hexdigest()[:32]
    return Path(first).parent / f"lengths-{key}.bin"


def read_cache(path: Path, size: int) -> Lengths | None:
    """Returns the lengths in a file, int64 of shape (size,); None if there is no such file, or it is damaged."""
    try:
        with path.open("rb") as file:
            content = file.read(DIGEST_SIZE + 8 * size + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("%s cannot be read (%s): the lengths are measured anew.", path, error)
        return None
    digest, numbers = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
    is_whole = len(numbers) == 8 * size and hashlib.sha256(numbers).digest() == digest
    lengths: Lengths = np.frombuffer(numbers if is_whole else b"", dtype="<i8").astype(np.int64)
    if not is_whole or (lengths < 0).any():
        logger.warning("%s is damaged: the lengths of the samples are measured anew.", path)
        return None
    return lengths


def write_cache(path: Path, lengths: Lengths) -> None:
    """Writes lengths to a file, in one rename. Raises: OSError, if it cannot be written."""
    numbers = lengths.astype("<i8").tobytes()
    number, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(hashlib.sha256(numbers).digest() + numbers)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
