"""Training data of members that read it in different orders, or read different samples of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.args.errors import UnsupportedOption
from paceline.args.members import Member
from paceline.pytorch.data.sampling import OrderedSampler, random_order


class Indexed(Protocol):
    """A dataset with an index and a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class MemberRows:
    """A dataset whose entries are one sample per member.

    Args:
        dataset: the training data.
    """

    def __init__(self, dataset: Indexed) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Returns the number of samples of each member."""
        return len(self.dataset)

    def __getitem__(self, places: Sequence[int]) -> list[Any]:
        """Returns the samples at these places, one per member."""
        return [self.dataset[place] for place in places]


class MemberCollator:
    """Collates the samples of all members at once, so that they are padded alike, to `(samples, members, ...)`.

    Args:
        collate: the collator of one member.
        num_members: number of members.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], num_members: int) -> None:
        self.collate, self.num_members = collate, num_members

    def __call__(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Returns the batch.

        Raises:
            UnsupportedOption: the collator's batch has a value without one row per sample.
        """
        return self._split(self.collate([sample for row in rows for sample in row]), len(rows))

    def _split(self, batch: object, size: int) -> Any:
        if isinstance(batch, Mapping):
            return {name: self._split(value, size) for name, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)(self._split(value, size) for value in batch)
        if isinstance(batch, Tensor) and batch.ndim and len(batch) == size * self.num_members:
            return batch.view(size, self.num_members, *batch.shape[1:])
        raise UnsupportedOption(
            f"members with data_seed or bootstrap: the batches have a value of type {type(batch).__name__} that is no "
            "tensor with one row per sample, and cannot be divided among the members. Let the collator return such "
            "tensors, or leave data_seed and bootstrap out."
        )


def bootstrap_places(size: int, seed: int) -> Tensor:
    """Returns the places of a sample with replacement, int64 of shape (size,)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(size, (size,), generator=generator)


def own_order(members: Sequence[Member]) -> bool:
    """True if members read different batches."""
    return any(member.data_seed is not None or member.bootstrap is not None for member in members)


def member_sampler(size: int, members: Sequence[Member], seed: int, is_random: bool) -> OrderedSampler:
    """Returns a sampler whose entries are one place per member.

    Args:
        size: number of samples.
        members: the members.
        seed: the seed of the order of members without `data_seed`.
        is_random: a new order in each epoch; otherwise dataset order.
    """
    seeds = [seed if member.data_seed is None else member.data_seed for member in members]
    settings = {"kind": "members", "seeds": seeds, "bootstrap": [member.bootstrap for member in members]}

    def order(epoch: int, chosen: Mapping[str, Any]) -> Tensor:
        orders = []
        for own, drawn in zip(chosen["seeds"], chosen["bootstrap"], strict=True):
            places = random_order(size, own, epoch) if is_random else torch.arange(size)
            orders.append(places if drawn is None else bootstrap_places(size, drawn)[places])
        return torch.stack(orders, 1)

    return OrderedSampler(size, settings, order)
