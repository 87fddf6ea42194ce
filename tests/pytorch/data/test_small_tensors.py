"""Batches of workers: the same values, and small tensors are in no shared memory."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from worker_streams import arguments

from paceline.pytorch.data.loading import make_loader
from paceline.pytorch.data.sampling import make_train_sampler
from paceline.pytorch.data.small_tensors import LARGEST, _reduce, send_small_tensors_by_value


class Pair(NamedTuple):
    first: Tensor
    second: Any


def make_batch(number: int) -> dict[str, Any]:
    row = torch.arange(number, number + 12).reshape(3, 4)
    same = row.clone()
    dtypes = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.uint8,
        torch.complex64,
        torch.float8_e4m3fn,
    )
    return {
        **{str(dtype): row.to(dtype) for dtype in dtypes},
        "input_ids": row,
        "labels": same,
        "same": same,
        "scalar": torch.tensor(number),
        "empty": torch.empty(0, 5),
        "transposed": row.T,
        "part": torch.arange(100)[10:20],
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "large": torch.full((LARGEST + 1,), number % 7, dtype=torch.uint8),
        "nested": Pair(row + 1, [row + 2, {"deep": (row + 3, "text")}]),
        "dict": UserDict(inner=row + 4),
    }


class Rows:
    """A map-style dataset of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def collate(samples: list[int]) -> dict[str, Any]:
    return make_batch(sum(samples))


def leaves(batch: dict[str, Any]) -> list[Any]:
    return tree_leaves({**batch, "dict": dict(batch["dict"])})


@pytest.mark.parametrize("data", [Rows(), Flow()], ids=["rows", "stream"])
def test_batches_of_workers_are_those_without(data: Any) -> None:
    found = {}
    for workers in (0, 2):
        sampler = make_train_sampler(data, strategy="random", batch_size=2, accumulation=1, seed=3)
        loader = make_loader(
            data, batch_size=2, sampler=sampler, collate=collate, args=arguments(workers), train=True, seed=3
        )
        found[workers] = list(loader)
    assert len(found[2]) == len(found[0]) >= 4
    if isinstance(data, Rows):
        for here, there in zip(found[0], found[2], strict=True):
            for one, other in zip(leaves(here), leaves(there), strict=True):
                if isinstance(one, Tensor):
                    assert (one.dtype, one.shape) == (other.dtype, other.shape)
                    assert one.tolist() == other.tolist()
                else:
                    assert one == other
    for batch in found[2]:
        assert batch["labels"] is batch["same"]
        assert batch["large"].is_shared()
        assert not batch["input_ids"].is_shared()
        assert not batch["nested"].second[1]["deep"][0].is_shared()
        batch["input_ids"] += 1  # the receiver owns the memory
        assert batch["labels"].tolist() == (batch["input_ids"] - 1).tolist()


def test_what_is_shared_or_special_goes_torchs_way() -> None:
    shared = torch.ones(3).share_memory_()  # type: ignore[no-untyped-call]
    special = [shared, torch.ones(3, 4).T, torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
    assert all(_reduce(tensor)[0].__module__.startswith("torch.") for tensor in special)
    assert _reduce(torch.ones(3))[0].__module__ == "paceline.pytorch.data.small_tensors"


def test_other_processes_keep_torchs_way() -> None:
    send_small_tensors_by_value()
    assert ForkingPickler._extra_reducers.get(Tensor) is not _reduce  # type: ignore[attr-defined]
