"""From a dataset to a loader, as the arguments ask: workers, pinning, prefetching, and an order that can be resumed.

The loaders draw from generators of their own: building or iterating one leaves the global generators alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data.batches import batch_size_of, split_batch
from paceline.data.dispatch import Deal, DispatchedLoader, source_of
from paceline.data.feed import Feed
from paceline.data.indexed import IndexedLoader
from paceline.data.lengths import loader_length, sample_count
from paceline.data.prefetch import has_pinned_memory
from paceline.data.sampling import OrderedSampler, has_length, sequential_sampler
from paceline.data.shared_streams import part_of
from paceline.data.shares import Shares
from paceline.data.stream import StreamLoader

__all__ = ["Feed", "batch_size_of", "loader_length", "make_loader", "sample_count", "split_batch"]

logger = logging.getLogger(__name__)


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    sampler: Any,
    collate: Callable[[list[Any]], Any],
    args: Any,
    train: bool,
    seed: int,
    shares: Shares | None = None,
    deal: Deal | None = None,
) -> Any:
    """A DataLoader over any dataset.

    Args:
        dataset: with an index and a length (a list does), or an iterable of samples.
        batch_size: samples per batch; a sampler that gives whole batches has its own.
        sampler: gives indices, or batches of them; None: as the samples lie. Not used for streams.
        collate: a list of samples to a batch.
        args: the `dataloader_*` options are read.
        train: whether the loader is to be resumed exactly; evaluation always runs from the start.
        seed: of the workers' generators. They are seeded before each batch from (seed, epoch, samples before it).
            Without workers, augmentation draws from this process's generators, as usual.
        shares: the part of this process, where several share the data.
        deal: how one process reads for all; None: each reads its part.

    Raises:
        ValueError: an option that needs workers was given without them; a dataset that is neither kind.
    """
    options = worker_options(args)
    if train and not args.dataloader_in_order:
        logger.warning(
            "dataloader_in_order=False: batches come as workers finish them, so neither two runs nor a resumed run "
            "see them in the same order."
        )
    drop_last = bool(args.dataloader_drop_last) and train  # every sample is evaluated, and predicted for
    if is_stream(dataset):
        if shares is not None:
            batch_size = shares.each or stream_cannot_split(shares)
        if shares is not None and shares.size > 1 and deal is None:
            dataset = part_of(dataset, shares.rank, shares.size, batch_size)
        num_parts = shares.size if shares is not None else 1
        stream = StreamLoader(
            dataset, batch_size=batch_size, drop_last=drop_last, collate=collate, seed=seed, options=options,
            num_parts=num_parts,
        )  # fmt: skip
        return stream if deal is None else DispatchedLoader(stream, deal)
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
        shares=dealt(shares, deal),
    )
    return loader if deal is None else DispatchedLoader(loader, deal)


def dealt(shares: Shares | None, deal: Deal | None) -> Shares | None:
    """The part of this process where it may read for the others too."""
    return shares if shares is None or deal is None else replace(shares, reads_all=True)


class KeptLoaders:
    """Loaders whose workers live on from one evaluation to the next, by the dataset that they read.

    Args:
        limit: how many are kept; beyond it, the one that was not asked for longest is closed.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self._kept: dict[tuple[int, str], tuple[Any, Any]] = {}  # with the dataset, so that its id stays its own

    def get(self, dataset: Any, description: str, make: Callable[[], Any]) -> Any:
        """The loader of this dataset for this purpose, made at the first call."""
        key = (id(dataset), description)
        self._kept[key] = self._kept.pop(key) if key in self._kept else (dataset, make())  # the latest comes last
        if len(self._kept) > self.limit:
            close_loader(self._kept.pop(next(iter(self._kept)))[1])
        return self._kept[key][1]

    def holds(self, loader: Any) -> bool:
        """Whether this loader is one of them."""
        return any(loader is kept for _, kept in self._kept.values())

    def close(self) -> None:
        """Stop all their workers."""
        for _, loader in self._kept.values():
            close_loader(loader)
        self._kept.clear()


def stream_cannot_split(shares: Shares) -> int:
    """Refuse slots of a stream that do not give every process the same number of samples.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"accelerator_config={{'split_batches': True}}: batches of {shares.slots[0]} samples of a stream cannot be "
        f"split over {shares.size} processes alike. Set the batch size to a multiple of {shares.size}."
    )


def is_split(loader: Any) -> bool:
    """Whether each of several processes gets a part of this loader's data: of ours it does, of others by a sampler."""
    ours = isinstance(loader, IndexedLoader | StreamLoader | DispatchedLoader)
    return ours or isinstance(getattr(loader, "sampler", None), DistributedSampler)


def split_loader(loader: DataLoader[Any], shares: Shares | None, seed: int, deal: Deal | None = None) -> Any:
    """A user's loader as one of ours, which reads this process's part; as it is where it cannot be one.

    With `deal` one process reads for all: a loader over a stream too, as it is.
    """
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if is_split(loader):
        return loader
    if is_stream(loader.dataset):
        return loader if deal is None else DispatchedLoader(loader, deal)
    gives_batches = loader.batch_size is None and batch_sampler is not None
    own = IndexedLoader(
        loader.dataset,
        sampler=batch_sampler if gives_batches else sampler,
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
        shares=dealt(shares, deal),
    )
    return own if deal is None else DispatchedLoader(own, deal)


def close_loader(loader: Any) -> None:
    """Stop the workers of a loader that was made here; one that a user made is theirs."""
    if isinstance(loader, IndexedLoader | StreamLoader | DispatchedLoader):
        loader.close()


def order_by_length(loader: Any) -> list[int] | None:
    """The samples of a loader in the order in which it reads them, where that is by length; None for any other."""
    loader = source_of(loader)
    if not isinstance(loader, IndexedLoader) or (loader.num_workers and not loader.in_order):
        return None
    sampler = loader.batches.sampler
    is_by_length = isinstance(sampler, OrderedSampler) and sampler.settings["kind"] == "group_by_length"
    return list(map(int, sampler.indices())) if is_by_length else None


def check_dataset(dataset: Any) -> None:
    """Refuse what is often taken for a data set.

    Raises:
        TypeError: it is a loader, or a dict; the message says what to pass instead.
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


def named_dataset(default: Any, asked: Any) -> Any:
    """The evaluation set that was asked for: itself, the one of that name in a dict of them, or None for the default.

    Raises:
        ValueError: there is none; the message lists the names that there are.
    """
    if isinstance(asked, str):
        if not isinstance(default, Mapping) or asked not in default:
            there = f"those of {', '.join(map(repr, default))}" if isinstance(default, Mapping) else "no dict of them"
            raise ValueError(f"eval_dataset={asked!r}: the Trainer has no evaluation set of that name, but {there}.")
        return default[asked]
    dataset = asked if asked is not None else default
    if dataset is None:
        raise ValueError("Evaluation needs an `eval_dataset`: pass one to the Trainer, or to evaluate().")
    return dataset


def is_stream(dataset: Any) -> bool:
    """Whether samples come by iterating only: an IterableDataset, or any iterable without an index or a length."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and has_length(dataset):
        return False
    return hasattr(dataset, "__iter__")


def worker_options(args: Any) -> dict[str, Any]:
    """The options that DataLoader takes about workers and memory, checked.

    Raises:
        ValueError: an option that only means something with workers, without workers.
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


def can_pin(args: Any) -> bool:
    """Whether pinned memory speeds anything up: there is an accelerator with memory of its own, and it is used."""
    return not args.use_cpu and has_pinned_memory()
