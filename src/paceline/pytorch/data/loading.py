"""Makes data loaders from the arguments: workers, pinned memory, prefetching, and an order that can be resumed.

The loaders draw from their own generators, so creating or iterating one leaves the global generators unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.args.sections import Options
from paceline.pytorch.data.batches import batch_size_of, split_batch
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.dispatch import BatchDispatcher, DispatchedLoader, source_of
from paceline.pytorch.data.distributed_streams import part_of
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.lengths import loader_length, sample_count
from paceline.pytorch.data.prefetch import has_pinned_memory
from paceline.pytorch.data.sampling import OrderedSampler, has_length, sequential_sampler
from paceline.pytorch.data.stream import StreamLoader

__all__ = ["StatefulDataIterator", "batch_size_of", "loader_length", "make_loader", "sample_count", "split_batch"]

logger = logging.getLogger(__name__)


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    sampler: Any,
    collate: Callable[[list[Any]], Any],
    args: Options,
    train: bool,
    seed: int,
    data_shard: DataShard | None = None,
    dispatcher: BatchDispatcher | None = None,
) -> Any:
    """Returns a DataLoader over any dataset.

    Args:
        dataset: a dataset with an index and a length (such as a list), or an iterable of samples.
        batch_size: samples per batch; ignored if the sampler yields batches.
        sampler: yields indices, or batches of indices; None: dataset order. Not used for streams.
        collate: `(samples) -> batch`.
        args: provides the `dataloader_*` options.
        train: True if the loader must resume exactly; evaluation always runs from the start.
        seed: seed of the workers' generators, which are seeded with (seed, epoch, samples before it) for each batch.
            Without workers, augmentation draws from this process's generators, as usual.
        data_shard: the shard of this process, if several processes share the data.
        dispatcher: one process reads for all; None: each process reads its shard.

    Raises:
        ValueError: an option requires workers and there are none, or the dataset has neither an index nor an iterator.
    """
    options = worker_options(args)
    if not train:
        options["in_order"] = True  # predictions are returned in the order of the samples
    elif not args.dataloader_in_order:
        logger.warning(
            "dataloader_in_order=False: batches come as workers finish them, so neither two runs nor a resumed run "
            "see them in the same order."
        )
    drop_last = bool(args.dataloader_drop_last) and train  # evaluation and prediction need every sample
    if is_stream(dataset):
        make_stream = partial(
            StreamLoader, drop_last=drop_last, collate=collate, seed=seed, options=options, keeps_order=not train
        )
        stream = make_stream_loader(make_stream, dataset, batch_size, data_shard, is_split=dispatcher is None)
        return stream if dispatcher is None else DispatchedLoader(stream, dispatcher)
    if not hasattr(dataset, "__getitem__") or (sampler is None and not has_length(dataset)):
        raise ValueError(
            f"A dataset of type {type(dataset).__name__} can be neither read by index nor iterated. Give it __len__ "
            "and __getitem__, or __iter__."
        )
    loader = IndexedLoader(
        dataset,
        sampler=sampler if sampler is not None else sequential_sampler(len(dataset)),
        batch_size=batch_size,
        drop_last=drop_last,
        collate=collate,
        seed=seed,
        options=options,
        data_shard=dispatched(data_shard, dispatcher),
    )
    return loader if dispatcher is None else DispatchedLoader(loader, dispatcher)


def make_stream_loader(
    make: Callable[..., StreamLoader],
    dataset: object,
    batch_size: int,
    data_shard: DataShard | None,
    *,
    is_split: bool,
) -> StreamLoader:
    """Returns the loader of a stream, or of this process's shard of it.

    Args:
        make: `(dataset, batch_size=..., num_parts=...) -> loader`.
        dataset: the stream.
        batch_size: samples per batch without a shard.
        data_shard: the shard of this process, or None.
        is_split: each process reads its shard; otherwise one process reads for all.
    """
    if data_shard is None:
        return make(dataset, batch_size=batch_size, num_parts=1)
    size = data_shard.each or stream_cannot_split(data_shard)
    if is_split and data_shard.size > 1:
        dataset = part_of(dataset, data_shard.rank, data_shard.size, size)
    return make(dataset, batch_size=size, num_parts=data_shard.size)


def dispatched(data_shard: DataShard | None, dispatcher: BatchDispatcher | None) -> DataShard | None:
    """Returns the shard of this process; with a dispatcher, the reading process reads the shards of all."""
    return data_shard if data_shard is None or dispatcher is None else replace(data_shard, reads_all=True)


class KeptLoaders:
    """Caches loaders with persistent workers for repeated evaluations, by dataset.

    Args:
        limit: maximum number of loaders; beyond it, the least recently used loader is closed.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self._kept: dict[tuple[int, str], tuple[Any, Any]] = {}  # keeps each dataset alive, so that its id stays unique

    def get(self, dataset: object, description: str, make: Callable[[], Any]) -> Any:
        """Returns the loader of this dataset for this purpose; `make` creates it at the first call."""
        key = (id(dataset), description)
        self._kept[key] = self._kept.pop(key) if key in self._kept else (dataset, make())  # most recently used last
        if len(self._kept) > self.limit:
            close_loader(self._kept.pop(next(iter(self._kept)))[1])
        return self._kept[key][1]

    def holds(self, loader: object) -> bool:
        """Returns True if this loader is cached here."""
        return any(loader is kept for _, kept in self._kept.values())

    def close(self) -> None:
        """Stops all their workers."""
        for _, loader in self._kept.values():
            close_loader(loader)
        self._kept.clear()


def stream_cannot_split(data_shard: DataShard) -> int:
    """Raises the error for slots of a stream that do not give every process the same number of samples.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"accelerator_config={{'split_batches': True}}: batches of {data_shard.slots[0]} samples of a stream cannot be "
        f"split over {data_shard.size} processes alike. Set the batch size to a multiple of {data_shard.size}."
    )


def is_split(loader: object) -> bool:
    """Returns True if a loader shards its data among processes: ours always do, others with a DistributedSampler."""
    ours = isinstance(loader, IndexedLoader | StreamLoader | DispatchedLoader)
    return ours or isinstance(getattr(loader, "sampler", None), DistributedSampler)


def split_loader(
    loader: DataLoader[Any],
    data_shard: DataShard | None,
    seed: int,
    dispatcher: BatchDispatcher | None = None,
) -> Any:
    """Returns a user's loader rebuilt as one of ours that reads this process's shard.

    A loader that shards its data already is returned unchanged, and so is a loader over a stream. With `dispatcher`,
    one process reads for all; a loader over a stream is then wrapped.
    """
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if is_split(loader):
        return loader
    if is_stream(loader.dataset):
        return loader if dispatcher is None else DispatchedLoader(loader, dispatcher)
    gives_batches = loader.batch_size is None and batch_sampler is not None
    own = IndexedLoader(
        loader.dataset,
        sampler=batch_sampler if gives_batches else sampler,
        gives_batches=gives_batches,
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        collate=loader.collate_fn,
        seed=seed,
        options={
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "in_order": getattr(loader, "in_order", True),
        },
        data_shard=dispatched(data_shard, dispatcher),
    )
    return own if dispatcher is None else DispatchedLoader(own, dispatcher)


def close_loader(loader: object) -> None:
    """Stops the workers of a loader unless it is the user's own."""
    if isinstance(loader, IndexedLoader | StreamLoader | DispatchedLoader):
        loader.close()


def order_by_length(loader: Any) -> list[int] | None:
    """Returns the indices in the order of a loader that groups samples by length; None for any other loader."""
    loader = source_of(loader)
    if not isinstance(loader, IndexedLoader) or (loader.num_workers and not loader.in_order):
        return None
    sampler = loader.batches.sampler
    is_by_length = isinstance(sampler, OrderedSampler) and sampler.settings["kind"] == "group_by_length"
    return list(map(int, sampler.indices())) if is_by_length else None


def check_dataset(dataset: object) -> None:
    """Rejects objects that are often mistaken for a dataset.

    Raises:
        TypeError: it is a loader or a dict; the message says what to pass instead.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "A DataLoader was given as a dataset: pass its `.dataset` (and its collate_fn as data_collator), or "
            "override get_train_dataloader or get_eval_dataloader to use the loader as it is."
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise TypeError(
            f"A {type(dataset).__name__} with {', '.join(map(str, list(dataset)[:8]))} was given as a dataset: pass "
            "one of its splits, or, if these are columns, a list of samples, each a dict."
        )


def named_dataset(default: object, asked: object) -> Any:
    """Returns an evaluation set.

    Args:
        default: the evaluation set of the Trainer, or a dict of several by name.
        asked: a dataset, or a name in `default`; None: `default`.

    Raises:
        ValueError: there is no such set; for a name, the message lists the known names.
    """
    if isinstance(asked, str):
        if not isinstance(default, Mapping) or asked not in default:
            there = f"those of {', '.join(map(repr, default))}" if isinstance(default, Mapping) else "no dict of them"
            raise ValueError(f"eval_dataset={asked!r}: the Trainer has no evaluation set of that name, but {there}.")
        return default[asked]
    dataset = asked if asked is not None else default
    if dataset is None:
        raise ValueError("Trainer: evaluation requires an eval_dataset: pass one to the Trainer, or to evaluate().")
    return dataset


def is_stream(dataset: object) -> bool:
    """Returns True for an IterableDataset, or any iterable without an index or a length."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and has_length(dataset):
        return False
    return hasattr(dataset, "__iter__")


def worker_options(args: Options) -> dict[str, Any]:
    """Returns the checked options of DataLoader for workers and memory.

    Raises:
        ValueError: an option requires workers and there are none.
    """
    num_workers = int(args.dataloader_num_workers)
    if num_workers == 0:
        needing = {
            "dataloader_prefetch_factor": None,
            "dataloader_persistent_workers": False,
            "dataloader_multiprocessing_context": None,
        }
        for name, neutral in needing.items():
            if getattr(args, name) != neutral:
                raise ValueError(
                    f"{name}={getattr(args, name)!r} needs workers: set dataloader_num_workers to 1 or more, or leave "
                    f"{name} at {neutral!r}."
                )
    return {
        "num_workers": num_workers,
        "pin_memory": bool(args.dataloader_pin_memory) and can_pin(args),
        "persistent_workers": bool(args.dataloader_persistent_workers),
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": bool(args.dataloader_in_order),
    }


def can_pin(args: Options) -> bool:
    """Returns True if pinned memory helps: an accelerator with its own memory is in use."""
    return not args.use_cpu and has_pinned_memory()
