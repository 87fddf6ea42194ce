"""Batch dispatching (`dispatch_batches`): one process reads the data for all and sends the others their batches.

Batches are dispatched in slots, one batch for each shard of the data. All processes request a slot together. An
incomplete slot is the last one, so no process requests a slot after the others have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.stream import StreamLoader


class ReadingFailed(Exception):
    """Raised on all processes if the reading process failed; the message names its error."""


class DispatchedBatch(NamedTuple):
    """The entry of a slot for one process: its batch if there is one, or the error of the reading process."""

    batch: Any = None
    num_samples: int = 0
    is_there: bool = False
    is_last: bool = True
    error: str | None = None


@dataclass(frozen=True)
class BatchDispatcher:
    """The reading process, and the shard of each process.

    Attributes:
        parts: the shard of each process, by rank; rank 0 reads, and its shard is 0.
        reads: True if this process reads.
        pack: pickles an object to send; raises an error if the object cannot be sent.
        send: `(bytes for each rank, or None if this process does not read) -> unpickled object for this process`. A
            collective.
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
        dispatcher: the reading process, and the shard of each process.
        source: batches of all shards in turn, each with its number of samples; None if this process does not read.

    Attributes:
        num_samples: number of samples in the last batch.
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
        """Reads a slot, sends each other process its batch, and returns the batch of this process."""
        dispatcher = self.dispatcher
        try:
            found = list(itertools.islice(source, dispatcher.size))
            is_last = len(found) < dispatcher.size
            slot = [DispatchedBatch(batch, size, True, is_last) for batch, size in found]
            slot += [DispatchedBatch()] * (dispatcher.size - len(slot))
            packed = {part: dispatcher.pack(slot[part]) for part in set(dispatcher.parts[1:])}
        except BaseException as error:  # also errors that end this process: otherwise the others would wait forever
            self.is_ended = True
            dispatcher.send(
                [dispatcher.pack(DispatchedBatch(error=f"{type(error).__name__}: {error}"))] * len(dispatcher.parts)
            )
            raise
        dispatcher.send([b"", *(packed[part] for part in dispatcher.parts[1:])])
        return slot[0]


def uncounted(loader: Any) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a loader with a sample count of 0. The loader is opened at the first batch."""
    for batch in loader:
        yield batch, 0


def failing(error: Exception) -> Iterator[Any]:
    """Raises the error at the first batch, so that it reaches all processes if the data could not be opened."""
    raise error
    yield


class DispatchedLoader:
    """A loader that one process reads for all. Other attributes are forwarded to the wrapped loader.

    Args:
        loader: yields the batches of all shards in turn; only the reading process reads it.
        dispatcher: the reading process, and the shard of each process.
    """

    def __init__(self, loader: Any, dispatcher: BatchDispatcher) -> None:
        self.loader = loader
        self.dispatcher = dispatcher

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet while the object is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Returns the largest number of batches that a process gets in one pass."""
        length = len(self.loader)
        return length if isinstance(self.loader, IndexedLoader) else -(-length // self.dispatcher.size)

    def __iter__(self) -> DispatchedBatches:
        return DispatchedBatches(self.dispatcher, uncounted(self.loader) if self.dispatcher.reads else None)

    @property
    def global_micro_batch_size(self) -> int | None:
        """Returns the samples of one micro-batch over all processes; None if unknown."""
        own, batch_size = (getattr(self.loader, name, None) for name in ("global_micro_batch_size", "batch_size"))
        return own or (batch_size * self.dispatcher.size if batch_size else None)

    @property
    def total_batch_size(self) -> int | None:
        """Returns `global_micro_batch_size` under accelerate's name."""
        return self.global_micro_batch_size

    def close(self) -> None:
        """Stops the workers."""
        if isinstance(self.loader, IndexedLoader | StreamLoader):  # users close their own loaders
            self.loader.close()


def source_of(loader: object) -> Any:
    """Returns the loader that is actually read, unwrapped from a `DispatchedLoader`."""
    return loader.loader if isinstance(loader, DispatchedLoader) else loader
