"""Weighted mixtures of datasets and of streams, with a position that a resume restores exactly."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset

from paceline.pytorch.data.indexed import set_epoch
from paceline.pytorch.data.parts import SourceWatch
from paceline.pytorch.data.stream import reread, restores_exactly, start_of, with_own_position

Indices = npt.NDArray[np.int64]
STOPS = ("first_exhausted", "all_exhausted")
PASSES = 2**20  # more passes over a source than an epoch has
BLOCK = 4096  # draws of a stream's sources from one random generator


class MixedDataset(Dataset[Any]):
    """A weighted mixture of datasets with an index; each source gives a fixed share of every epoch.

    An epoch continues each source where the epoch before it ended; a source that has been read to its end is read again
    in a new order. So all samples of a source are seen equally often (up to one), whatever its weight: a small source
    with a large weight is repeated, a large one with a small weight is spread over several epochs. The samples of an
    epoch follow from the seed and the epoch's number: resuming, workers and the number of processes change nothing.
    Takes up to 10 bytes of memory per sample of an epoch in each process that reads it.

    Args:
        sources: name -> dataset with a length.
        weights: name -> share of the samples of an epoch, scaled to a sum of 1. None: the lengths of the sources.
        stop: "all_exhausted": each source gives at least as many samples to an epoch as it has; "first_exhausted": no
            source gives more than it has.
        size: samples in an epoch; overrides `stop`.
        seed: seed of the orders.
        source_column: key of a sample (a dict) under which the number of its source is added, in the order of
            `sources`.

    Raises:
        ValueError: sources, weights, stop or size are invalid.
    """

    changes_by_epoch = True

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        stop: str = "all_exhausted",
        size: int | None = None,
        seed: int = 0,
        source_column: str | None = None,
    ) -> None:
        self.names = tuple(sources)
        self.sources = tuple(sources.values())
        self.lengths = _lengths(sources)
        given = dict(zip(self.names, self.lengths, strict=True)) if weights is None else weights
        self.weights = _shares(self.names, given)
        if stop not in STOPS:
            raise ValueError(f"stop={stop!r}: a mixture ends by 'first_exhausted' or by 'all_exhausted'.")
        if size is not None and size < 1:
            raise ValueError(f"size={size}: an epoch of a mixture has 1 sample or more.")
        self.counts = _counts(self.lengths, self.weights, stop, size)
        self.seed = seed
        self.source_column = source_column
        self.epoch = 0
        self._layout: tuple[npt.NDArray[np.uint16], Indices] | None = None

    def __len__(self) -> int:
        """Returns the number of samples in an epoch."""
        return sum(self.counts)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the samples of an epoch."""
        if epoch != self.epoch:
            self.epoch, self._layout = epoch, None
        for source in self.sources:
            set_epoch(source, epoch)

    def source_of(self, index: int) -> str:
        """Returns the name of the source of a sample of this epoch."""
        return self.names[int(self._plan()[0][index])]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns samples of this epoch, read from each source at once if it can."""
        length = len(self)
        if any(not -length <= index < length for index in indices):
            raise IndexError(f"an epoch of this mixture has {length} samples")
        owners, rows = self._plan()
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            places.setdefault(int(owners[index]), []).append(place)
        found: list[Any] = [None] * len(indices)
        for owner, own in places.items():
            samples = _read(self.sources[owner], [int(rows[indices[place]]) for place in own])
            for place, sample in zip(own, samples, strict=True):
                found[place] = marked(sample, self.source_column, owner)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layout": None}

    def _plan(self) -> tuple[npt.NDArray[np.uint16], Indices]:
        """Returns source and row of each sample of the epoch, with the sources evenly interleaved."""
        if self._layout is None:
            owners = np.repeat(np.arange(len(self.counts), dtype=np.uint16), self.counts)
            due = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in self.counts])
            order = np.argsort(due, kind="stable")
            rows = np.concatenate([self._rows(owner) for owner in range(len(self.counts))])
            self._layout = owners[order], rows[order]
        return self._layout

    def _rows(self, owner: int) -> Indices:
        """Returns the rows of a source in this epoch, which begins where the epoch before ended."""
        count, length = self.counts[owner], self.lengths[owner]
        if not count:
            return np.empty(0, dtype=np.int64)
        begin = self.epoch * count
        first, last = begin // length, (begin + count - 1) // length
        passes = [self._order(owner, number, length) for number in range(first, last + 1)]
        return np.concatenate(passes)[begin - first * length :][:count]

    def _order(self, owner: int, number: int, length: int) -> Indices:
        key = np.random.SeedSequence([self.seed % 2**64, owner, number])
        order: Indices = np.random.default_rng(key).permutation(length)
        return order


class MixedStream(IterableDataset[Any]):
    """A weighted mixture of streams: each sample comes from a source drawn by the weights.

    The draws follow from the seed and the epoch. A checkpoint holds the number of draws and the position of each
    source; sources with `state_dict` and `load_state_dict` resume from there, the others are read again up to it.

    Args:
        sources: name -> iterable of samples. Workers share the samples of the mixture as those of any other stream: all
            sources shard themselves, or none does.
        weights: name -> probability, scaled to a sum of 1. None: equal ones.
        stop: "first_exhausted": the epoch ends when a source that is drawn has no more samples; "all_exhausted": a
            source begins anew at its end, until each has been read to its end once.
        seed: seed of the draws.
        source_column: as in `MixedDataset`.

    Raises:
        ValueError: sources, weights or stop are invalid.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        stop: str = "first_exhausted",
        seed: int = 0,
        source_column: str | None = None,
    ) -> None:
        if not sources:
            raise ValueError("sources: a mixture has one source or more.")
        self.names = tuple(sources)
        self.sources = tuple(map(with_own_position, sources.values()))
        self.weights = _shares(self.names, dict.fromkeys(self.names, 1.0) if weights is None else weights)
        if stop not in STOPS:
            raise ValueError(f"stop={stop!r}: a mixture ends by 'first_exhausted' or by 'all_exhausted'.")
        self.stop = stop
        self.seed = seed
        self.source_column = source_column
        self.epoch = 0
        self._restored: Mapping[str, Any] | None = None
        self._unread: list[Any] | None = None  # the states of the sources before anything was read
        self._forget()

    @property
    def restores_exactly(self) -> bool:
        """Returns True if no source has to be read again on resume."""
        return all(restores_exactly(source) for source in self.sources)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch = epoch
        self._restored = None
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the samples yielded so far."""
        if self._restored is not None:
            return dict(self._restored)
        return {
            "epoch": self._epoch,
            "seed": self.seed,
            "weights": list(self.weights),
            "drawn": self._drawn,
            "read": list(self._read),
            "passes": list(self._passes),
            "sources": self._states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position for the next `iter`.

        Raises:
            ValueError: it was saved by a mixture of other weights or another seed, which draws other sources.
        """
        own = {"seed": self.seed, "weights": list(self.weights)}
        if state["drawn"] and any(state[name] != value for name, value in own.items()):
            raise ValueError(
                "MixedStream: the checkpoint was written in the middle of an epoch with seed="
                f"{state['seed']} and weights={state['weights']}, this mixture has {self.seed} and {own['weights']}. "
                "Use those until the epoch is over, or set ignore_data_skip=True to restart it."
            )
        self._restored = dict(state)

    def __iter__(self) -> Iterator[Any]:
        state, self._restored = self._restored, None
        if self._unread is None:
            self._unread = [start_of(source) if restores_exactly(source) else None for source in self.sources]
        self._forget()
        watch = SourceWatch(len(self.sources))
        readers = self._open(state, watch)
        exhausted = [passes > 0 for passes in self._passes]
        for owner in self._draws():
            try:
                sample = next(readers[owner]) if owner not in watch.undecided else self._first(owner, readers, watch)
            except StopIteration:
                exhausted[owner] = True
                if self.stop == "first_exhausted" or all(exhausted):
                    break
                readers[owner] = self._begin(owner, self._passes[owner] + 1, watch)
                try:
                    sample = next(readers[owner])
                except StopIteration:
                    raise ValueError(f"the stream {self.names[owner]!r} of a mixture is empty") from None
            self._read[owner] += 1
            self._drawn += 1
            yield marked(sample, self.source_column, owner)
        self._forget()

    def _first(self, owner: int, readers: Sequence[Iterator[Any]], watch: SourceWatch) -> Any:
        """Returns the first sample of a source, and checks that its worker reads the same part of all sources.

        Raises:
            ValueError: some sources shard themselves, and each worker reads all of the others.
        """
        with watch.reading(owner):
            sample = next(readers[owner])
        watch.decide(owner)
        parts = {is_shared: self.names[number] for number, is_shared in watch.is_shared.items()}
        if len(parts) > 1:
            raise ValueError(
                f"MixedStream: with several workers, or processes, {parts[True]!r} gives each of them a part of its "
                f"samples and {parts[False]!r} all of them, which would be repeated. Choose the part of "
                f"{parts[False]!r} in its __iter__ by torch.utils.data.get_worker_info(), or set "
                "dataloader_num_workers=0."
            )
        return sample

    def _open(self, state: Mapping[str, Any] | None, watch: SourceWatch) -> list[Iterator[Any]]:
        """Opens the sources, at a saved position if there is one."""
        if state is None or not state["drawn"]:
            return [self._begin(owner, 0, watch) for owner in range(len(self.sources))]
        self._epoch, self._drawn = state["epoch"], state["drawn"]
        readers = []
        for owner, (source, saved) in enumerate(zip(self.sources, state["sources"], strict=True)):
            self._announce(owner, state["passes"][owner])
            if saved is not None:
                source.load_state_dict(saved)
            with watch.reading(owner):
                reader = iter(source)
                if saved is None:
                    reread(reader, state["read"][owner], f"samples of {self.names[owner]!r}")
            self._read[owner], self._passes[owner] = state["read"][owner], state["passes"][owner]
            readers.append(reader)
        return readers

    def _begin(self, owner: int, number: int, watch: SourceWatch) -> Iterator[Any]:
        """Opens a source for a pass of this epoch."""
        self._announce(owner, number)
        self._read[owner], self._passes[owner] = 0, number
        source = self.sources[owner]
        if self._unread is not None and restores_exactly(source):
            source.load_state_dict(self._unread[owner])  # an epoch before may have ended in the middle of this source
        with watch.reading(owner):
            return iter(source)

    def _announce(self, owner: int, number: int) -> None:
        """Sets the epoch of a source; a later pass within an epoch gets a number that no other pass has."""
        set_epoch(self.sources[owner], self._epoch if not number else (self._epoch + 1) * PASSES + number)

    def _states(self) -> list[Any]:
        """Returns the positions of the sources; None for those that have none."""
        return [source.state_dict() if restores_exactly(source) else None for source in self.sources]

    def _draws(self) -> Iterator[int]:
        """Yields the sources of the samples from the current position on."""
        limits = np.cumsum(self.weights)[:-1]
        while True:
            block, place = divmod(self._drawn, BLOCK)
            key = np.random.SeedSequence([self.seed % 2**64, self._epoch, block])
            owners = np.searchsorted(limits, np.random.default_rng(key).random(BLOCK), side="right")
            yield from owners[place:].tolist()

    def _forget(self) -> None:
        self._epoch = self.epoch
        self._drawn = 0
        self._read = [0] * len(self.sources)
        self._passes = [0] * len(self.sources)


def marked(sample: Any, column: str | None, owner: int) -> Any:
    """Returns a sample with the number of its source.

    Raises:
        TypeError: it is no dict.
    """
    if column is None:
        return sample
    if not isinstance(sample, Mapping):
        raise TypeError(f"source_column={column!r}: samples are {type(sample).__name__}, not dicts.")
    return {**sample, column: owner}


def _lengths(sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the lengths of the sources; each must have one, and samples."""
    if not sources:
        raise ValueError("sources: a mixture has one source or more.")
    lengths = []
    for name, source in sources.items():
        try:
            length = len(source)
        except TypeError:
            raise ValueError(f"the source {name!r} of a mixture has no length: mix streams by MixedStream.") from None
        if not length:
            raise ValueError(f"the source {name!r} of a mixture is empty.")
        lengths.append(length)
    return tuple(lengths)


def _shares(names: Sequence[str], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Returns the weights in the order of the sources, with a sum of 1."""
    if set(weights) != set(names):
        raise ValueError(f"weights: one for each of {', '.join(names)}, not for {', '.join(weights) or 'none'}.")
    values = [float(weights[name]) for name in names]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"weights={dict(weights)}: a weight is a number above 0; leave out a source of no weight.")
    return tuple(value / sum(values) for value in values)


def _counts(lengths: Sequence[int], shares: Sequence[float], stop: str, size: int | None) -> tuple[int, ...]:
    """Returns the samples of each source in an epoch."""
    pairs = list(zip(lengths, shares, strict=True))
    ratios = [length / share for length, share in pairs]
    if size is None and stop == "first_exhausted":
        return tuple(max(1, min(length, math.floor(min(ratios) * share + 1e-9))) for length, share in pairs)
    if size is None:
        return tuple(max(length, math.ceil(max(ratios) * share - 1e-9)) for length, share in pairs)
    # the largest remainders are rounded up, so that the sum is `size`
    exact = [size * share for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda owner: counts[owner] - exact[owner])
    for owner in by_remainder[: size - sum(counts)]:
        counts[owner] += 1
    return tuple(counts)


def _read(source: Any, rows: list[int]) -> list[Any]:
    read_many = getattr(source, "__getitems__", None)
    return list(read_many(rows)) if callable(read_many) else list(map(partial(operator.getitem, source), rows))
