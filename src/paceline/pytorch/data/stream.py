"""Loads datasets without an index (streams), sharded among seeded workers, with a position that can be restored.

A stream with `state_dict` and `load_state_dict` saves its position; any other stream is read again from its start.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.core.optional import LateModule
from paceline.pytorch.data.generators import seed_generators
from paceline.pytorch.data.indexed import OpenPasses, set_epoch
from paceline.pytorch.data.parts import Part, Share, Watch, next_part, open_parts

if TYPE_CHECKING:
    from paceline.pytorch.data import small_tensors
else:
    small_tensors = LateModule("paceline.pytorch.data.small_tensors")

logger = logging.getLogger(__name__)

FIRST_REPORT, REPORT_EVERY = 1.0, 10.0  # seconds of rereading before the remaining time is logged


class Delivery(NamedTuple):
    """A batch from a worker. A delivery with no samples only takes up the worker's turn."""

    worker: int
    num_samples: int
    place: dict[str, Any]  # this worker's position after the batch: num_read, is_shared, is_ended, dataset
    batch: Any


class Stream(IterableDataset[Any]):
    """Batches of a stream, collated where the stream is read: in the workers, or in this process if there are none.

    Args:
        dataset: any iterable of samples.
        batch_size: samples per batch.
        drop_last: drop the smaller last batch of each worker.
        collate: `(samples) -> batch`.
        seed: seed of the workers' generators; each batch is seeded with (seed, epoch, worker, samples read).
        clock: int64 of shape (2,), shared with the workers: the epoch, and the number of the pass over the loader.
        block: consecutive samples of one worker, if the stream does not shard itself.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        seed: int,
        clock: torch.Tensor,
        block: int = 1,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.collate = collate
        self.seed = seed
        self.clock = clock
        self.block = block
        self.asks = restores_exactly(dataset)
        self.resume: dict[str, Any] | None = None  # the position to start from, in the pass `resume["pass"]`
        self._begin: list[Any] = []  # in a worker: the dataset's own state before its first pass
        self._begun: Mapping[str, Any] | None = None  # the prefix of this pass that other processes have read

    def __iter__(self) -> Iterator[Delivery]:
        epoch, number = self.clock.tolist()
        resume = self.resume if self.resume is not None and self.resume["pass"] == number else None
        self._begun = resume.get("begun") if resume is not None else None
        info = get_worker_info()
        if info is not None:
            small_tensors.send_small_tensors_by_value()
        if info is not None and self.asks:
            self._begin_alike()
        if resume is not None and is_cut_otherwise(resume, info.num_workers if info is not None else 0, self.asks):
            return self._read_parts(resume, epoch, info)
        if info is None:
            place = resume["workers"][0] if resume is not None else None
            return self._read_here(self._open(self.dataset, place), place)
        worker, num_workers = info.id, info.num_workers
        watch = Watch(info)
        object.__setattr__(info, "dataset", self.dataset)  # streams expect to find themselves in the worker info
        place = resume["workers"][worker] if resume is not None else None
        seed_generators(self.seed, epoch, worker)
        set_epoch(self.dataset, epoch)
        share = Share(self._open(self.dataset, place, is_quiet=worker > 0), watch, worker, num_workers, self.block)
        if place is not None:
            share.num_read, share.is_shared = place["num_read"], place["is_shared"]
        had_its_turn = resume is not None and worker <= resume["last"]
        return self._read_share(share, epoch, had_its_turn)

    def _begin_alike(self) -> None:
        """Resets the dataset in a persistent worker, because the previous pass may have been left half-read."""
        if self._begin:
            self.dataset.load_state_dict(copy.deepcopy(self._begin[0]))
        else:
            self._begin = [copy.deepcopy(self.dataset.state_dict())]

    def _read_parts(self, resume: Mapping[str, Any], epoch: int, info: Any) -> Iterator[Delivery]:
        """Finishes the shards of other workers; see `paceline.pytorch.data.parts`."""
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        whole, rank, size = share_of(self.dataset) if resume.get("of_all") else (self.dataset, 0, 1)
        reader, num_readers = worker * size + rank, num_workers * size
        if info is not None:
            seed_generators(self.seed, epoch, worker)
            set_epoch(self.dataset, epoch)

        def start(dataset: object, place: Mapping[str, Any] | None) -> Iterator[Any]:
            return self._open(dataset, place, is_quiet=reader > 0)

        parts = open_parts(whole, resume, reader, num_readers, start)
        had_its_turn = info is not None and resume["last"] >= 0 and worker <= resume["last"] % num_readers // size
        return self._walk_parts(parts, epoch, had_its_turn, is_seeded=info is not None)

    def _walk_parts(self, parts: list[Part], epoch: int, had_its_turn: bool, is_seeded: bool) -> Iterator[Delivery]:
        if had_its_turn:
            yield Delivery(0, 0, {}, None)
        while parts:
            part = next_part(parts)
            share = part.share
            if is_seeded:
                seed_generators(self.seed, epoch, part.worker, share.num_read)
            samples = part.take(self.batch_size)
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                parts.remove(part)
                continue
            yield self._deliver(part.dataset, share, samples)

    def _deliver(self, dataset: Any, share: Share, samples: list[Any]) -> Delivery:
        batch = self.collate(samples)
        place = {
            "num_read": share.num_read,
            "is_shared": share.is_shared,
            "is_ended": len(samples) < self.batch_size,
            "dataset": dataset.state_dict() if self.asks else None,
            **shared_out(dataset),
        }
        return Delivery(share.worker, len(samples), place, batch)

    def _open(self, dataset: Any, place: Mapping[str, Any] | None, is_quiet: bool = False) -> Iterator[Any]:
        """Returns the stream's iterator at a position, by restoring its state or by reading up to the position."""
        if place is not None and place["is_ended"]:
            return iter(())  # a dataset at its end may report its start
        is_restored = place is not None and place.get("dataset") is not None
        if self._begun is not None:
            dataset.begin_behind(self._begun)
        if place is not None and is_restored:
            dataset.load_state_dict(place["dataset"])
        source: Iterator[Any] = iter(dataset)
        if place is not None and not is_restored:
            reread(source, place["num_read"], "samples", is_quiet)
        elif place is not None and not place["num_read"]:
            return begin_pass(source, dataset)
        return source

    def _read_here(self, source: Iterator[Any], start: Mapping[str, Any] | None) -> Iterator[Delivery]:
        num_read = start["num_read"] if start is not None else 0
        while samples := self._take(source):
            num_read += len(samples)
            is_ended = len(samples) < self.batch_size
            place = {"num_read": num_read, "is_shared": True, "is_ended": is_ended, "dataset": None}
            place.update(shared_out(self.dataset))
            yield Delivery(0, len(samples), place, self.collate(samples))

    def _read_share(self, share: Share, epoch: int, had_its_turn: bool) -> Iterator[Delivery]:
        if had_its_turn:
            yield Delivery(share.worker, 0, {}, None)
        while True:
            seed_generators(self.seed, epoch, share.worker, share.num_read)
            samples = self._take(share)
            if not samples:
                return
            yield self._deliver(self.dataset, share, samples)

    def _take(self, source: Iterator[Any]) -> list[Any]:
        samples = list(itertools.islice(source, self.batch_size))
        return [] if self.drop_last and len(samples) < self.batch_size else samples


class StreamLoader(DataLoader[Any]):
    """A DataLoader over a stream, whose position in samples can be saved and restored.

    The attributes are those of the DataLoader that a user would have built; batches come from an inner DataLoader.
    `num_parts` is the number of processes that read such batches. With `keeps_order`, workers take whole batches of a
    stream that does not shard itself, so that the batches are those without workers; such a pass cannot be resumed.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        seed: int,
        options: dict[str, Any],
        num_parts: int = 1,
        keeps_order: bool = False,
    ) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        super().__init__(
            dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate, generator=generator, **options
        )
        self.seed = seed
        self.global_micro_batch_size = batch_size * num_parts
        self.block = batch_size if keeps_order else 1
        self.clock = torch.zeros(2, dtype=torch.int64, device="cpu")
        if self.num_workers:
            self.clock.share_memory_()  # type: ignore[no-untyped-call]
        self._options = options
        self._inner: DataLoader[Any] | None = None
        self._passes = OpenPasses()
        self._resume: dict[str, Any] | None = None
        self._before: list[Any] = []  # the dataset's own state before the first pass

    @property
    def total_batch_size(self) -> int | None:
        """Returns `global_micro_batch_size` under accelerate's name."""
        return self.global_micro_batch_size

    @property
    def restores(self) -> bool:
        """Returns True if the stream's position can be restored without reading the stream again."""
        return restores_exactly(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.clock[0] = epoch
        self._resume = None
        set_epoch(self.dataset, epoch)

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Starts the next pass at a position of a `StreamReader`.

        A position saved with another number of workers is resumed in the shards of those workers.

        Raises:
            ValueError: the number of workers differs, and the stream does not shard itself, so that each shard would
                read the whole stream again.
        """
        saved = position["num_workers"]
        if is_cut_otherwise(position, self.num_workers, self.restores):
            if saved > 1 and any(place is not None and not place["is_shared"] for place in position["workers"]):
                raise ValueError(
                    f"dataloader_num_workers={self.num_workers}: the checkpoint was written in the middle of a stream "
                    f"that {saved} workers shared, each of which reads the whole stream and keeps its part. Resume "
                    f"with dataloader_num_workers={saved}, or set ignore_data_skip=True to restart the epoch. A "
                    "stream whose __iter__ chooses its part by torch.utils.data.get_worker_info() (as datasets streams "
                    "of several shards do) can change the number."
                )
            if max(saved, self.num_workers) > 1:
                logger.info("The rest of this epoch is read in the %d parts that it was begun in.", max(saved, 1))
        self._resume = dict(position)

    def __len__(self) -> int:
        """Returns the number of batches in a pass; raises TypeError if the stream has no length."""
        dataset: Any = self.dataset
        readers, size = max(self.num_workers, 1), self.batch_size or 1
        turns, rest = divmod(len(dataset), readers * self.block)
        shares = [turns * self.block + min(max(rest - worker * self.block, 0), self.block) for worker in range(readers)]
        return sum(share // size if self.drop_last else -(-share // size) for share in shares)

    def standing(self) -> dict[str, Any] | None:
        """Returns the position of a stream between two passes.

        Returns None if every pass begins alike: the stream saves no position, or workers read copies of it.
        """
        if self.num_workers or not self.restores:
            return None
        state = copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
        return {
            "num_workers": 0,
            "last": -1,
            "workers": [{"num_read": 0, "is_shared": True, "is_ended": False, "dataset": state}],
        }

    def open(self) -> StreamReader:
        """Starts a pass; without workers, samples to read again are read now."""
        resume, self._resume = self._resume, None
        self.clock[1] += 1
        begin = self.standing()
        if begin is not None and not self._before:
            self._before = [start_of(self.dataset)]
        if resume is not None:
            resume["pass"] = int(self.clock[1])
            self._inner = None  # persistent workers cannot be sent a position
        if self._inner is None:
            size, collate = self.batch_size or 1, self.collate_fn
            stream = Stream(self.dataset, size, self.drop_last, collate, self.seed, self.clock, self.block)
            stream.resume = resume
            self._inner = DataLoader(
                stream, batch_size=None, collate_fn=hand_over, generator=self.generator, **self._options
            )
        return StreamReader(self, self._passes.open(self._inner), resume or begin)

    def __iter__(self) -> Any:
        return self.open()

    def close(self) -> None:
        """Stops the workers, and restores the dataset's state before the first pass."""
        self._inner = None
        self._passes.close()
        if self._before:
            self.dataset.load_state_dict(self._before.pop())  # type: ignore[attr-defined]


class StreamReader:
    """One pass over a `StreamLoader`. Its position counts the batches taken, not those prefetched."""

    def __init__(self, loader: StreamLoader, deliveries: Iterator[Delivery], resume: Mapping[str, Any] | None) -> None:
        self.loader = loader
        self.deliveries = deliveries
        self.num_workers: int = resume["num_workers"] if resume else loader.num_workers
        if loader.restores and max(self.num_workers, loader.num_workers) <= 1:
            self.num_workers = loader.num_workers
        self.places: list[dict[str, Any] | None] = (
            list(resume["workers"]) if resume else [None] * max(self.num_workers, 1)
        )
        self.last: int = resume["last"] if resume else -1
        self.kept = {name: resume[name] for name in ("of_all", "begun") if resume and name in resume}
        self.sizes: deque[int] = deque()  # samples of each batch that was taken and not counted yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            worker, num_samples, place, batch = next(self.deliveries)
            if num_samples:
                self.sizes.append(num_samples)
                self.places[worker], self.last = place, worker
                return batch

    def position(self) -> dict[str, Any]:
        """Returns the stream's position after the batches taken; JSON-serializable if the dataset's state is."""
        loader, places, num_workers = self.loader, self.places, self.num_workers
        if not loader.num_workers and not num_workers and loader.restores and places[0] and places[0]["num_read"]:
            places = [{**places[0], "dataset": loader.dataset.state_dict()}]  # type: ignore[attr-defined]
        last = self.last if max(num_workers, loader.num_workers) > 1 else -1  # a single reader is always next
        return {"num_workers": num_workers, "last": last, "workers": places, **self.kept}


def is_cut_otherwise(position: Mapping[str, Any], num_workers: int, restores: bool) -> bool:
    """Returns True if a position was saved with an incompatible number of workers.

    No worker and one worker are compatible for a stream that restores its position. They are not for a stream that is
    read again: those of `datasets` shuffle differently in a worker.
    """
    if position.get("of_all"):
        return True
    if not restores:
        return int(position["num_workers"]) != num_workers
    return max(int(position["num_workers"]), 1) != max(num_workers, 1)


def share_of(dataset: Any) -> tuple[Any, int, int]:
    """Returns (the unwrapped stream, the rank of this process, the number of processes that share the stream)."""
    if hasattr(dataset, "begin_behind"):
        return dataset.dataset, dataset.rank, dataset.size
    return dataset, 0, 1


def shared_out(dataset: Any) -> dict[str, Any]:
    """Returns the sharding entries of a position; see `paceline.pytorch.data.stream_places`."""
    return {"is_shared_out": dataset.is_shared_out} if hasattr(dataset, "begin_behind") else {}


def samples_in(position: Mapping[str, Any]) -> int:
    """Returns the number of samples yielded before a position.

    If the stream does not shard itself, each worker reads all of it and only the samples of its shard count.
    """
    num_workers, num_samples = max(int(position["num_workers"]), 1), 0
    for worker, place in enumerate(position["workers"]):
        if place is not None:
            num_read = int(place["num_read"])
            num_samples += num_read if place["is_shared"] else -(-(num_read - worker) // num_workers)
    return num_samples


def begin_pass(source: Iterator[Any], again: Any) -> Iterator[Any]:
    """Returns an iterator over a pass that begins at a position between two passes.

    A stream that is still at the end of the previous pass yields nothing. It is then opened once more, as in a run
    without interruption.
    """

    def passes() -> Iterator[Iterable[Any]]:
        first = list(itertools.islice(source, 1))
        yield first
        yield source if first else again

    return itertools.chain.from_iterable(passes())


def hand_over(delivery: object) -> Any:
    """Returns a batch unchanged; replaces the collator of the inner loader."""
    return delivery


def restores_exactly(dataset: object) -> bool:
    """Returns True if a stream has a state_dict and the state is complete.

    `datasets` streams omit the contents of a shuffle buffer, so a stream with such a buffer is read again instead.
    """
    offers = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
    is_whole = getattr(dataset, "restores_exactly", True)  # a stream that wraps another may report it
    return offers and bool(is_whole) and not has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))


def has_shuffle_buffer(link: object) -> bool:
    """Returns True if a chain of `datasets` iterables contains a shuffle buffer."""
    if link is None:
        return False
    if "BufferShuffled" in type(link).__name__:
        return True
    links = [getattr(link, "ex_iterable", None), *(getattr(link, "ex_iterables", None) or ())]
    return any(has_shuffle_buffer(inner) for inner in links)


def with_own_position(dataset: Any) -> Any:
    """Returns a stream of `datasets` that shares its position with no other stream; any other dataset as it is.

    Streams that are made from one another (`skip` and `take`) share the objects that hold the position: reading one
    would move the position that is saved of the other.
    """
    if getattr(dataset, "_ex_iterable", None) is None:
        return dataset
    own = object.__new__(type(dataset))
    own.__dict__.update(vars(dataset), _ex_iterable=copied_chain(dataset._ex_iterable))
    return own


def copied_chain(link: Any) -> Any:
    """Returns a copy of a chain of `datasets` iterables, which share their data."""
    made = copy.copy(link)
    if getattr(link, "ex_iterable", None) is not None:
        made.ex_iterable = copied_chain(link.ex_iterable)
    if getattr(link, "ex_iterables", None):
        made.ex_iterables = list(map(copied_chain, link.ex_iterables))
    return made


def start_of(dataset: Any) -> Any:
    """Returns the state with which the next pass over a stream begins, if it is in none.

    A stream of `datasets` reports the end of its last pass, and begins where it was told to last.
    """
    own = with_own_position(dataset)
    if own is not dataset:
        own._prepare_ex_iterable_for_iteration()
    return copy.deepcopy(own.state_dict())


def reread(source: Iterator[Any], count: int, unit: str, is_quiet: bool = False) -> int:
    """Reads and drops `count` items, logs the time and how to avoid it, and returns the number of items read."""
    if not is_quiet and count:
        logger.warning(
            "The position in this data cannot be restored: reading the first %d %s again. To avoid it, give the "
            "dataset (or loader) state_dict() and load_state_dict(), or restart the epoch with ignore_data_skip=True.",
            count,
            unit,
        )
    start = time.monotonic()
    next_report, done = start + FIRST_REPORT, 0
    for _ in itertools.islice(source, count):
        done += 1
        now = time.monotonic()
        if now > next_report and not is_quiet:
            next_report = now + REPORT_EVERY
            left = (now - start) / done * (count - done)
            logger.warning("Read %d of %d %s again; %.0f s to go.", done, count, unit, left)
    if not is_quiet and count:
        logger.warning("Read %d %s again in %.1f s.", done, unit, time.monotonic() - start)
    return done
