"""Streams read by several processes: each worker of each process reads one shard, so no sample is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from paceline.pytorch.data.indexed import set_epoch
from paceline.pytorch.data.parts import Share, Watch, acting_as
from paceline.pytorch.data.stream import reread, restores_exactly

END = object()


class StreamPart(IterableDataset[Any]):
    """The shard of a stream that one process reads.

    A stream that chooses its shard by `get_worker_info()` sees one worker for each worker of each process. Of any other
    stream, each of n readers keeps every n-th batch. The batches of all readers in turn are then the stream in its
    order, and an optimizer step has the same samples as with one process.

    Args:
        dataset: the whole stream.
        rank, size: the rank of this process, and the number of processes.
        batch_size: consecutive samples of one reader.
    """

    def __init__(self, dataset: Any, rank: int, size: int, batch_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.size = size
        self.batch_size = batch_size
        self._share: Share | None = None
        self._place: Mapping[str, Any] | None = None
        self._next: Mapping[str, Any] | None = None
        self._begun: Mapping[str, Any] | None = None

    @property
    def is_shared_out(self) -> bool | None:
        """Returns True if the stream shards itself; None before the first sample."""
        return self._share.is_shared if self._share is not None else None

    def begin_behind(self, place: Mapping[str, Any] | None) -> None:
        """Makes the next pass skip the first `num_read` samples of the whole stream, before sharding.

        Args:
            place: `num_read`, and the stream's state there (`dataset`), or None to read up to it.
        """
        self._next = place

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the stream."""
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()  # reading its fields keeps the loader from sharding again
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        reader, num_readers = worker * self.size + self.rank, num_workers * self.size
        told: Any = torch_worker.WorkerInfo(id=reader, num_workers=num_readers, seed=0, dataset=self.dataset)
        watch = Watch(told)
        (begun, self._next), (place, self._place) = (self._next, None), (self._place, None)
        self._begun = begun
        if begun is not None or not is_divisible(self.dataset, num_readers):
            told = None  # let the stream yield all samples; this class shards them
        at = place if place is not None else begun
        state = at["dataset"] if at is not None else None
        if state is not None:
            self.dataset.load_state_dict(state)
        with acting_as(told):
            source = iter(self.dataset)
            if begun is not None and state is None:
                reread(source, begun["num_read"], "samples", is_quiet=reader > 0)
        share = Share(source, watch, reader, num_readers, self.batch_size)
        if begun is not None:
            share.is_shared = False
        if place is not None:
            share.num_read, share.is_shared = place["num_read"], place["is_shared"]
        self._share = share
        return self._walk(share, told)

    def _walk(self, share: Share, told: object) -> Iterator[Any]:
        while True:
            with acting_as(told):
                sample = next(share, END)
            if sample is END:
                return
            yield sample


class StatefulStreamPart(StreamPart):
    """The shard of a stream that saves its position."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the positions in the stream and in this shard."""
        share, begun = self._share, self._begun["num_read"] if self._begun is not None else 0
        read = {"num_read": 0, "is_shared": None} if share is None else vars(share)
        kept = {name: read[name] for name in ("num_read", "is_shared")}
        return {"kind": "part", "dataset": self.dataset.state_dict(), "begun": begun, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position for the next pass."""
        self._place = dict(state)


def part_of(dataset: object, rank: int, size: int, batch_size: int) -> Any:
    """Returns the shard of a stream for one of several processes; the stream itself if `datasets` has split it."""
    split = getattr(dataset, "_distributed", None)  # set by `split_dataset_by_node`
    if split is not None and getattr(split, "world_size", 1) > 1:
        return dataset
    return (StatefulStreamPart if restores_exactly(dataset) else StreamPart)(dataset, rank, size, batch_size)


def is_divisible(dataset: object, num_readers: int) -> bool:
    """Returns True if a stream that shards itself can be divided among `num_readers`.

    A stream of `datasets` distributes its files (`num_shards`), whose number must be divisible by `num_readers`. If it
    is not, every reader reads the whole stream.
    """
    shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    return not isinstance(shards, int) or shards % num_readers == 0
