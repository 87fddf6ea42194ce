"""Collects prediction rows over batches: one row per sample; ragged rows are padded or kept as they are.

Past a limit the rows are moved to files with the same result, so that memory does not grow with the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.disk_buffer import DiskBuffer, SpillFile

PADDING = -100
CHUNK_BYTES = 2**24  # bytes of rows copied from file to file at a time

Array = np.ndarray[Any, Any]


class RowCollector:
    """Collects nests (tuples, lists, dicts) of arrays whose first dimension is the batch.

    A 0-dim leaf belongs to the whole batch and is repeated for each of its samples. A leaf with another first
    dimension has no rows: its batches are kept as a list. A list with an entry for each sample of its batch, such as
    the boxes of a detection model, becomes one list with an entry per sample of the set.

    Args:
        concatenate: True returns one array per leaf; False the list of batches (`eval_do_concat_batches=False`).
        padding: the value that fills ragged rows; -100 as in the labels of transformers.
        disk_buffer: moves rows to files; None keeps them in memory. Arrays in files are returned as `numpy.memmap`.

    Attributes:
        num_bytes: bytes collected so far, in memory and in files.
    """

    def __init__(
        self, concatenate: bool = True, padding: float = PADDING, disk_buffer: DiskBuffer | None = None
    ) -> None:
        self.concatenate = concatenate
        self.padding = padding
        self.disk_buffer = disk_buffer if disk_buffer is not None else DiskBuffer()
        self._nest: Any = None  # the structure of one batch, with a store in place of each array and list of samples

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in stores_of(self._nest))

    def add(self, nest: object, size: int) -> None:
        """Appends one batch of `size` samples; None is ignored."""
        if nest is None:
            return
        if self._nest is None:
            self._nest = make_stores(nest, size) if self.concatenate else Batches()
        for store, value in pair_nests(self._nest, nest):
            self.disk_buffer.held += store.add(value, size)
        if self.disk_buffer.is_due:
            self.move_to_files()

    def move_to_files(self) -> None:
        """Moves the rows in memory to files; later rows go to files too."""
        for store in stores_of(self._nest):
            self.disk_buffer.held -= store.move_to(self.disk_buffer)

    def result(self, order: Sequence[int] | None = None) -> Any:
        """Returns the collected rows in the structure of one batch; None if there are none.

        Args:
            order: the destination index of each row in the order of addition; None keeps that order. Lists of batches
                stay as they are.

        Raises:
            ValueError: a list without one entry per sample has another structure in one batch than in the first.
        """
        if isinstance(self._nest, Batches) and not self.concatenate:
            return self._nest.nests()
        places = None if order is None else np.asarray(order, dtype=np.int64)
        return map_nest(lambda store: store.join(self.padding, self.disk_buffer, places), self._nest)


class Leaf:
    """The arrays of one leaf of the nest, batch after batch, in memory or in a file."""

    def __init__(self) -> None:
        self._held: list[Array] = []
        self._file: SpillFile | None = None
        # per batch: the number of samples, and (dtype, shape), of which there are few different ones
        self._sizes: list[int] = []
        self._forms: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._known: dict[Any, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def is_in_file(self) -> bool:
        return self._file is not None

    def add(self, value: object, size: int) -> int:
        """Appends the array of one batch of `size` samples; a scalar is repeated for each. Returns the bytes added."""
        array = np.asarray(value)
        return self.append(np.full(size, array) if array.ndim == 0 else array, size)

    def append(self, array: Array, size: int) -> int:
        """Appends an array as it is. Returns the bytes added in memory."""
        self._sizes.append(size)
        form = (array.dtype, array.shape)
        self._forms.append(self._known.setdefault(form, form))
        self.num_bytes += array.nbytes
        if self._file is None:
            self._held.append(array)
            return array.nbytes
        self._file.append(array)
        return 0

    def move_to(self, disk_buffer: DiskBuffer) -> int:
        """Moves the arrays in memory to a file. Returns the bytes freed. Python objects stay in memory."""
        if self._file is not None or any(dtype.hasobject for dtype, _ in self._known):
            return 0
        relieved = sum(array.nbytes for array in self._held)
        self._file = disk_buffer.open()
        for array in self._held:
            self._file.append(array)
        self._held.clear()
        return relieved

    def arrays(self) -> list[Array]:
        """Returns the array of each batch; arrays in a file are views of one memory map."""
        if self._file is None:
            return self._held
        everything = self._file.map(np.dtype(np.uint8), (self._file.num_bytes,))
        views, offset = [], 0
        for dtype, shape in self._forms:
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            views.append(everything[offset : offset + num_bytes].view(dtype).reshape(shape))
            offset += num_bytes
        return views

    def join(self, padding: float, disk_buffer: DiskBuffer, places: Array | None = None) -> Any:
        """Returns one array with a row per sample, ragged rows padded; the list of batches if they have no rows."""
        forms = self._known.values()
        has_rows = all(
            len(shape) > 0 and shape[0] == size for (_, shape), size in zip(self._forms, self._sizes, strict=True)
        )
        if not has_rows or len({len(shape) for _, shape in forms}) > 1:
            return list(self.arrays())
        joined = concatenate(self._held, padding) if self._file is None else self._join_in_file(padding, disk_buffer)
        return joined if places is None or len(places) != len(joined) else put_back(joined, places, disk_buffer)

    def _join_in_file(self, padding: float, disk_buffer: DiskBuffer) -> Any:
        assert self._file is not None
        forms = self._known.values()
        tails, dtypes = {shape[1:] for _, shape in forms}, {dtype for dtype, _ in forms}
        num_rows = sum(self._sizes)
        if len(tails) == 1 and len(dtypes) == 1:
            return self._file.map(dtypes.pop(), (num_rows, *tails.pop()))
        joined = disk_buffer.open()
        dtype, longest = common_form(dtypes, tails)
        for array in self.arrays():
            joined.append(pad(array, longest, dtype, padding))
        return joined.map(dtype, (num_rows, *longest))


@dataclass(slots=True)
class Slot:
    """A placeholder in a nest for an array that a leaf holds."""

    leaf: Leaf
    index: int


class Batches:
    """Stores nests of any structure, one per batch. Leaves hold their arrays, so that these can be moved to files."""

    def __init__(self) -> None:
        self._leaf, self._objects = Leaf(), Leaf()  # Python objects stay in memory
        self._nests: list[Any] = []
        self._sizes: list[int] = []

    @property
    def num_bytes(self) -> int:
        return self._leaf.num_bytes + self._objects.num_bytes

    def add(self, nest: object, size: int) -> int:
        """Appends the nest of one batch of `size` samples. Returns the bytes added in memory."""
        added = 0

        def keep(value: object) -> Slot:
            nonlocal added
            array = np.asarray(value)
            leaf = self._objects if array.dtype.hasobject else self._leaf
            added += leaf.append(array, size)
            return Slot(leaf, len(leaf) - 1)

        self._nests.append(map_nest(keep, nest))
        self._sizes.append(size)
        return added

    def move_to(self, disk_buffer: DiskBuffer) -> int:
        """Moves the arrays in memory to a file. Returns the bytes freed."""
        return self._leaf.move_to(disk_buffer)

    def nests(self) -> list[Any]:
        """Returns the nest of each batch."""
        arrays = {id(leaf): leaf.arrays() for leaf in (self._leaf, self._objects)}
        return [map_nest(lambda slot: arrays[id(slot.leaf)][slot.index], nest) for nest in self._nests]

    def join(self, padding: float, disk_buffer: DiskBuffer, places: Array | None = None) -> Any:
        """Returns the entries of all samples in one list; joins leaf by leaf if there is not one entry per sample."""
        nests = self.nests()
        pairs = list(zip(nests, self._sizes, strict=True))
        if all(isinstance(nest, list) and len(nest) == size for nest, size in pairs):
            by_chance = len(set(self._sizes)) == 1 and self._sizes[0] > 1
            if not (by_chance and all(has_rows(nest, size) for nest, size in pairs)):
                entries = [entry for nest in nests for entry in nest]
                if places is None or len(places) != len(entries):
                    return entries
                return [entries[row] for row in np.argsort(places)]
        leaves = map_nest(lambda value: Leaf(), nests[0])
        for nest, size in pairs:
            for leaf, value in pair_nests(leaves, nest):
                leaf.add(value, size)
        if self._leaf.is_in_file:
            for leaf in stores_of(leaves):
                leaf.move_to(disk_buffer)
        return map_nest(lambda leaf: leaf.join(padding, disk_buffer, places), leaves)


def make_stores(nest: object, size: int) -> Any:
    """Returns the nest with a store for each array and for each list that may hold an entry per sample."""
    if isinstance(nest, list) and len(nest) == size:
        return Batches()
    if isinstance(nest, Mapping):
        return {key: make_stores(value, size) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [make_stores(value, size) for value in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    return None if nest is None else Leaf()


def has_rows(nest: Any, size: int) -> bool:
    """True if every array of a nest has `size` rows."""
    if isinstance(nest, Mapping | list | tuple):
        return all(has_rows(value, size) for value in (nest.values() if isinstance(nest, Mapping) else nest))
    return nest is None or (nest.ndim > 0 and len(nest) == size)


def concatenate(arrays: list[Array], padding: float = PADDING) -> Any:
    """Concatenates arrays along the first dimension, padding the other dimensions; returns the list if ndim differs."""
    if len({array.ndim for array in arrays}) > 1:
        return arrays
    tails = {array.shape[1:] for array in arrays}
    if len(tails) == 1:
        return np.concatenate(arrays)
    dtype, longest = common_form({array.dtype for array in arrays}, tails)
    joined = np.full((sum(map(len, arrays)), *longest), filler_of(dtype, padding), dtype=dtype)
    start = 0
    for array in arrays:
        window = (slice(start, start + len(array)), *map(slice, array.shape[1:]))
        joined[window] = array
        start += len(array)
    return joined


def put_back(rows: Array, places: Array, disk_buffer: DiskBuffer) -> Array:
    """Moves each row to its destination index; rows in a file go to another file, a chunk at a time."""
    order = np.argsort(places)
    if not isinstance(rows, np.memmap):
        ordered: Array = rows[order]
        return ordered
    file = disk_buffer.open()
    num_rows = max(CHUNK_BYTES * len(rows) // max(rows.nbytes, 1), 1)
    for start in range(0, len(order), num_rows):
        file.append(rows[order[start : start + num_rows]])
    return file.map(rows.dtype, rows.shape)


def common_form(dtypes: set[np.dtype[Any]], tails: set[tuple[int, ...]]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the smallest dtype and trailing dimensions that can hold all the given ones."""
    return np.result_type(*dtypes), tuple(max(sizes) for sizes in zip(*tails, strict=True))


def pad(array: Array, longest: tuple[int, ...], dtype: np.dtype[Any], padding: float) -> Array:
    """Pads the rows to the trailing dimensions `longest`."""
    if array.shape[1:] == longest:
        return array.astype(dtype, copy=False)
    padded = np.full((len(array), *longest), filler_of(dtype, padding), dtype=dtype)
    padded[(slice(None), *map(slice, array.shape[1:]))] = array
    return padded


def filler_of(dtype: np.dtype[Any], padding: float) -> Any:
    """Returns the fill value of ragged rows: the padding, or 0 for a dtype that is not numeric."""
    return padding if np.issubdtype(dtype, np.number) else 0


# ---- nests


def map_nest(function: Callable[[Any], Any], nest: object) -> Any:
    """Applies `function` to each leaf of a nest of dicts, lists and tuples; None stays None."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {key: map_nest(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [map_nest(function, value) for value in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    return function(nest)


def stores_of(nest: object) -> Iterator[Leaf | Batches]:
    """Yields every store in order."""
    if isinstance(nest, Leaf | Batches):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for part in nest.values() if isinstance(nest, Mapping) else nest:
            yield from stores_of(part)


def pair_nests(leaves: object, nest: object) -> Iterator[tuple[Leaf | Batches, Any]]:
    """Yields each store with its value.

    Raises:
        ValueError: the nest's structure differs from that of the first batch.
    """
    if isinstance(leaves, Leaf | Batches):
        yield leaves, nest
    elif leaves is None and nest is None:
        return
    elif isinstance(leaves, Mapping) and isinstance(nest, Mapping) and leaves.keys() == nest.keys():
        for key, part in leaves.items():
            yield from pair_nests(part, nest[key])
    elif isinstance(leaves, list | tuple) and isinstance(nest, list | tuple) and len(leaves) == len(nest):
        for part, value in zip(leaves, nest, strict=True):
            yield from pair_nests(part, value)
    else:
        raise ValueError(
            f"The outputs of one batch differ in shape from those of the first: {outline(nest)} and {outline(leaves)}. "
            "Name what should not be kept in `ignore_keys`, or choose it with `preprocess_logits_for_metrics`."
        )


def outline(nest: object) -> str:
    """Describes the keys or the length of a nest for messages."""
    if isinstance(nest, Mapping):
        return f"a dict of {', '.join(map(str, nest))}"
    if isinstance(nest, list | tuple):
        return f"{len(nest)} values"
    return "nothing" if nest is None else "one value"
