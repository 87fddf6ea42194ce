"""Rows of predictions gathered over batches: one row per sample, ragged ones padded or kept as they are.

Past a limit they are kept in files: memory does not grow with the number of samples, and what comes back is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from paceline.core.spill import Spill, SpillFile

PADDING = -100

Array = np.ndarray[Any, Any]


class RowCollector:
    """Collects nests (tuples, lists, dicts) of arrays whose first dimension is the batch.

    A 0-dim leaf belongs to the whole batch and is repeated for each of its samples. A leaf with another first
    dimension has no rows: its batches are kept as a list.

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
        self.num_batches = 0
        self._nest: Any = None  # the shape of one batch, with a `Leaf` for each array

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for leaf in leaves_of(self._nest))

    def add(self, nest: Any, size: int) -> None:
        """Append one batch of `size` samples; None is remembered as nothing."""
        if nest is None:
            return
        if self._nest is None:
            self._nest = map_nest(lambda value: Leaf(), nest)
        for leaf, value in pair_nests(self._nest, nest):
            array = np.asarray(value)
            if self.concatenate and array.ndim == 0:
                array = np.full(size, array)
            leaf.add(array, size)
            self.spill.held += 0 if leaf.is_in_file else array.nbytes
        self.num_batches += 1
        if self.spill.is_due:
            self.move_to_files()

    def move_to_files(self) -> None:
        """Write what is held in memory to files, and everything that is added from now on."""
        for leaf in leaves_of(self._nest):
            self.spill.held -= leaf.move_to(self.spill)

    def result(self) -> Any:
        """What was collected, in the shape of one batch; None when nothing was."""
        if self._nest is None:
            return None
        if self.concatenate:
            return map_nest(lambda leaf: leaf.join(self.padding, self.spill), self._nest)
        batches = map_nest(lambda leaf: leaf.arrays(), self._nest)
        return [map_nest(itemgetter(index), batches, Batches) for index in range(self.num_batches)]


class Batches(list[Array]):
    """The arrays of one leaf, one per batch: a list that is itself a leaf."""


class Leaf:
    """The arrays of one place in the nest, batch after batch: in memory, or in a file."""

    def __init__(self) -> None:
        self._held: Batches = Batches()
        self._file: SpillFile | None = None
        # of each batch in the file: samples, and dtype and shape, of which there are few different ones
        self._sizes: list[int] = []
        self._forms: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._known: dict[Any, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self.num_bytes = 0

    @property
    def is_in_file(self) -> bool:
        return self._file is not None

    def add(self, array: Array, size: int) -> None:
        """Append the array of one batch of `size` samples."""
        self._sizes.append(size)
        form = (array.dtype, array.shape)
        self._forms.append(self._known.setdefault(form, form))
        self.num_bytes += array.nbytes
        if self._file is None:
            self._held.append(array)
        else:
            self._file.append(array)

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

    def arrays(self) -> Batches:
        """The array of each batch; over one mapping of the file where they are in one."""
        if self._file is None:
            return self._held
        everything = self._file.map(np.dtype(np.uint8), (self._file.num_bytes,))
        views, offset = Batches(), 0
        for dtype, shape in self._forms:
            num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            views.append(everything[offset : offset + num_bytes].view(dtype).reshape(shape))
            offset += num_bytes
        return views

    def join(self, padding: float, spill: Spill) -> Any:
        """One array with a row per sample, ragged ones padded; the list of batches where they have no rows."""
        forms = self._known.values()
        has_rows = all(
            len(shape) > 0 and shape[0] == size for (_, shape), size in zip(self._forms, self._sizes, strict=True)
        )
        if not has_rows or len({len(shape) for _, shape in forms}) > 1:
            return list(self.arrays())
        if self._file is None:
            return concatenate(self._held, padding)
        tails, dtypes = {shape[1:] for _, shape in forms}, {dtype for dtype, _ in forms}
        num_rows = sum(self._sizes)
        if len(tails) == 1 and len(dtypes) == 1:
            return self._file.map(dtypes.pop(), (num_rows, *tails.pop()))
        joined = spill.open()
        dtype, longest = common_form(dtypes, tails)
        for array in self.arrays():
            joined.append(pad(array, longest, dtype, padding))
        return joined.map(dtype, (num_rows, *longest))


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


def map_nest(function: Callable[[Any], Any], nest: Any, leaf: type | tuple[type, ...] = ()) -> Any:
    """The same nest of dicts, lists and tuples with `function` of each leaf; None stays. `leaf`: not looked into."""
    if nest is None:
        return None
    if not isinstance(nest, leaf):
        if isinstance(nest, Mapping):
            return {key: map_nest(function, value, leaf) for key, value in nest.items()}
        if isinstance(nest, list | tuple):
            parts = [map_nest(function, value, leaf) for value in nest]
            return tuple(parts) if isinstance(nest, tuple) else parts
    return function(nest)


def leaves_of(nest: Any) -> Iterator[Leaf]:
    """Every leaf, in order."""
    if isinstance(nest, Leaf):
        yield nest
    elif isinstance(nest, Mapping | list | tuple):
        for part in nest.values() if isinstance(nest, Mapping) else nest:
            yield from leaves_of(part)


def pair_nests(leaves: Any, nest: Any) -> Iterator[tuple[Leaf, Any]]:
    """Each leaf with the value at its place.

    Raises:
        ValueError: the nest has another shape than that of the first batch.
    """
    if isinstance(leaves, Leaf):
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
