"""Datasets and streams that draw random numbers, read by workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.loading import make_loader
from paceline.pytorch.data.sampling import make_train_sampler


def arguments(num_workers: int = 2, **options: Any) -> SimpleNamespace:
    settings = {
        "dataloader_num_workers": num_workers,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
        "dataloader_multiprocessing_context": None,
        "dataloader_pin_memory": False,
        "dataloader_in_order": True,
        "dataloader_drop_last": False,
        "use_cpu": True,
    }
    return SimpleNamespace(**{**settings, **options})


def augmented(index: int) -> dict[str, Any]:
    """Draws on all three generators; the collator draws once more."""
    return {"id": index, "noise": [random.random(), float(np.random.rand()), torch.rand(()).item()]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "id": torch.tensor([row["id"] for row in rows]),
        "noise": torch.tensor([row["noise"] for row in rows]) + torch.rand(1),
    }


class Images:
    """A dataset with an index and random augmentation."""

    def __init__(self, size: int, reads_many: bool = False) -> None:
        self.size, self.epoch = size, 0
        if reads_many:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return augmented(index + 1000 * self.epoch)


class Stream(IterableDataset[dict[str, Any]]):
    """Knows nothing of workers."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def indices(self) -> Iterator[int]:
        yield from range(self.size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self.indices():
            yield augmented(index + 1000 * self.epoch)


class SharedStream(Stream):
    """Chooses its part itself."""

    def indices(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        yield from range(info.id * self.size // info.num_workers, (info.id + 1) * self.size // info.num_workers)


class StatefulStream(SharedStream):
    """And can be put back to its place."""

    next: int | None = None

    def indices(self) -> Iterator[int]:
        part = list(super().indices())
        start, self.next = self.next or 0, None
        for place in range(start, len(part)):
            self.next = place + 1
            yield part[place]
        self.next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def collect(iterator: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
    batches = [batch for _, batch in zip(range(num_batches), iterator, strict=False)]
    return batches, len(batches)


def feed_of(dataset: Any, args: SimpleNamespace, batch_size: int = 4, seed: int = 3) -> StatefulDataIterator:
    sampler = make_train_sampler(dataset, strategy="random", batch_size=batch_size, accumulation=1, seed=seed)
    loader = make_loader(
        dataset, batch_size=batch_size, sampler=sampler, collate=collate, args=args, train=True, seed=seed
    )
    return StatefulDataIterator(loader, accumulation=2, collect=collect)


def draw(feed: StatefulDataIterator, num_windows: int | None = None) -> list[tuple[list[int], list[list[float]]]]:
    seen = []
    while num_windows is None or num_windows > 0:
        batches, _ = feed.draw()
        if not batches:
            break
        seen += [(batch["id"].tolist(), batch["noise"].tolist()) for batch in batches]
        num_windows = None if num_windows is None else num_windows - 1
    return seen


def ids_of(batches: list[tuple[list[int], list[list[float]]]]) -> list[int]:
    return [index for ids, _ in batches for index in ids]


def run_epochs(feed: StatefulDataIterator, epochs: range) -> list[Any]:
    seen = []
    for epoch in epochs:
        feed.start_epoch(epoch)
        seen.append(draw(feed))
    feed.close()
    return seen


class LoneStream(StatefulStream):
    def indices(self) -> Iterator[int]:
        start, self.next = self.next or 0, None
        for place in range(start, self.size):
            self.next = place + 1
            yield place
        self.next = None
