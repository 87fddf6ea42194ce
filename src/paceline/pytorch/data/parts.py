"""The shards of a stream, one per worker, and reading them with another number of workers or without workers.

A pass that N workers started has N shards, each at its own position. A resumed run finishes the pass in the same N
shards: each reader takes some of them, and sets `get_worker_info()` to the shard's worker while it reads.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

logger = logging.getLogger(__name__)


class Watch:
    """Records if a stream reads its worker's identity, which means that the stream shards itself."""

    def __init__(self, info: object) -> None:
        self.was_read = False
        watch = self

        class WatchedInfo(type(info)):  # type: ignore[misc]
            __slots__ = ()  # keeps the memory layout, which assigning to __class__ requires

            def __getattribute__(self, name: str) -> Any:
                if name in ("id", "num_workers"):
                    watch.was_read = True
                return super().__getattribute__(name)

        object.__setattr__(info, "__class__", WatchedInfo)


class SourceWatch:
    """Records which of the streams that one worker mixes shard themselves; see `Watch`.

    Attributes:
        undecided: the numbers of the streams of which no sample was read yet; empty unless there are several workers.
    """

    def __init__(self, number: int) -> None:
        info: Any = torch_worker.get_worker_info()
        several = info is not None and object.__getattribute__(info, "num_workers") > 1  # without a trace of it
        self.undecided = set(range(number)) if several else set[int]()
        self.is_shared: dict[int, bool] = {}
        self._info = info
        self._told: dict[int, tuple[Any, Watch]] = {}

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Context in which a stream is opened, and its first sample is read."""
        if number not in self.undecided:
            yield
            return
        if number not in self._told:
            names = ("id", "num_workers", "seed", "dataset")
            told: Any = torch_worker.WorkerInfo(**{name: object.__getattribute__(self._info, name) for name in names})
            self._told[number] = told, Watch(told)
        with acting_as(self._told[number][0]):
            yield

    def decide(self, number: int) -> None:
        """Notes whether a stream, whose first sample was read, shards itself; so does the mixture then."""
        self.undecided.discard(number)
        self.is_shared[number] = self._told[number][1].was_read
        if self.is_shared[number]:
            _ = self._info.id  # which the watch of the mixture notes


class Share:
    """The shard of a stream that one of several workers reads.

    A stream that reads its worker's identity (as `datasets` streams do) shards itself. Of any other stream, worker w of
    n keeps the samples w, w + n, w + 2n, ..., so that no sample is repeated.

    Args:
        source: the stream's iterator.
        watch: records if the stream reads its worker's identity.
        worker, num_workers: this worker, and the number of workers.
        block: consecutive samples of one worker before those of the next worker.

    Attributes:
        num_read: samples read from the stream.
        is_shared: the stream shards itself; None until the first sample.
    """

    def __init__(self, source: Iterator[Any], watch: Watch, worker: int, num_workers: int, block: int = 1) -> None:
        self.source = source
        self.watch = watch
        self.block = block
        self.worker = worker
        self.num_workers = num_workers
        self.num_read = 0
        self.is_shared: bool | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            sample = next(self.source)
            position = self.num_read
            self.num_read += 1
            if self.is_shared is None:
                self._decide()
            if self.is_shared or position // self.block % self.num_workers == self.worker:
                return sample

    def _decide(self) -> None:
        self.is_shared = self.watch.was_read
        if not self.is_shared and self.worker == 0:
            logger.info(
                "Each of the %d workers reads the whole stream and keeps its part. To read each sample once, let the "
                "dataset's __iter__ choose its part by torch.utils.data.get_worker_info().",
                self.num_workers,
            )


class Part:
    """The rest of one worker's shard, which any process can read.

    Args:
        dataset: the stream; no other part may use this object.
        worker, num_workers: the shard's worker, and the number of workers; 0: the main process read the whole stream.
        place: position of that worker; None: the start of its shard.
        start: `(dataset, place) -> iterator`.
    """

    def __init__(
        self,
        dataset: Any,
        worker: int,
        num_workers: int,
        place: Mapping[str, Any] | None,
        start: Callable[[Any, Mapping[str, Any] | None], Iterator[Any]],
    ) -> None:
        self.dataset = dataset
        self.worker = worker
        self.info: Any = None
        if num_workers:
            self.info = torch_worker.WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=dataset)
        watch = Watch(self.info) if self.info is not None else None
        with acting_as(self.info):
            source = start(dataset, place)
        self.share = Share(source, watch, worker, max(num_workers, 1))  # type: ignore[arg-type]
        if watch is None:
            self.share.is_shared = True
        if place is not None:
            self.share.num_read, self.share.is_shared = place["num_read"], place["is_shared"]

    def take(self, count: int) -> list[Any]:
        """Returns the next `count` samples; fewer at the shard's end."""
        with acting_as(self.info):
            return list(itertools.islice(self.share, count))


@contextmanager
def acting_as(info: Any) -> Iterator[None]:
    """Makes `get_worker_info()` return `info` while entered."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def open_parts(
    dataset: object,
    position: Mapping[str, Any],
    reader: int,
    num_readers: int,
    start: Callable[[Any, Mapping[str, Any] | None], Iterator[Any]],
) -> list[Part]:
    """Returns the shards that a reader takes over: those of the workers `reader`, `reader + num_readers`, ...

    Raises:
        ValueError: there are several shards, and the stream cannot be copied.
    """
    num_workers, places = position["num_workers"], position["workers"]
    own = range(reader, len(places), num_readers)
    parts = []
    for worker in own:
        try:
            of_its_own = copy.deepcopy(dataset) if len(own) > 1 else dataset
        except Exception as error:
            raise ValueError(
                f"dataloader_num_workers: the checkpoint was written in the middle of a stream that {num_workers} "
                f"workers shared, and the stream cannot be copied to finish their parts here ({error}). Resume with "
                f"dataloader_num_workers={num_workers}, or set ignore_data_skip=True to restart the epoch."
            ) from error
        parts.append(Part(of_its_own, worker, num_workers, places[worker], start))
    return parts


def next_part(parts: list[Part]) -> Part:
    """Returns the shard with the fewest samples read, so that the order depends only on the positions."""
    return min(parts, key=lambda part: (part.share.num_read, part.worker))
