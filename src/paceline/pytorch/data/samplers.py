"""Samplers with transformers' names, which shard a dataset among processes or group samples of similar length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from paceline.core.lengths import describe_sample, length_grouped_order
from paceline.pytorch.data.sampling import RebalancedBatches, random_order, walk


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Returns the order of `LengthGroupedSampler` as a list; see `length_grouped_order`.

    Args:
        lengths: length of every sample.
        batch_size: samples that will be padded together.
        mega_batch_mult: batches in a block that is sorted by length; None: 50, or fewer for little data.
        generator: draws the random order; None: torch's global generator.
    """
    permutation = torch.randperm(len(lengths), generator=generator)
    order: list[int] = length_grouped_order(lengths, batch_size, permutation, mega_batch_mult).tolist()
    return order


class LengthGroupedSampler(Sampler[int]):
    """Groups samples of similar length, in a different order each time; see `length_grouped_order`.

    The permutation is drawn from `generator`, or from torch's global generator, when an iteration begins.

    Args:
        batch_size: samples that will be padded together.
        dataset: its samples are dicts, read once to measure them. Not needed with `lengths`.
        lengths: the length of every sample.
        model_input_name: the input that is measured; None: `input_ids`.
        generator: draws the order; None: torch's global generator.

    Raises:
        ValueError: neither a dataset nor lengths are given, or samples cannot be measured.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Sequence[int] | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = measure(dataset, lengths, model_input_name)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        permutation = torch.randperm(len(self.lengths), generator=self.generator)
        return walk(length_grouped_order(self.lengths, self.batch_size, permutation), 0)


class DistributedLengthGroupedSampler(DistributedSampler[int]):
    """One process's shard of the samples, grouped by similar length; all shards have the same number of samples.

    Args:
        batch_size: samples that will be padded together, over all processes.
        dataset: as for `LengthGroupedSampler`.
        num_replicas: number of processes; None: torch.distributed's world size.
        rank: the rank of this process; None: torch.distributed's rank.
        seed: the seed of the order; epoch e is drawn with `seed + e`.
        drop_last: drop the samples that do not give every process one more; otherwise repeat the first samples.
        lengths: the length of every sample.
        model_input_name: as for `LengthGroupedSampler`.

    Raises:
        ValueError: neither a dataset nor lengths are given, samples cannot be measured, or the rank is out of range.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        model_input_name: str | None = None,
    ) -> None:
        self.lengths = measure(dataset, lengths, model_input_name)
        super().__init__(self.lengths, num_replicas, rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        permutation = random_order(len(self.lengths), self.seed, self.epoch)
        order = length_grouped_order(self.lengths, self.batch_size, permutation).tolist()
        return itertools.islice(itertools.cycle(order), self.rank, self.total_size, self.num_replicas)


class DistributedSamplerWithLoop(DistributedSampler[int]):
    """A DistributedSampler of torch that fills the last batch with samples from the epoch's start.

    Args:
        dataset: any object with a length.
        batch_size: samples per process and batch.
        kwargs: arguments of `torch.utils.data.distributed.DistributedSampler`.
    """

    def __init__(self, dataset: Any, batch_size: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        num_missing = -len(indices) % self.batch_size
        # torch has already repeated the first sample of these ranks at the end
        start = 1 if self.rank < len(self.dataset) % self.num_replicas else 0  # type: ignore[arg-type]
        return itertools.chain(indices, itertools.islice(itertools.cycle(indices), start, start + num_missing))


class ShardSampler(Sampler[int]):
    """One process's batches of a dataset in dataset order; batches go to the processes in turn.

    Args:
        dataset: any object with a length.
        batch_size: samples per process and batch.
        drop_last: drop the samples that do not fill a batch of every process; otherwise repeat the first samples.
        num_processes: number of processes that share the dataset.
        process_index: the rank of this process.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.total_batch_size = batch_size * num_processes
        size = len(dataset)
        num_batches = size // self.total_batch_size if drop_last else -(-size // self.total_batch_size)
        self.total_num_samples = num_batches * self.total_batch_size

    def __len__(self) -> int:
        return self.total_num_samples // self.num_processes

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        for start in range(self.batch_size * self.process_index, self.total_num_samples, self.total_batch_size):
            yield from (place % size for place in range(start, start + self.batch_size))


class IterableDatasetShard(IterableDataset[Any]):
    """One process's batches of a stream; batches go to the processes in turn.

    Every process reads the whole stream, so its order must be the same on all of them. The epoch is set by `set_epoch`
    if the stream has that method; otherwise a torch.Generator in its attribute `generator` is seeded with `seed +
    epoch` when an iteration begins.

    Attributes:
        dataset: the stream.
        batch_size: samples per process and batch.
        drop_last: drop the samples that do not fill a batch of every process; otherwise repeat the first samples.
        num_processes: number of processes that share the stream.
        process_index: the rank of this process.
        seed: seeds the `generator` of the stream.
        num_examples: samples read in this iteration, over all processes, without repeated ones.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.seed = seed
        self.epoch = 0
        self.num_examples = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns the number of samples of this process; raises TypeError if the stream has no length."""
        size, per_round = len(self.dataset), self.batch_size * self.num_processes  # type: ignore[arg-type]
        return (size // per_round if self.drop_last else -(-size // per_round)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.num_examples = 0
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        per_round = self.batch_size * self.num_processes
        own = slice(self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size)
        stream = iter(self.dataset)
        first: list[Any] = []
        while samples := list(itertools.islice(stream, per_round)):
            self.num_examples += len(samples)
            if len(samples) < per_round:
                if self.drop_last:
                    return
                samples += itertools.islice(itertools.cycle(first or list(samples)), per_round - len(samples))
            first = first or samples
            yield from samples[own]


class BatchRebalanceSampler(RebalancedBatches):
    """Micro-batches of about equal padded cost: `RebalancedBatches` with transformers' names.

    Args:
        lengths: length of every sample in tokens.
        effective_batch_size: samples per optimizer step, over all processes.
        dp_size: number of processes that share each optimizer step.
        grad_accum: micro-batches per optimizer step and process.
        shuffle: use a different order each epoch.
        seed: the seed of the order; epoch e is drawn with `seed + e`.
        rank: the rank of this process.
        drop_last: drop the samples that do not fill an optimizer step.

    Raises:
        ValueError: an optimizer step has fewer samples than micro-batches.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            list(lengths),
            effective_batch_size,
            grad_accum,
            seed,
            num_ranks=dp_size,
            rank=rank,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self.effective_batch_size = effective_batch_size
        self.dp_size = dp_size
        self.grad_accum = grad_accum
        self.seed = seed


def measure(dataset: Any, lengths: Any, name: str | None) -> list[int]:
    """Returns `lengths` as integers, or else the length of the input `name` (None: `input_ids`) of every sample.

    Raises:
        ValueError: neither a dataset nor lengths are given, or samples are not dicts with that input.
    """
    if lengths is not None:
        return lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    if dataset is None:
        raise ValueError("One of dataset and lengths must be provided: sampling by length needs one.")
    name = name or "input_ids"
    first = dataset[0] if len(dataset) else {name: ()}
    if not isinstance(first, Mapping) or name not in first:
        raise ValueError(
            f"Can only automatically infer lengths for datasets whose items are dictionaries with an '{name}' key, and "
            f"samples are {describe_sample(first)}: give lengths, or another model_input_name."
        )
    return [len(dataset[place][name]) for place in range(len(dataset))]
