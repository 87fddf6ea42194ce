"""Sums the losses over the batches of an evaluation, for the mean over samples or targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.reductions import IGNORE_INDEX, LossReduction

EARLY = 2  # batches that are kept: with one sample each, the second is the first that is probed


@dataclass
class Sum:
    """The weighted sum of the losses so far, under reductions that gave every batch the same weights."""

    reductions: list[LossReduction]
    total: Any = 0.0
    weight: float = 0.0


class LossSum:
    """The weighted mean of the losses of any number of batches, which is independent of the split into batches.

    Each batch is weighted under all candidate reductions, so that a decision by a later batch also applies to earlier
    ones. Reductions with equal weights share one sum, for any number of batches.
    """

    def __init__(self, normalizer: LossNormalizer) -> None:
        self.normalizer = normalizer
        self.num_batches = 0  # batches with a loss
        self._sums = [Sum(list(normalizer.candidates))]
        self._early: list[tuple[Tensor, Counts, object]] = []

    def add(self, loss: Tensor, counts: Counts, num_items: object) -> None:
        """Adds one batch without synchronizing with the device. A batch of weight 0 adds nothing, even if its loss is
        NaN.
        """
        loss = loss.detach().double() if loss.device.type != "mps" else loss.detach()
        if not self._holds(self.normalizer.candidates):
            self._take_new()
        self.num_batches += 1
        if self.num_batches <= EARLY:
            self._early.append((loss, counts, num_items))
        self._weigh(loss, counts, num_items)

    def _weigh(self, loss: Tensor, counts: Counts, num_items: object) -> None:
        sums: list[Sum] = []
        for kept in self._sums:
            for weight, reductions in self._weights(kept.reductions, counts, num_items).items():
                total = kept.total + loss * weight if weight else kept.total
                sums.append(Sum(reductions, total, kept.weight + weight))
        self._sums = sums

    def _holds(self, candidates: Sequence[LossReduction]) -> bool:
        return sum(len(kept.reductions) for kept in self._sums) == len(candidates)

    def _take_new(self) -> None:
        """Adopts the candidates that a probe added: starts anew with the batches so far, if they are kept. Later
        candidates count all targets of the batches before them.
        """
        if self.num_batches <= EARLY:
            self._sums = [Sum(list(self.normalizer.candidates))]
            for loss, counts, num_items in self._early:
                self._weigh(loss, counts, num_items)
            return
        known = {reduction for kept in self._sums for reduction in kept.reductions}
        for reduction in self.normalizer.candidates:
            if reduction not in known:
                usual = replace(reduction, ignore_index=IGNORE_INDEX)
                next(kept for kept in self._sums if usual in kept.reductions).reductions.append(reduction)

    def _weights(
        self,
        reductions: list[LossReduction],
        counts: Counts,
        num_items: Any,
    ) -> dict[float, list[LossReduction]]:
        """Returns the reductions grouped by the weight they give this batch."""
        if self.normalizer.function is not None:
            return {counts.weight: reductions}
        if self.normalizer.is_scaled and num_items is not None:
            return {float(num_items): reductions}
        found: dict[float, list[LossReduction]] = {}
        for reduction in reductions:
            is_sum = reduction.unit == "sum"
            weight = 1 if is_sum else reduction.weigh(counts.labels, counts.samples, counts.is_shifted)
            found.setdefault(weight, []).append(reduction)
        return found

    def mean(self) -> float | None:
        """Returns the mean loss; None if no batch had a loss. Synchronizes with the device.

        Logs a warning if other possible reductions would give another mean.
        """
        normalizer = self.normalizer
        reductions = normalizer.open_reductions()
        found = [next(item for item in self._sums if reduction in item.reductions) for reduction in reductions]
        number, *values = self.share([self.num_batches, *(float(item.total) for item in found)])
        weights = self.share([item.weight for item in found])
        means = [self._divide(*each) for each in zip(reductions, values, weights, strict=True)]
        own = means[0]
        if number > 1:
            normalizer.warn_of_coupling()
            others = [mean for mean in means[1:] if mean is not None and own is not None]
            normalizer.warn_of_doubt(any(abs(mean - (own or 0.0)) > 1e-6 * abs(own or 0.0) for mean in others))
        return own if number else None

    def share(self, values: list[float]) -> list[float]:
        """Returns the sums over all processes."""
        return values

    def _divide(self, reduction: LossReduction, total: float, weight: float) -> float | None:
        if weight == 0:
            return None
        return total if reduction.unit == "sum" and not self.normalizer.is_scaled else total / weight
