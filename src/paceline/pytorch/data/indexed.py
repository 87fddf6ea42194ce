"""Loads datasets with an index, with batches of indices that can start anywhere and seeded workers."""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core.optional import LateModule
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.generators import seed_generators
from paceline.pytorch.data.sampling import RankBatches, has_length, skip_samples

if TYPE_CHECKING:
    from paceline.pytorch.data import arrow_rows, small_tensors
else:
    arrow_rows = LateModule("paceline.pytorch.data.arrow_rows")
    small_tensors = LateModule("paceline.pytorch.data.small_tensors")


logger = logging.getLogger(__name__)


class SeededIndices(list[int]):
    """The indices of one batch, and the key with which a worker seeds its generators before reading the batch."""

    key: tuple[int, int]  # (epoch, samples of the epoch before this batch)


class SeededItems(Dataset[Any]):
    """A dataset in the workers, whose random augmentation depends on (seed, epoch, position), not on the worker.

    Augmentation is therefore the same for any number of workers, any prefetch factor, and after a restart.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch: int | None = None

    def __getitems__(self, indices: SeededIndices) -> list[Any]:
        epoch, position = indices.key
        seed_generators(self.seed, epoch, position)
        if epoch != self.epoch:  # a persistent worker's dataset still has the epoch in which the worker started
            self.epoch = epoch
            small_tensors.send_small_tensors_by_value()
            set_epoch(self.dataset, epoch)
        read_many = getattr(self.dataset, "__getitems__", None)
        if callable(read_many):
            try:
                rows: list[Any] = read_many(list(indices))
            except StopIteration as error:
                raise cut_short(self.dataset, *indices) from error
            return rows
        rows = list(map(partial(operator.getitem, self.dataset), indices))
        if len(rows) != len(indices):
            raise cut_short(self.dataset, indices[len(rows)])
        return rows


def cut_short(dataset: object, *indices: int) -> RuntimeError:
    """Returns the error for a dataset or collator that raised StopIteration, which would end the epoch."""
    name = f"index {indices[0]}" if len(indices) == 1 else f"one of the indices {', '.join(map(str, indices))}"
    return RuntimeError(
        f"StopIteration was raised while reading {name} of a {type(dataset).__name__}. It would end the epoch "
        "silently: call next() with a default, or catch StopIteration there and raise an error that names the problem."
    )


class IndexBatches(Sampler[list[int]]):
    """Batches of indices from any sampler, and the number of samples in each batch.

    Args:
        sampler: yields indices, or lists of indices if `batch_size` is None.
        batch_size: samples per batch.
        drop_last: drop a smaller last batch.
        is_seeded: attach to each batch the key with which a worker seeds its generators.
        data_shard: the shard of this process if several processes share the sampler's order. If the sampler yields
            batches, each of n processes takes every n-th batch.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int | None,
        drop_last: bool,
        is_seeded: bool,
        data_shard: DataShard | None = None,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.is_seeded = is_seeded
        self.data_shard = data_shard
        self.sizes: deque[int] = deque()  # sizes of the batches that the latest iteration yielded
        self.keeps_indices = False
        self.indices: deque[list[int]] = deque()  # indices of these batches, with `keeps_indices`
        self._epoch = 0
        self._start = 0
        self._opened: Iterator[Any] | None = None

    @property
    def is_positionable(self) -> bool:
        """Returns True if the sampler can start anywhere, and saves the settings that its order depends on."""
        return all(hasattr(self.sampler, name) for name in ("set_position", "state_dict", "load_state_dict"))

    def keep_indices(self) -> None:
        """Keeps the indices of each batch from the next pass on, until a reader takes them."""
        self.keeps_indices = True

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self._epoch, self._start, self._opened = epoch, 0, None
        set_epoch(self.sampler, epoch)

    def set_position(self, consumed: int) -> None:
        """Makes the next pass skip the first `consumed` samples of the common order.

        If the sampler yields batches, `consumed` counts samples of this process's batches. A sampler that can only be
        read from its start is read immediately, so that it draws from its generator now. No sample is read.
        """
        self._start = consumed
        if hasattr(self.sampler, "set_position"):
            self.sampler.set_position(consumed)
        elif self.batch_size is None:
            self._opened = iter(skip_samples(self._own_batches(iter(self.sampler)), consumed))
        else:
            self._opened = iter(self.sampler)
            for _ in itertools.islice(self._opened, consumed):
                pass

    def forget_position(self) -> None:
        """Makes later passes start at the beginning; open passes are not affected."""
        self._start, self._opened = 0, None
        if hasattr(self.sampler, "set_position"):
            self.sampler.set_position(0)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        num = len(self.sampler)
        if self.data_shard is not None:
            return self._length_of_share(self.data_shard, num)
        if self.batch_size is None:
            return num
        return num // self.batch_size if self.drop_last else -(-num // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # keep `_opened`: a DataLoader with workers opens two iterators and reads the second
        source = self._opened if self._opened is not None else iter(self.sampler)
        self.sizes = sizes = deque[int]()
        self.indices = deque[list[int]]()
        if self.data_shard is not None and self.batch_size is not None:
            return self._walk_share(self.data_shard, source, sizes, self._start)
        return self._walk(source if self._opened is not None else self._own_batches(source), sizes, self._start)

    def _own_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the sampler's batches that this process reads."""
        data_shard = self.data_shard
        if data_shard is None or data_shard.reads_all:
            return batches
        return itertools.islice(batches, data_shard.rank, None, data_shard.size)

    def _length_of_share(self, data_shard: DataShard, num: int) -> int:
        if self.batch_size is None:
            return -(-num // data_shard.size)
        return num // data_shard.window * len(data_shard.slots) if self.drop_last else data_shard.num_slots(num)

    def _walk_share(
        self,
        data_shard: DataShard,
        source: Iterator[Any],
        sizes: deque[int],
        position: int,
    ) -> Iterator[list[int]]:
        """Yields this process's shard of each slot; a small last slot may have no shard for this process."""
        epoch, indices = self._epoch, self.indices
        while slot := list(itertools.islice(source, length := data_shard.left_in_slot(position))):
            if self.drop_last and len(slot) < length:
                return
            for start, own in data_shard.cut(slot):
                sizes.append(len(own))
                if self.keeps_indices:
                    indices.append(list(own))
                batch = SeededIndices(own) if self.is_seeded else own
                if isinstance(batch, SeededIndices):
                    batch.key = (epoch, position + start)
                yield batch
            position += len(slot)

    def _walk(self, source: Iterator[Any], sizes: deque[int], position: int) -> Iterator[list[int]]:
        epoch, batch_size, indices = self._epoch, self.batch_size, self.indices
        while True:
            batch: list[int]
            if batch_size is None:
                batch = next(source, [])
            else:
                batch = list(itertools.islice(source, batch_size))
                if self.drop_last and len(batch) < batch_size:
                    return
            if not batch:
                return
            sizes.append(len(batch))
            if self.keeps_indices:
                indices.append(list(batch))
            if self.is_seeded:
                seeded = SeededIndices(batch)
                seeded.key = (epoch, getattr(batch, "position", position))
                position += len(batch)
                batch = seeded
            yield batch


class LocalBatches(Iterator[Any]):
    """Reads and collates batches in this process, like a DataLoader without workers but faster.

    Args:
        dataset: has `__getitem__`, or `__getitems__` for a whole batch.
        collate: `(samples) -> batch`.
        batches: lists of indices.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], batches: Iterator[list[int]]) -> None:
        self.batches = batches
        self.collate = collate
        self.dataset = dataset
        self.read = partial(operator.getitem, dataset)
        self.read_many = getattr(dataset, "__getitems__", None)

    def __next__(self) -> Any:
        indices = next(self.batches)
        try:
            if self.read_many is not None:
                return self.collate(self.read_many(indices))
            rows = list(map(self.read, indices))  # shorter than `indices` if an item raises StopIteration
            if len(rows) == len(indices):
                return self.collate(rows)
        except StopIteration as error:
            raise cut_short(self.dataset, *indices) from error
        raise cut_short(self.dataset, indices[len(rows)])


class OpenPasses:
    """The passes over a loader that may still have workers.

    Workers end with the iterator that started them. The traceback of an error keeps that iterator alive, so `close`
    stops the workers explicitly.
    """

    def __init__(self) -> None:
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Starts a pass."""
        iterator = iter(loader)
        self._iterators.add(iterator)
        return iterator

    def close(self) -> None:
        """Stops the workers of all passes, and waits until they have ended."""
        for iterator in list(self._iterators):
            stop = getattr(iterator, "_shutdown_workers", None)  # torch calls this method from __del__
            if callable(stop):
                stop()
        self._iterators.clear()


def end_kept_workers(loader: object) -> bool:
    """Ends the persistent workers of a loader of torch, whose next pass then starts others; returns False without any.

    If they are left to the garbage collector, which closes the queues to the workers first, each of them blocks the
    program for 5 s at an unpredictable time: torch waits that long for a worker that was not asked to end.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or loader._iterator is None:
        return False
    iterator, loader._iterator = loader._iterator, None
    iterator._shutdown_workers()  # type: ignore[attr-defined]
    return True


class IndexedLoader(DataLoader[Any]):
    """A DataLoader over a dataset with an index, whose next pass can start at any sample.

    The attributes are those of the DataLoader that a user would have built. With workers or pinned memory, batches come
    from an inner DataLoader over `IndexBatches` and, with workers, `SeededItems`. Otherwise this process reads them,
    and augmentation draws from its generators as usual. If several processes share the data, the sampler yields the
    common order, and each process reads its shard. With `gives_batches`, a sampler of any class yields batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        seed: int,
        options: dict[str, Any],
        data_shard: DataShard | None = None,
        gives_batches: bool = False,
    ) -> None:
        is_per_rank = isinstance(sampler, RankBatches)
        gives_batches = gives_batches or is_per_rank or isinstance(sampler, BatchSampler)
        if gives_batches:
            shape: dict[str, Any] = {"batch_sampler": sampler}
        else:
            shape = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        generator = torch.Generator(device="cpu").manual_seed(seed)
        super().__init__(dataset, collate_fn=collate, generator=generator, **shape, **options)
        self.seed = seed
        self.batches = IndexBatches(
            sampler,
            None if gives_batches else batch_size,
            not gives_batches and drop_last,
            bool(self.num_workers),  # workers seed their generators for each batch
            None if is_per_rank or isinstance(sampler, DistributedSampler) else data_shard,
        )
        if data_shard is not None and getattr(sampler, "generator", self) is None:  # one order for all processes
            sampler.generator = torch.Generator(device="cpu").manual_seed(seed)
        self._options = options
        self._num_samples = len(dataset) if has_length(dataset) else None
        self._inner: DataLoader[Any] | None = None
        self._passes = OpenPasses()

    @property
    def global_micro_batch_size(self) -> int | None:
        """Returns the samples per micro-batch over all processes; None if the sampler yields batches."""
        data_shard = self.batches.data_shard
        return self.batch_size if data_shard is None or self.batch_size is None else data_shard.slots[0]

    @property
    def total_batch_size(self) -> int | None:
        """Returns `global_micro_batch_size` under accelerate's name."""
        return self.global_micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        dataset: Any = self.dataset
        size = len(dataset) if self._num_samples is not None else None
        if size != self._num_samples:
            logger.warning(
                "The training data had %d samples when its loader was made and has %d now: the order of the samples is "
                "still that of %d. Start another training on the changed data.",
                self._num_samples,
                size,
                self._num_samples,
            )
            self._num_samples = None  # once
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        if not self.num_workers and not self.pin_memory:
            iterator: Iterator[Any] = LocalBatches(*self._reading(), iter(self.batches))
            self.batches.forget_position()
            return iterator
        if self._inner is None:
            dataset, collate = self._reading()
            self._inner = DataLoader(
                SeededItems(dataset, self.seed) if self.num_workers else dataset,
                batch_sampler=self.batches,
                collate_fn=collate,
                generator=self.generator,
                **self._options,
            )
        iterator = self._passes.open(self._inner)
        self.batches.forget_position()
        return iterator

    def over(self, batches: Sequence[list[int]]) -> DataLoader[Any]:
        """Returns a loader of given batches of indices, with the workers and the collator of this one."""
        dataset, collate = self._reading()
        options = {**self._options, "persistent_workers": False}
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **options)

    def _reading(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Returns the dataset and the collator of a pass; numeric Arrow data is read as arrays."""
        if not type(self.dataset).__module__.startswith("datasets."):
            return self.dataset, self.collate_fn
        found: tuple[Any, Callable[[list[Any]], Any]] = arrow_rows.as_arrays(self.dataset, self.collate_fn)
        return found

    def close(self) -> None:
        """Stops the workers of unfinished passes and persistent workers."""
        self._inner = None
        self._passes.close()


def set_epoch(holder: object, epoch: int) -> None:
    """Calls `set_epoch` if it exists."""
    method = getattr(holder, "set_epoch", None)
    if callable(method):
        method(epoch)
