"""The order of samples: pure index arithmetic, a function of (seed, epoch, samples consumed).

Nothing here reads a sample, draws from a global generator or keeps a position while iterating. On resume, the order of
the epoch is recomputed (one permutation) and read from the saved position.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from paceline.args.packing import TokenBudget
from paceline.args.registry import ORDERS, SAMPLERS
from paceline.core.lengths import GivenLengths, Lengths, find_lengths, length_grouped_order
from paceline.core.optional import load
from paceline.pytorch.data.rebalance import balance

logger = logging.getLogger(__name__)

Order = Sequence[int] | Tensor | Lengths
CHUNK = 65536  # indices converted to Python integers at a time: 2 MB instead of the whole permutation


def random_order(size: int, seed: int, epoch: int) -> Tensor:
    """Returns the permutation of one epoch, int64 of shape (size,); equals transformers' for the same seed."""
    generator = torch.Generator(device="cpu").manual_seed(seed + epoch)
    return torch.randperm(size, generator=generator, device="cpu")


class OrderedSampler(Sampler[int]):
    """A sampler whose order depends only on (settings, epoch), and which can start anywhere in an epoch.

    Args:
        size: number of samples.
        settings: JSON-serializable values that the order depends on. Checkpoints contain them, so that a resumed run
            finishes the epoch in progress in its original order even if the arguments have changed.
        order: `(epoch, settings) -> the indices of that epoch`.
    """

    def __init__(
        self,
        size: int,
        settings: Mapping[str, Any],
        order: Callable[[int, Mapping[str, Any]], Order],
    ) -> None:
        self.size = size
        self.settings = dict(settings)
        self.order = order
        self.epoch = 0
        self.position = 0
        self._current = self.settings

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch, self.position, self._current = epoch, 0, self.settings

    def set_position(self, consumed: int) -> None:
        """Skips the first `consumed` samples, until another epoch or position is set. Reads nothing."""
        self.position = consumed

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings that the order of the epoch in progress depends on."""
        return {**self._current, "size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the order of the epoch in progress; the next epoch follows the current settings."""
        self._current = finish_in(state, self.settings, self.size)

    def __len__(self) -> int:
        """Returns the number of samples in an epoch."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        return walk(self.indices(), self.position)

    def indices(self) -> Order:
        """Returns the indices of the whole epoch, in order."""
        return self.order(self.epoch, self._current)


def finish_in(saved: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns the settings for the epoch in progress: the saved ones if they describe the same kind of order."""
    saved = dict(saved)
    saved_size = saved.pop("size", size)
    if saved_size != size:
        logger.warning(
            "The training data had %d samples when the checkpoint was written and has %d now: the samples left in this "
            "epoch are not exactly those that were not seen yet.",
            saved_size,
            size,
        )
    if saved.get("kind") != settings.get("kind"):
        logger.warning(
            "train_sampling_strategy was %r when the checkpoint was written and is %r now: the samples left in this "
            "epoch are not exactly those that were not seen yet.",
            saved.get("kind"),
            settings.get("kind"),
        )
        return dict(settings)
    for name, value in settings.items():
        if name in saved and isinstance(value, int) and not isinstance(saved[name], int):
            raise ValueError(f"the order of the epoch in progress has {name}={str(saved[name])[:40]!r}, not a number")
    return {**settings, **saved}


def walk(order: Order, start: int) -> Iterator[int]:
    """Yields the indices from `start` on as Python integers, converted in chunks."""
    rest = order[start:]
    if isinstance(rest, Tensor):
        rest = rest.numpy()
    if isinstance(rest, np.ndarray):
        chunks = (rest[first : first + CHUNK].tolist() for first in range(0, len(rest), CHUNK))
        return itertools.chain.from_iterable(chunks)
    return iter(rest)


def random_sampler(size: int, seed: int) -> OrderedSampler:
    """Returns a sampler that yields every sample once per epoch, in a different order each epoch."""
    return OrderedSampler(
        size, {"kind": "random", "seed": seed}, lambda epoch, settings: random_order(size, settings["seed"], epoch)
    )


def sequential_sampler(size: int) -> OrderedSampler:
    """Returns a sampler in dataset order."""
    return OrderedSampler(size, {"kind": "sequential"}, lambda epoch, settings: range(size))


def length_grouped_sampler(lengths: GivenLengths, batch_size: int, seed: int) -> OrderedSampler:
    """Returns a sampler that groups similar lengths, in a different order each epoch; see `length_grouped_order`."""

    def order(epoch: int, settings: Mapping[str, Any]) -> Order:
        permutation = random_order(len(lengths), settings["seed"], epoch)
        return length_grouped_order(lengths, settings["batch_size"], permutation)

    settings = {"kind": "group_by_length", "seed": seed, "batch_size": batch_size}
    return OrderedSampler(len(lengths), settings, order)


class RankBatches(Sampler[list[int]]):
    """Yields the micro-batches of one process, from a plan that all processes compute alike.

    Attributes:
        lengths: the length of every sample.
        settings: the values that determine the micro-batches of an epoch.
        epoch: the epoch of the next samples.
        position: samples of the epoch to skip, over all processes.
    """

    lengths: Any
    settings: dict[str, Any]
    epoch = 0
    position = 0
    _current: dict[str, Any]  # settings of the epoch in progress, possibly restored from a checkpoint

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch, self.position, self._current = epoch, 0, self.settings

    def set_position(self, consumed: int) -> None:
        """Skips the first `consumed` samples, counted over all processes, until another is set."""
        self.position = consumed

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings that the micro-batches of the epoch in progress depend on."""
        return {**self._current, "size": len(self.lengths)}


class PlacedBatch(list[int]):
    """The indices of a micro-batch.

    Args:
        indices: the indices.
        position: number of samples of the epoch before this micro-batch, over all processes.
    """

    def __init__(self, indices: Iterable[int], position: int) -> None:
        super().__init__(indices)
        self.position = position


class RebalancedBatches(RankBatches):
    """Micro-batches of about equal padded cost, a fixed number of samples per step; see `pytorch.data.rebalance`.

    Args:
        lengths: length in tokens of every sample.
        global_batch_size: samples per optimizer step, over all processes.
        accumulation: micro-batches per optimizer step and process.
        seed: the seed of the sample order.
        num_ranks: processes that share each optimizer step.
        rank: the rank of this process.
        shuffle: use a different order each epoch; otherwise dataset order.
        drop_last: drop the samples that do not fill an optimizer step. If they are kept and are fewer than the
            micro-batches of an optimizer step, samples from the epoch's start fill the gap, as in transformers.
    """

    def __init__(
        self,
        lengths: GivenLengths,
        global_batch_size: int,
        accumulation: int,
        seed: int,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        if global_batch_size < num_ranks * accumulation:
            raise ValueError(
                f"train_sampling_strategy='batch_rebalance': {global_batch_size} samples per update cannot fill "
                f"{num_ranks * accumulation} micro-batches. Raise per_device_train_batch_size."
            )
        self.lengths = lengths
        self.settings: dict[str, Any] = {
            "kind": "batch_rebalance",
            "seed": seed,
            "samples_per_update": global_batch_size,
            "accumulation": accumulation,
        }
        self.num_ranks = num_ranks
        self.rank = rank
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._current = self.settings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the batches of the epoch in progress."""
        self._current = finish_in(state, self.settings, len(self.lengths))

    @property
    def num_samples(self) -> int:
        """Returns the number of samples in an epoch, over all processes."""
        per_update, size = int(self.settings["samples_per_update"]), len(self.lengths)
        rest = size % per_update
        if self.drop_last or rest == 0:
            return size - rest
        return size - rest + max(rest, self.num_ranks * int(self.settings["accumulation"]))

    def __len__(self) -> int:
        """Returns the number of micro-batches of one process in an epoch."""
        num_samples, per_update = len(self.lengths), self.settings["samples_per_update"]
        num_updates = num_samples // per_update if self.drop_last else -(-num_samples // per_update)
        return int(num_updates * self.settings["accumulation"])

    def __iter__(self) -> Iterator[list[int]]:
        size = len(self.lengths)
        order = random_order(size, self._current["seed"], self.epoch).numpy() if self.shuffle else np.arange(size)
        return self._updates(order, self._current["samples_per_update"], self.position)

    def _updates(self, order: Lengths, per_update: int, position: int) -> Iterator[list[int]]:
        """Yields this process's micro-batches from a position on."""
        size = len(order)
        first, skip = divmod(position, per_update)
        for start in range(first * per_update, size, per_update):
            samples = order[start : start + per_update].tolist()
            if len(samples) < per_update and self.drop_last:
                return
            yield from self._micro_batches(samples, order, start, skip)
            skip = 0

    def _micro_batches(self, samples: list[int], order: Lengths, position: int, skip: int) -> Iterator[list[int]]:
        """Yields this process's micro-batches of one optimizer step.

        The step begins at a position of the epoch. Its first `skip` samples, counted over all processes, are left out.
        """
        num_groups = self.num_ranks * self._current["accumulation"]
        if len(samples) < num_groups:
            samples += order[np.arange(num_groups - len(samples)) % len(order)].tolist()
        groups = balance(
            samples,
            self.lengths,
            num_groups,
            num_ranks=self.num_ranks,
            max_moves=self._current["samples_per_update"],
        )
        for start in range(0, num_groups, self.num_ranks):
            slot = groups[start : start + self.num_ranks]
            size = sum(map(len, slot))
            first, position = position, position + size
            if skip >= size:
                skip -= size
                continue
            own = slot[self.rank]
            dropped = min(skip // self.num_ranks, len(own))
            yield PlacedBatch(own[dropped:], first + sum(map(len, slot[: self.rank])) + dropped)
            skip = 0


@dataclass(frozen=True)
class SamplerRequest:
    """The facts from which a training sampler is made; the argument of each factory in `ORDERS`.

    Attributes:
        size: number of samples.
        find_lengths: returns the length of every sample; may read all of them.
        batch_size: samples per micro-batch, over all processes.
        accumulation: micro-batches per optimizer step.
        seed: the seed of the order.
        drop_last: drop samples that do not fill a batch. If the sampler yields indices, the loader drops them.
        num_ranks: processes that read different samples of one common order. The loader shards the indices, or the
            batches of a `BatchSampler`, among them.
        rank: the rank of this process.
        budget: tokens per micro-batch; None: `batch_size` applies.
        update_size: micro-batches per optimizer step over all processes, if a run is resumed on another number of
            processes.
        multiple: rows are padded to a multiple of this number of tokens.
    """

    size: int
    find_lengths: Callable[[], GivenLengths]
    batch_size: int
    accumulation: int
    seed: int
    drop_last: bool = False
    num_ranks: int = 1
    rank: int = 0
    budget: TokenBudget | None = None
    update_size: int | None = None
    multiple: int = 1


def make_random(request: SamplerRequest) -> OrderedSampler:
    """Returns the sampler of `train_sampling_strategy="random"`."""
    return random_sampler(request.size, request.seed)


def make_sequential(request: SamplerRequest) -> OrderedSampler:
    """Returns the sampler of `train_sampling_strategy="sequential"`."""
    return sequential_sampler(request.size)


def make_length_grouped(request: SamplerRequest) -> OrderedSampler:
    """Returns the sampler of `train_sampling_strategy="group_by_length"`."""
    return length_grouped_sampler(request.find_lengths(), request.batch_size * request.accumulation, request.seed)


def make_rebalanced(request: SamplerRequest) -> RebalancedBatches:
    """Returns the sampler of `train_sampling_strategy="batch_rebalance"`."""
    return RebalancedBatches(
        request.find_lengths(),
        request.batch_size * request.accumulation,
        request.accumulation,
        request.seed,
        num_ranks=request.num_ranks,
        rank=request.rank,
        drop_last=request.drop_last,
    )


def make_train_sampler(
    dataset: Any,
    *,
    strategy: str,
    batch_size: int,
    accumulation: int,
    seed: int,
    lengths: GivenLengths | None = None,
    length_column: str = "length",
    model_input_name: str | None = None,
    drop_last: bool = False,
    num_ranks: int = 1,
    rank: int = 0,
    budget: TokenBudget | None = None,
    update_size: int | None = None,
    multiple: int = 1,
) -> Sampler[Any] | None:
    """Returns the sampler of training samples, in one order for all processes; None for a dataset without a length.

    Args:
        dataset: any dataset.
        strategy: a name in `ORDERS` of `paceline.args.registry`.
        batch_size: samples per micro-batch, over all processes.
        accumulation: micro-batches per optimizer step.
        seed: the seed of the order; epoch e is drawn with `seed + e`.
        lengths: the length of every sample, for the strategies that need them; None: read from the column
            `length_column`, else measured on `model_input_name` of every sample.
        drop_last, num_ranks, rank, budget, update_size, multiple: see `SamplerRequest`.

    Raises:
        ValueError: the strategy is unknown, or needs lengths that cannot be found.
    """
    if dataset is None:
        return None
    if strategy not in ORDERS:
        raise ValueError(f"train_sampling_strategy={strategy!r} is unknown. Use one of {', '.join(SAMPLERS)}.")
    entry = ORDERS[strategy]
    if not has_length(dataset) or (budget is not None and isinstance(dataset, IterableDataset)):
        if entry.takes_streams:
            return None
        raise stream_refused(strategy, budget)
    request = SamplerRequest(
        size=len(dataset),
        find_lengths=lambda: lengths if lengths is not None else find_lengths(dataset, length_column, model_input_name),
        batch_size=batch_size,
        accumulation=accumulation,
        seed=seed,
        drop_last=drop_last,
        num_ranks=num_ranks,
        rank=rank,
        budget=budget,
        update_size=update_size,
        multiple=multiple,
    )
    sampler: Sampler[Any] = load(entry.factory)(request)
    return sampler


def stream_refused(strategy: str, budget: TokenBudget | None) -> ValueError:
    """Returns the error of a stream whose samples must be ordered or counted by their length."""
    if budget is not None:
        return ValueError(
            f"per_device_train_tokens={budget.tokens} is planned from the length of every sample, and the training "
            "data is a stream. Use per_device_train_batch_size, with packing='flatten' against padding, or data "
            "with an index: a list, or a datasets.Dataset."
        )
    return ValueError(
        f"train_sampling_strategy={strategy!r} needs to know every sample's length, and the training data has "
        "no len(). Use train_sampling_strategy='random', which leaves a stream in its own order."
    )


def make_eval_sampler(
    dataset: Any,
    *,
    strategy: str,
    batch_size: int,
    seed: int,
    lengths: GivenLengths | None = None,
    length_column: str = "length",
    model_input_name: str | None = None,
) -> OrderedSampler | None:
    """Returns the sampler of evaluation samples: in dataset order, or by length if training is `group_by_length`.

    Sorting by length only changes the order of computation; `predict` returns the rows in dataset order. Arguments and
    errors are those of `make_train_sampler`. Returns None for a dataset without a length.
    """
    if dataset is None or not has_length(dataset):
        return None
    if strategy == "group_by_length":
        lengths = lengths if lengths is not None else find_lengths(dataset, length_column, model_input_name)
        return length_grouped_sampler(lengths, batch_size, seed)
    return sequential_sampler(len(dataset))


def has_length(dataset: Any) -> bool:
    """Returns True if `len(dataset)` works."""
    try:
        len(dataset)
    except TypeError:
        return False
    return True


def skip_samples(batches: Iterable[list[int]], consumed: int) -> Iterator[list[int]]:
    """Returns an iterator over batches of indices without the first `consumed` indices, which it reads and drops."""
    iterator = iter(batches)
    for batch in iterator:
        if consumed < len(batch):
            return itertools.chain([batch[consumed:]], iterator)
        consumed -= len(batch)
    return iterator
