"""Splits the samples of one optimizer step into micro-batches of about equal cost, for data of varying length.

The algorithm is that of transformers' `BatchRebalanceSampler`, so that a run has the same micro-batches. Samples sorted
by length are split into contiguous groups. Then one sample at a time moves from the costliest group to the cheapest,
until the group sizes repeat. Only the sizes change, so a move costs O(groups) for any number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.lengths import GivenLengths

QUADRATIC_COST = 0.001  # cost of attention per squared length, relative to linear layers per length
ROUNDS_PER_GROUP = 30  # minimum of the maximum number of moves, per group


def padded_cost(num_samples: int, longest: int) -> float:
    """Returns the cost of a micro-batch padded to its longest sample, in token units."""
    return num_samples * longest + QUADRATIC_COST * num_samples * longest * longest


def balance(
    indices: Sequence[int],
    lengths: GivenLengths,
    num_groups: int,
    *,
    num_ranks: int = 1,
    max_moves: int | None = None,
) -> list[list[int]]:
    """Returns `num_groups` micro-batches of about equal padded cost for one optimizer step, the costliest first.

    Args:
        indices: the samples, at least `num_groups`.
        lengths: length in tokens of every sample of the dataset.
        num_groups: micro-batches per optimizer step, over all processes.
        num_ranks: processes that run one micro-batch each at the same time.
        max_moves: maximum number of moves; the default and minimum is 30 per group.

    Raises:
        ValueError: there are fewer samples than groups.
    """
    if len(indices) < num_groups:
        raise ValueError(
            f"{len(indices)} samples cannot fill {num_groups} micro-batches: lower gradient_accumulation_steps, or "
            "raise per_device_train_batch_size."
        )
    ordered = sorted(indices, key=lambda index: -lengths[index])  # stable: ties stay in the order of `indices`
    groups = Groups([int(lengths[index]) for index in ordered], num_groups, num_ranks)
    groups.balance(max(num_groups * ROUNDS_PER_GROUP, max_moves or 0))
    costs = groups.costs()
    starts = groups.starts()
    by_cost = sorted(range(num_groups), key=lambda group: -costs[group])
    return [ordered[starts[group] : starts[group] + groups.counts[group]] for group in by_cost]


class Groups:
    """Contiguous groups of lengths in descending order; only their sizes (`counts`) change."""

    def __init__(self, lengths: list[int], num_groups: int, num_ranks: int) -> None:
        base, remainder = divmod(len(lengths), num_groups)
        self.lengths = lengths
        self.num_ranks = num_ranks
        self.counts = [base + (group < remainder) for group in range(num_groups)]
        self.frozen: set[int] = set()

    def starts(self) -> list[int]:
        """Returns the first position of each group."""
        starts, position = [], 0
        for count in self.counts:
            starts.append(position)
            position += count
        return starts

    def costs(self) -> list[float]:
        """Returns the cost of each group, padded to its first sample, which is the longest."""
        return [padded_cost(c, self.lengths[s]) for c, s in zip(self.counts, self.starts(), strict=True)]

    def balance(self, max_moves: int) -> None:
        """Moves samples until the counts repeat; keeps the counts with the smallest spread of costs."""
        seen: set[tuple[int, ...]] = set()
        best_spread, best = float("inf"), list(self.counts)
        for _ in range(max_moves):
            key = tuple(self.counts)
            active = [group for group in range(len(self.counts)) if group not in self.frozen]
            if key in seen or len(active) <= 1:
                break
            seen.add(key)
            costs = self.costs()
            dearest = max(active, key=costs.__getitem__)
            cheapest = min(active, key=costs.__getitem__)
            spread = costs[dearest] - costs[cheapest]
            if spread < best_spread:
                best_spread, best = spread, list(self.counts)
            if spread == 0:
                break
            if self.counts[dearest] > 1:
                self.counts[dearest] -= 1
                self.counts[cheapest] += 1
            else:
                self._freeze_slot(dearest, costs)
        self.counts = best

    def _freeze_slot(self, dearest: int, costs: list[float]) -> None:
        """Freezes the slot of a one-sample group, which cannot give a sample away.

        The other groups of the slot are first filled up to its cost.
        """
        ranking = sorted(range(len(costs)), key=lambda group: -costs[group])
        first = ranking.index(dearest) // self.num_ranks * self.num_ranks
        slot = set(ranking[first : first + self.num_ranks])
        for group in slot:
            if group != dearest and group not in self.frozen:
                self._fill(group, slot, costs[dearest])
        self.frozen |= slot

    def _fill(self, group: int, slot: set[int], cap: float) -> None:
        """Takes samples from cheap groups outside the slot while the cost stays under `cap`."""
        while padded_cost(self.counts[group] + 1, self.lengths[self.starts()[group]]) <= cap:
            costs = self.costs()
            outside = [
                other
                for other, count in enumerate(self.counts)
                if count > 1 and other not in slot and other not in self.frozen
            ]
            if not outside:
                return
            self.counts[min(outside, key=costs.__getitem__)] -= 1
            self.counts[group] += 1
