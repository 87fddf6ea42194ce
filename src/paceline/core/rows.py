"""Rows of predictions gathered over batches: one row per sample, ragged ones padded or kept as they are.

Past a limit they are kept in files: memory does not grow with the number of samples, and what comes back is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.spill import Spill, SpillFile

PADDING = -100
CHUNK_BYTES = 2**24  # of rows that are copied from file to file at a time

Array = np.ndarray[Any, Any]


class RowCollector:
    """Collects nests (tuples, lists, dicts) of arrays whose first dimension is the batch.

    A 0-dim leaf belongs to the whole batch and is repeated for each of its samples. A leaf with another first
    dimension has no rows: its batches are kept as a list. A list with an entry for each sample of its batch, such as
    the boxes of a detection model, becomes one list with an entry for each of all samples.

    Args:
        concatenate: give one array per leaf (False: the list of batches, as `eval_do_concat_batches=False` asks).
        padding: the value that fills ragged rows, -100 as in the labels of transformers.
        spill: when rows leave memory; None: never. Arrays that were in files come back as `numpy.memmap`.

    Attributes:
        num_bytes: what was collected so far, in memory and in files.
    """

    def __init__(self, concatenate: bool = True, padding: float = PADDING, spill: Spill | None = None) -> None:
        self.concatenate = concatenate
        self.padding = padding
        self.spill = spill if spill is not None else Spill()
        self._nest: Any = None  # the shape of one batch, with a store for each array and for each list of samples

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in stores_of(self._nest))

    def add(self, nest: Any, size: int) -> None:
        """Append one batch of `size` samples; None is remembered as nothing."""
        if nest is None:
            return
        if self._nest is None:
            self._nest = make_stores(nest, size) if self.concatenate else Batches()
        for store, value in pair_nests(self._nest, nest):
            self.spill.held += store.add(value, size)
        if self.spill.is_due:
            self.move_to_files()

    def move_to_files(self) -> None:
        """Write what is held in memory to files, and everything that is added from now on."""
        for store in stores_of(self._nest):
            self.spill.held -= store.move_to(self.spill)

    def result(self, order: Sequence[int] | None = None) -> Any:
        """What was collected, in the shape of one batch; None when nothing was.

        Args:
            order: the place of each row, in the order in which they were added; None: as they were. Lists of batches
                stay as they are.

        Raises:
            ValueError: a list that is not one of samples has another shape in one batch than in the first.
        """
        if isinstance(self._nest, Batches) and not self.concatenate:
            return self._nest.nests()
        places = None if order is None else np.asarray(order, dtype=np.int64)
        return map_nest(lambda store: store.join(self.padding, self.spill, places), self._nest)


class Leaf:
    """The arrays of one place in the nest, batch after batch: in memory, or in a file."""

    def __init__(self) -> None:
        self._held: list[Array] = []
        self._file: SpillFile | None = None
        # of each batch in the file: samples, and dtype and shape, of which there are few different ones
        self._sizes: list[int] = []
        self._forms: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._known: dict[Any, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def is_in_file(self) -> bool:
        return self._file is not None

    def add(self, value: Any, size: int) -> int:
        """Append the array of one batch of `size` samples, a number for each of them; returns the bytes now held."""
        array = np.asarray(value)
        return self.append(np.full(size, array) if array.ndim == 0 else array, size)

    def append(self, array: Array, size: int) -> int:
        """Append an array as it is."""
        self._sizes.append(size)
        form = (array.dtype, array.shape)
        self._forms.append(self._known.setdefault(form, form))
        self.num_bytes += array.nbytes
        if self._file is None:
            self._held.append(array)
            return array.nbytes
        self._file.append(array)
        return 0

    def move_to(self, spill: Spill) -> int:
        """Write what is held into a file; returns the bytes that memory is relieved of. Python objects stay."""
        if self._file is not None or any(dtype.hasobject for dtype, _ in self._known):
            return 0
        relieved = sum(array.nbytes for array in self._held)
        self._file = spill.open()
        for array in self._held:
            self._file.append(array)
        self._held.clear()
        return relieved

    def arrays(self) -> list[Array]:
        """The array of each batch; over one mapping of the file where they are in one."""
        if self._file is None:
            return self._held
        everything = self._file.map(np.dtype(np.uint8), (self._file.num_bytes,))
        views, offset = [], 0
        for dtype, shape in self._forms:
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            views.append(everything[offset : offset + num_bytes].view(dtype).reshape(shape))
            offset += num_bytes
        return views

    def join(self, padding: float, spill: Spill, places: Array | None = None) -> Any:
        """One array with a row per sample, ragged ones padded; the list of batches where they have no rows."""
        forms = self._known.values()
        has_rows = all(
            len(shape) > 0 and shape[0] == size for (_, shape), size in zip(self._forms, self._sizes, strict=True)
        )
        if not has_rows or len({len(shape) for _, shape in forms}) > 1:
            return list(self.arrays())
        joined = concatenate(self._held, padding) if self._file is None else self._join_in_file(padding, spill)
        return joined if places is None or len(places) != len(joined) else put_back(joined, places, spill)

    def _join_in_file(self, padding: float, spill: Spill) -> Any:
        assert self._file is not None
        forms = self._known.values()
        tails, dtypes = {shape[1:] for _, shape in forms}, {dtype for dtype, _ in forms}
        num_rows = sum(self._sizes)
        if len(tails) == 1 and len(dtypes) == 1:
            return self._file.map(dtypes.pop(), (num_rows, *tails.pop()))
        joined = spill.open()
        dtype, longest = common_form(dtypes, tails)
        for array in self.arrays():
            joined.append(pad(array, longest, dtype, padding))
        return joined.map(dtype, (num_rows, *longest))


@dataclass(slots=True)
class Slot:
    """Stands in a nest for an array that a leaf holds."""

    leaf: Leaf
    index: int


class Batches:
    """Nests of any shape, batch after batch: their arrays in leaves, so that these can be in files."""

    def __init__(self) -> None:
        self._leaf, self._objects = Leaf(), Leaf()  # Python objects stay in memory
        self._nests: list[Any] = []
        self._sizes: list[int] = []

    @property
    def num_bytes(self) -> int:
        return self._leaf.num_bytes + self._objects.num_bytes

    def add(self, nest: Any, size: int) -> int:
        """Append the nest of one batch of `size` samples; returns the bytes now held in memory."""
        added = 0

        def keep(value: Any) -> Slot:
            nonlocal added
            array = np.asarray(value)
            leaf = self._objects if array.dtype.hasobject else self._leaf
            added += leaf.append(array, size)
            return Slot(leaf, len(leaf) - 1)

        self._nests.append(map_nest(keep, nest))
        self._sizes.append(size)
        return added

    def move_to(self, spill: Spill) -> int:
        """As `Leaf.move_to`."""
        return self._leaf.move_to(spill)

    def nests(self) -> list[Any]:
        """The nest of each batch."""
        arrays = {id(leaf): leaf.arrays() for leaf in (self._leaf, self._objects)}
        return [map_nest(lambda slot: arrays[id(slot.leaf)][slot.index], nest) for nest in self._nests]

    def join(self, padding: float, spill: Spill, places: Array | None = None) -> Any:
        """The entries of all samples in one list; a list joined entry by entry where it was as long only by chance."""
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
                leaf.move_to(spill)
        return map_nest(lambda leaf: leaf.join(padding, spill, places), leaves)


def make_stores(nest: Any, size: int) -> Any:
    """A store for each array of a nest, and one for each list that may hold an entry per sample."""
    if isinstance(nest, list) and len(nest) == size:
        return Batches()
    if isinstance(nest, Mapping):
        return {key: make_stores(value, size) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [make_stores(value, size) for value in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    return None if nest is None else Leaf()


def has_rows(nest: Any, size: int) -> bool:
    """Whether every array of a nest has `size` rows."""
    if isinstance(nest, Mapping | list | tuple):
        return all(has_rows(value, size) for value in (nest.values() if isinstance(nest, Mapping) else nest))
    return nest is None or (nest.ndim > 0 and len(nest) == size)


def concatenate(arrays: list[Array], padding: float = PADDING) -> Any:
    """Stack arrays along the first dimension, padding the others to the longest; the list where ranks differ."""
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


def put_back(rows: Array, places: Array, spill: Spill) -> Array:
    """Each row at its place; rows in a file in another file, a chunk at a time."""
    order = np.argsort(places)
    if not isinstance(rows, np.memmap):
        ordered: Array = rows[order]
        return ordered
    file = spill.open()
    num_rows = max(CHUNK_BYTES * len(rows) // max(rows.nbytes, 1), 1)
    for start in range(0, len(order), num_rows):
        file.append(rows[order[start : start + num_rows]])
    return file.map(rows.dtype, rows.shape)


def common_form(
    dtypes: set[np.dtype[Any]], tails: set[tuple[int, ...]]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The type and the trailing dimensions that hold all of these."""
    return np.result_type(*dtypes), tuple(max(sizes) for sizes in zip(*tails, strict=True))


def pad(array: Array, longest: tuple[int, ...], dtype: np.dtype[Any], padding: float) -> Array:
    """The same rows, as long as the longest."""
    if array.shape[1:] == longest:
        return array.astype(dtype, copy=False)
    padded = np.full((len(array), *longest), filler_of(dtype, padding), dtype=dtype)
    padded[(slice(None), *map(slice, array.shape[1:]))] = array
    return padded


def filler_of(dtype: np.dtype[Any], padding: float) -> Any:
    """What fills ragged rows: the padding, or 0 in types that have no such number."""
    return padding if np.issubdtype(dtype, np.number) else 0


# ---- nests


def map_nest(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest of dicts, lists and tuples with `function` of each leaf; None stays."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {key: map_nest(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [map_nest(function, value) for value in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    return function(nest)


def stores_of(nest: Any) -> Iterator[Leaf | Batches]:
    """Every store, in order."""
    if isinstance(nest, Leaf | Batches):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for part in nest.values() if isinstance(nest, Mapping) else nest:
            yield from stores_of(part)


def pair_nests(leaves: Any, nest: Any) -> Iterator[tuple[Leaf | Batches, Any]]:
    """Each store with the value at its place.

    Raises:
        ValueError: the nest has another shape than that of the first batch.
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


def outline(nest: Any) -> str:
    """The keys or the length of a nest, in words."""
    if isinstance(nest, Mapping):
        return f"a dict of {', '.join(map(str, nest))}"
    return f"{len(nest)} values" if isinstance(nest, list | tuple) else "nothing" if nest is None else "one value"
