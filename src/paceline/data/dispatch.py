"""One process reads the data for all (`dispatch_batches`), deals out batches, and sends each other process its own.

Batches are dealt in slots, one batch for each part of the data. All processes ask for a slot together, and a slot that
has not a batch for everyone is the last: so none asks after the others have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.data.indexed import IndexedLoader
from paceline.data.stream import StreamLoader


class ReadingFailed(Exception):
    """The process that reads for all could not; the message says why."""


class Dealt(NamedTuple):
    """What a process gets of a slot: its batch, if there is one, or what went wrong where it was read."""

    batch: Any = None
    num_samples: int = 0
    is_there: bool = False
    is_last: bool = True
    error: str | None = None


@dataclass(frozen=True)
class Deal:
    """Who reads, and who gets what.

    Attributes:
        parts: the part of the data that each process has, by rank; the first one's is 0, and it is the one that reads.
        reads: whether this process does.
        pack: makes bytes of what is sent. Raises: it cannot be sent.
        send: `(bytes for each process by rank, None where this one does not read) -> those for this one, opened`. All
            processes take part.
    """

    parts: tuple[int, ...]
    reads: bool
    pack: Callable[[Any], bytes]
    send: Callable[[list[bytes] | None], Any]

    @property
    def size(self) -> int:
        """Parts of the data."""
        return len(set(self.parts))


class DealtBatches(Iterator[Any]):
    """The batches of this process in one pass.

    Args:
        deal: who reads, and who gets what.
        source: batches of all parts in turn, each with its number of samples; None where this process does not read.

    Attributes:
        num_samples: of the batch handed out last.
    """

    def __init__(self, deal: Deal, source: Iterator[tuple[Any, int]] | None) -> None:
        self.deal, self.source = deal, source
        self.is_ended, self.num_samples = False, 0

    def __next__(self) -> Any:
        if self.is_ended:
            raise StopIteration
        own = self._read(self.source) if self.source is not None else self.deal.send(None)
        self.is_ended = own.is_last
        if own.error is not None:
            raise ReadingFailed(f"The first process reads the data for all, and failed there: {own.error}")
        if not own.is_there:
            raise StopIteration
        self.num_samples = own.num_samples
        return own.batch

    def _read(self, source: Iterator[tuple[Any, int]]) -> Dealt:
        """Read a slot, and send each other process its part of it; returns that of this one."""
        deal = self.deal
        try:
            found = list(itertools.islice(source, deal.size))
            is_last = len(found) < deal.size
            slot = [Dealt(batch, size, True, is_last) for batch, size in found]
            slot += [Dealt()] * (deal.size - len(slot))
            packed = {part: deal.pack(slot[part]) for part in set(deal.parts[1:])}
        except BaseException as error:  # also what ends this process, for which the others would wait
            self.is_ended = True
            deal.send([deal.pack(Dealt(error=f"{type(error).__name__}: {error}"))] * len(deal.parts))
            raise
        deal.send([b"", *(packed[part] for part in deal.parts[1:])])
        return slot[0]


def uncounted(loader: Any) -> Iterator[tuple[Any, int]]:
    """The batches of a loader, whose samples nobody counts. It is opened for the first of them."""
    for batch in loader:
        yield batch, 0


def failing(error: Exception) -> Iterator[Any]:
    """In the place of data that could not be opened: all processes learn of it where they would get the first batch."""
    raise error
    yield


class DispatchedLoader:
    """A loader that one process reads for all. What it is asked for beside its batches, the loader itself answers.

    Args:
        loader: gives the batches of all parts of the data, one after another; on other processes it is never read.
        deal: who reads, and who gets what.
    """

    def __init__(self, loader: Any, deal: Deal) -> None:
        self.loader, self.deal = loader, deal

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of a process in one pass, of the one that has most."""
        length = len(self.loader)
        return length if isinstance(self.loader, IndexedLoader) else -(-length // self.deal.size)

    def __iter__(self) -> DealtBatches:
        return DealtBatches(self.deal, uncounted(self.loader) if self.deal.reads else None)

    @property
    def samples_at_once(self) -> int | None:
        """Samples of one micro-batch of all processes; None where the loader does not say."""
        own, batch_size = (getattr(self.loader, name, None) for name in ("samples_at_once", "batch_size"))
        return own or (batch_size * self.deal.size if batch_size else None)

    def close(self) -> None:
        """Stop the workers."""
        if isinstance(self.loader, IndexedLoader | StreamLoader):  # another's is theirs
            self.loader.close()


def source_of(loader: Any) -> Any:
    """The loader that is read, on this process or on the one that reads for it."""
    return loader.loader if isinstance(loader, DispatchedLoader) else loader
