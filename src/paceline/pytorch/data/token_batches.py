"""Micro-batches with a token budget, planned from the lengths of the samples, in a different order each epoch.

The content of a micro-batch is a function of (lengths, settings, seed, epoch). The lengths alone determine the number
of micro-batches and the lengths of their samples, so each epoch has the same number. The epoch determines which of the
samples of about equal length go into which micro-batch, and the order of the micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.args.packing import TokenBudget
from paceline.core.lengths import GivenLengths, Lengths
from paceline.pytorch.data.packing import best_fit_decreasing
from paceline.pytorch.data.rebalance import QUADRATIC_COST
from paceline.pytorch.data.sampling import PlacedBatch, RankBatches, SamplerRequest, finish_in

OCTAVE = 4  # samples whose lengths share the first 4 + 1 binary digits may swap: at most 6 % more padding


@dataclass(frozen=True)
class Partition:
    """Micro-batches as positions in the list of samples sorted by descending length.

    Attributes:
        batches: the positions of the samples in each micro-batch.
        costs: the cost of each micro-batch, in tokens.
    """

    batches: list[Lengths]
    costs: NDArray[np.float64]


def padded_batches(widths: Lengths, tokens: int) -> list[Lengths]:
    """Returns micro-batches of consecutive samples whose number times width stays within the token budget.

    Args:
        widths: padded lengths of the samples, in descending order; none above `tokens`.
        tokens: the budget.
    """
    batches, start = [], 0
    while start < len(widths):
        end = min(start + tokens // max(int(widths[start]), 1), len(widths))
        batches.append(np.arange(start, end))
        start = end
    return batches


def packed_batches(lengths: Lengths, row_length: int, num_rows: int) -> list[Lengths]:
    """Returns micro-batches of at most `num_rows` rows, filled by best-fit decreasing.

    A collator that packs the samples of a micro-batch in the same way makes the same rows.

    Args:
        lengths: lengths of the samples, in descending order; none above `row_length`.
        row_length: maximum tokens per row.
        num_rows: maximum rows per micro-batch.
    """
    rows = best_fit_decreasing(lengths.tolist(), row_length)
    starts = range(0, len(rows), num_rows)
    return [np.fromiter(itertools.chain(*rows[start : start + num_rows]), dtype=np.int64) for start in starts]


def evened(batches: list[Lengths], num_ranks: int) -> list[Lengths]:
    """Returns the micro-batches, with the largest ones split until their number is a multiple of `num_ranks`.

    The number is not a multiple only if all micro-batches are single samples.
    """
    batches = list(batches)
    while len(batches) % num_ranks:
        largest = max(range(len(batches)), key=lambda place: len(batches[place]))
        whole = batches[largest]
        if len(whole) == 1:
            break
        batches[largest : largest + 1] = [whole[0::2], whole[1::2]]
    return batches


def batch_cost(lengths: Lengths, is_packed: bool) -> float:
    """Returns the cost of a micro-batch in tokens: linear layers by length, attention by squared length.

    Args:
        lengths: lengths of its samples.
        is_packed: its samples are not padded.
    """
    sizes = lengths.astype(np.float64)
    costs = sizes + QUADRATIC_COST * sizes**2
    return float(costs.sum() if is_packed else len(costs) * costs.max())


def class_widths(lengths: Lengths, multiple: int) -> Lengths:
    """Returns for each sample the longest length in its class, rounded up to the multiple.

    Samples of the same class swap positions between epochs. Each length below 32 is a class; longer lengths share a
    class if they differ by less than 1/16.

    Args:
        lengths: lengths of the samples.
        multiple: rows are padded to a multiple of this number of tokens.
    """
    exponents = np.frexp(lengths.astype(np.float64))[1].astype(np.int64) - 1  # exponent of the highest binary digit
    steps = np.left_shift(1, np.maximum(exponents - OCTAVE, 0))
    classes, members = np.unique(lengths // steps * steps, return_inverse=True)
    longest = np.zeros(len(classes), dtype=np.int64)
    np.maximum.at(longest, members, lengths)
    widths: Lengths = (-(-longest // multiple) * multiple)[members]
    return widths


def shuffled_slots(costs: NDArray[np.float64], size: int, generator: torch.Generator) -> Lengths:
    """Returns an order of micro-batches in slots of `size` micro-batches of about equal cost.

    The costliest slot comes first; the order of the others is random. Micro-batches that do not fill a slot come last;
    they are chosen at random.
    """
    drawn = torch.randperm(len(costs), generator=generator).numpy()
    rest = len(costs) % size
    last, kept = drawn[:rest], drawn[rest:]
    slots = kept[np.argsort(-costs[kept], kind="stable")].reshape(-1, size)
    if len(slots) > 1:
        order = torch.randperm(len(slots) - 1, generator=generator).numpy() + 1
        slots = np.concatenate([slots[:1], slots[order]])
    sequence: Lengths = np.concatenate([slots.ravel(), last])
    return sequence


class TokenBatches(RankBatches):
    """One process's micro-batches within a token budget, which includes padding.

    All processes have the same number of micro-batches, and run micro-batches of about equal cost at the same time;
    some micro-batches are split for that. Only if all micro-batches are single samples, some processes may have one
    fewer at the end of the epoch.

    Args:
        lengths: the length of every sample.
        budget: tokens per micro-batch and per packed row.
        seed: the seed of the order.
        per_update: micro-batches per optimizer step over all processes; a multiple of `num_ranks`.
        multiple: rows are padded to a multiple of this number of tokens.
        num_ranks: number of processes that share each optimizer step.
        rank: the rank of this process.

    Raises:
        ValueError: a sample is longer than the budget or a row.
    """

    def __init__(
        self,
        lengths: Lengths,
        budget: TokenBudget,
        seed: int,
        per_update: int,
        *,
        multiple: int = 1,
        num_ranks: int = 1,
        rank: int = 0,
    ) -> None:
        check_lengths(lengths, budget, multiple)
        self.lengths = lengths
        self.settings: dict[str, Any] = {
            "kind": "tokens",
            "seed": seed,
            "tokens": budget.tokens,
            "row_length": budget.row_length or 0,
            "multiple": multiple,
            "num_ranks": num_ranks,
        }
        self.per_update = per_update
        self.num_ranks = num_ranks
        self.rank = rank
        self.epoch = 0
        self.position = 0
        self._current = self.settings
        self._partition: tuple[tuple[int, ...], Lengths, Partition] | None = None  # cached, with its settings as key
        self._sequence: tuple[Any, Lengths, Lengths] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the micro-batches of the epoch in progress."""
        self._current = finish_in(state, self.settings, len(self.lengths))
        check_lengths(self.lengths, TokenBudget(self._current["tokens"], self._current["row_length"] or None), 1)

    @property
    def num_samples(self) -> int:
        """Returns the number of samples in an epoch, over all processes."""
        return len(self.lengths)

    def __len__(self) -> int:
        """Returns the number of micro-batches of one process in an epoch."""
        return -(-len(self.partition(self.settings)[1].batches) // self.num_ranks)

    def batches_after(self, saved: Mapping[str, Any]) -> int:
        """Returns the number of micro-batches of one process that follow a saved position in its epoch.

        Args:
            saved: epoch, samples consumed, and the settings of the order if the epoch had begun.
        """
        settings = self.settings
        if "order" in saved:
            settings = finish_in(saved["order"], self.settings, len(self.lengths))
        ends = self.sequence(int(saved["epoch"]), settings)[1]
        left = len(ends) - int(np.searchsorted(ends, int(saved["consumed"]), side="right"))
        return -(-left // self.num_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        return self._walk(*self.sequence(self.epoch, self._current), self.position)

    def partition(self, settings: Mapping[str, Any]) -> tuple[Lengths, Partition]:
        """Returns the width of each sample, and the partition into micro-batches; cached."""
        key = (settings["tokens"], settings["row_length"], settings["multiple"], settings["num_ranks"])
        if self._partition is None or self._partition[0] != key:
            tokens, row_length, multiple, num_ranks = key
            widths = self.lengths if row_length else class_widths(self.lengths, multiple)
            ordered = np.sort(widths)[::-1]
            if row_length:
                batches = packed_batches(ordered, row_length, tokens // row_length)
            else:
                batches = padded_batches(ordered, tokens)
            batches = evened(batches, num_ranks)
            costs = np.asarray([batch_cost(ordered[batch], bool(row_length)) for batch in batches])
            self._partition = (key, widths, Partition(batches, costs))
        return self._partition[1:]

    def sequence(self, epoch: int, settings: Mapping[str, Any]) -> tuple[Lengths, Lengths]:
        """Returns the concatenated indices of the micro-batches of an epoch, and the end of each micro-batch."""
        key = (epoch, dict(settings))
        if self._sequence is None or self._sequence[0] != key:
            widths, partition = self.partition(settings)
            generator = torch.Generator(device="cpu").manual_seed(settings["seed"] + epoch)
            drawn = torch.randperm(len(widths), generator=generator).numpy()
            samples = drawn[np.argsort(-widths[drawn], kind="stable")]
            order = shuffled_slots(partition.costs, settings["num_ranks"], generator)
            parts = [partition.batches[batch] for batch in order]
            indices = samples[np.concatenate(parts)] if parts else samples
            self._sequence = (key, indices, np.cumsum([len(part) for part in parts], dtype=np.int64))
        return self._sequence[1:]

    def _walk(self, indices: Lengths, ends: Lengths, position: int) -> Iterator[list[int]]:
        """Yields this process's micro-batches from a position on."""
        first = int(np.searchsorted(ends, position, side="right"))
        for start in range(first, len(ends), self.per_update):
            bounds = ends[start : start + self.per_update]
            batches = np.split(indices[position : bounds[-1]], bounds[:-1] - position)
            for slot in self._slots(batches):
                if self.rank < len(slot):
                    before = sum(map(len, slot[: self.rank]))
                    yield PlacedBatch(slot[self.rank].tolist(), position + before)
                position += sum(map(len, slot))

    def _slots(self, batches: list[Lengths]) -> list[list[Lengths]]:
        """Returns the micro-batches of an optimizer step in slots of about equal cost, with one per process."""
        if self.num_ranks == 1:
            return [[batch] for batch in batches]
        while len(batches) % self.num_ranks and any(len(batch) > 1 for batch in batches):
            dearest = max((batch for batch in batches if len(batch) > 1), key=self._cost)
            batches = [batch for batch in batches if batch is not dearest] + [dearest[0::2], dearest[1::2]]
        batches = sorted(batches, key=self._cost, reverse=True)
        return [batches[start : start + self.num_ranks] for start in range(0, len(batches), self.num_ranks)]

    def _cost(self, batch: Lengths) -> float:
        """Returns the cost in tokens of a micro-batch, given as sample indices."""
        return batch_cost(self.lengths[batch], bool(self._current["row_length"]))


def check_lengths(lengths: Lengths, budget: TokenBudget, multiple: int) -> None:
    """Raises ValueError, which names the longest sample, if it does not fit into a micro-batch."""
    if not len(lengths):
        return
    index = int(np.argmax(lengths))
    length, most = int(lengths[index]), budget.row_length or budget.tokens
    if length > most or (not budget.row_length and -(-length // multiple) * multiple > most):
        name = "per_device_train_tokens" if most == budget.tokens else "packing_length"
        rounded = f", padded to a multiple of {multiple}" if length <= most else ""
        raise ValueError(
            f"{name}={most}: sample {index} of the training data has {length} tokens{rounded}, more than any other. "
            f"Raise {name}, or truncate the samples during tokenization."
        )


def make_token_batches(request: SamplerRequest) -> TokenBatches:
    """Returns the sampler of `per_device_train_tokens`."""
    assert request.budget is not None
    given: GivenLengths = request.find_lengths()
    return TokenBatches(
        np.asarray(given, dtype=np.int64),
        request.budget,
        request.seed,
        request.update_size or request.accumulation * request.num_ranks,
        multiple=request.multiple,
        num_ranks=request.num_ranks,
        rank=request.rank,
    )
