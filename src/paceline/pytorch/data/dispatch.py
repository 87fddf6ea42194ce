"""Batch dispatching (`dispatch_batches`): one process reads the data for all, and sends each other process its batches.

Batches are dispatched in slots, one batch for each shard of the data. All processes request a slot together, and a slot
without a batch for everyone is the last: so none requests one after the others have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.stream import StreamLoader


class ReadingFailed(Exception):
    """Raised if the process that reads for all failed; the message says why."""


class DispatchedBatch(NamedTuple):
    """The entry of a slot for one process: its batch, if there is one, or the error of the reading process."""

    batch: Any = None
    num_samples: int = 0
    is_there: bool = False
    is_last: bool = True
    error: str | None = None


@dataclass(frozen=True)
class BatchDispatcher:
    """The reading process, and the shard of each process.

    Attributes:
        parts: the shard of each process, by rank; the first one's is 0, and it is the one that reads.
        reads: True if this process reads.
        pack: pickles an object to send. Raises: it cannot be sent.
        send: `(bytes for each process by rank, None if this one does not read) -> those for this one, opened`. All
            processes take part.
    """

    parts: tuple[int, ...]
    reads: bool
    pack: Callable[[Any], bytes]
    send: Callable[[list[bytes] | None], Any]

    @property
    def size(self) -> int:
        """Returns the number of shards of the data."""
        return len(set(self.parts))


class DispatchedBatches(Iterator[Any]):
    """The batches of this process in one pass.

    Args:
        dispatcher: the reading process, and the shard of each.
        source: batches of all shards in turn, each with its number of samples; None if this process does not read.

    Attributes:
        num_samples: of the last batch.
    """

    def __init__(self, dispatcher: BatchDispatcher, source: Iterator[tuple[Any, int]] | None) -> None:
        self.dispatcher = dispatcher
        self.source = source
        self.is_ended = False
        self.num_samples = 0

    def __next__(self) -> Any:
        if self.is_ended:
            raise StopIteration
        own = self._read(self.source) if self.source is not None else self.dispatcher.send(None)
        self.is_ended = own.is_last
        if own.error is not None:
            raise ReadingFailed(f"The first process reads the data for all, and failed there: {own.error}")
        if not own.is_there:
            raise StopIteration
        self.num_samples = own.num_samples
        return own.batch

    def _read(self, source: Iterator[tuple[Any, int]]) -> DispatchedBatch:
        """Reads a slot, and sends each other process its batch; returns that of this one."""
        dispatcher = self.dispatcher
        try:
            found = list(itertools.islice(source, dispatcher.size))
            is_last = len(found) < dispatcher.size
            slot = [DispatchedBatch(batch, size, True, is_last) for batch, size in found]
            slot += [DispatchedBatch()] * (dispatcher.size - len(slot))
            packed = {part: dispatcher.pack(slot[part]) for part in set(dispatcher.parts[1:])}
        except BaseException as error:  # also BaseException, which ends this process: the others would wait for it
            self.is_ended = True
            dispatcher.send(
                [dispatcher.pack(DispatchedBatch(error=f"{type(error).__name__}: {error}"))] * len(dispatcher.parts)
            )
            raise
        dispatcher.send([b"", *(packed[part] for part in dispatcher.parts[1:])])
        return slot[0]


def uncounted(loader: Any) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a loader without counting samples. It is opened for the first of them."""
    for batch in loader:
        yield batch, 0


def failing(error: Exception) -> Iterator[Any]:
    """Raises the error on the first batch, so that all processes learn of data that could not be opened."""
    raise error
    yield


class DispatchedLoader:
    """A loader that one process reads for all. Other attributes are those of the loader itself.

    Args:
        loader: gives the batches of all shards of the data, one after another; on other processes it is never read.
        dispatcher: the reading process, and the shard of each.
    """

    def __init__(self, loader: Any, dispatcher: BatchDispatcher) -> None:
        self.loader = loader
        self.dispatcher = dispatcher

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Returns the batches of a process in one pass, of the one with most."""
        length = len(self.loader)
        return length if isinstance(self.loader, IndexedLoader) else -(-length // self.dispatcher.size)

    def __iter__(self) -> DispatchedBatches:
        return DispatchedBatches(self.dispatcher, uncounted(self.loader) if self.dispatcher.reads else None)

    @property
    def global_micro_batch_size(self) -> int | None:
        """Returns the samples of one micro-batch of all processes; None if unknown."""
        own, batch_size = (getattr(self.loader, name, None) for name in ("global_micro_batch_size", "batch_size"))
        return own or (batch_size * self.dispatcher.size if batch_size else None)

    @property
    def total_batch_size(self) -> int | None:
        """Returns `global_micro_batch_size` under accelerate's name."""
        return self.global_micro_batch_size

    def close(self) -> None:
        """Stops the workers."""
        if isinstance(self.loader, IndexedLoader | StreamLoader):  # a user's loader is the user's to close
            self.loader.close()


def source_of(loader: object) -> Any:
    """Returns the loader that is read, on this process or on the one that reads for it."""
    return loader.loader if isinstance(loader, DispatchedLoader) else loader
