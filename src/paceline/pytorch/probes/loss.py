"""Extra forward passes without side effects that detect the reduction of a loss.

The passes run without gradients, and restore the random generators, buffers, frozen parameters (of a momentum encoder)
and modes of the modules afterwards. A pass has at most as many rows as a training step (two, if micro-batches hold one
sample). For a loss that looks like a sum, a pass takes several copies of a batch, limited by the bytes of outputs that
a step holds. No outputs are kept, so a pass needs less memory than the step's own forward and backward passes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.pytorch.data.batches import batch_size_of, cut_batch, rebuild_mapping, recast
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import is_out_of_memory
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.reductions import (
    MAIN,
    SUM,
    IgnoredTargets,
    LossReduction,
    Observation,
    Split,
    tolerance_of,
    with_ignored,
)
from paceline.pytorch.probes.side_effects import frozen_that_may_change, undoing

logger = logging.getLogger(__name__)

LossOf = Callable[[Any, Any], Tensor | None]  # (batch, num_items_in_batch) -> loss
MAX_PLACES = 32  # positions that are considered for splitting a batch
MAX_CUTS = 6  # splits tried in one probe: some are uninformative, for instance if a part has no target
SMALL = 2**25  # bytes that a probe may take regardless of the memory of a step
OUTPUTS = 3  # estimated outputs of the largest size that a pass without gradients holds at once


@dataclass(frozen=True, eq=False)
class Part:
    """Samples for a forward pass, and their counts."""

    batch: Any
    counts: Counts

    def cut(self, start: int, stop: int) -> Part:
        """Returns the samples from `start` up to `stop`."""
        labels = self.counts.labels
        cut_labels = None if labels is None else labels[start:stop]
        counts = Counts(stop - start, cut_labels, 0, self.counts.is_shifted)
        return Part(cut_batch(self.batch, self.counts.samples, start, stop), counts)


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Disables gradients and compilation; restores random generators, buffers, frozen parameters and modes."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    frozen = [(parameter, parameter.detach().clone()) for parameter in frozen_that_may_change(model)]
    # without gradients, a pass of DistributedDataParallel would broadcast buffers now instead of in the next step
    syncs = getattr(model, "require_forward_param_sync", None)
    if syncs is not None:
        model.require_forward_param_sync = False  # type: ignore[assignment]
    set_stance = getattr(torch.compiler, "set_stance", None)
    try:
        with preserved_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # activation checkpointing warns that no gradients are computed
            with set_stance("force_eager") if set_stance is not None else nullcontext():
                yield
    finally:
        if syncs is not None:
            model.require_forward_param_sync = syncs
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(value)
        for parameter, value in frozen:
            with torch.no_grad():
                parameter.copy_(value)


@dataclass(eq=False)
class LossProbe:
    """Probes the loss of a model.

    Args:
        model: the module to call.
        loss_of: `(batch, num_items_in_batch) -> loss`, 0-dim, or None.
        rounds: batches that are split in one probe.
        copies: number of copies of a batch with as many targets as all micro-batches whose losses are added up; 1
            disables the test on copies.
        must_match: all processes must run the same number of passes, whatever their data.
        agree: `(flag) -> True if it is set on any process`; with `must_match`, called equally often on all.
        owners: objects that the loss calls beside the model; their counters and collections are restored.
        is_gated: a memory gate reports an out-of-memory to the other processes, so it is raised here.
    """

    model: nn.Module
    loss_of: LossOf
    rounds: int = 2
    copies: int = 1
    must_match: bool = False
    owners: Sequence[Any] = ()
    agree: Callable[[bool], bool] = bool
    is_gated: bool = False

    def __post_init__(self) -> None:
        self.failure: str | None = None  # the reason why the last pass gave no loss
        parameter = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        self._dtype = None if parameter is None else parameter.dtype
        self._tolerance = 0.0
        self._largest = 0  # samples of the micro-batches of the step itself
        self._wholes: dict[Part, float | None] = {}  # losses of earlier splits
        self._ignored = IgnoredTargets()

    def look(self, normalizer: LossNormalizer, parts: Sequence[Part], num_items: object) -> list[Observation]:
        """Returns the observations from the losses of these micro-batches and of parts of them.

        Args:
            normalizer: the loss normalizer whose reduction is tested.
            parts: micro-batches; the first one's pass is always made.
            num_items: the count that is passed to the loss function, or None.
        """
        found: list[Observation] = []
        self._largest = max(part.counts.samples for part in parts)
        with undoing([self.model, *self.owners]), leaving_no_trace(self.model):
            is_open = normalizer.declared is None and normalizer.is_scaled is not False
            if is_open and self.agree(num_items is not None):
                found.append(self._change_count(normalizer, parts[0], num_items))
                if self.agree(found[0].count in ("scaled", "partly")):
                    return found
            if normalizer.is_scaled:
                return found
            self.model.eval()
            found += self._cut_all(normalizer, parts, num_items)
            added = self._candidates(normalizer)[len(normalizer.candidates) :]
            if added:
                found.append(Observation(ignored=tuple(dict.fromkeys(item.ignore_index for item in added))))
            return found if normalizer.is_certain else found + self._test_sum(parts, found, num_items)

    def ratio_of_counted(self, part: Part, without_count: Callable[[], AbstractContextManager[None]]) -> float:
        """Returns the ratio of the loss of a batch with its count to that without one; 0.0 if one of them is unknown.

        Args:
            part: the batch.
            without_count: returns the context in which no count is passed.
        """
        with undoing([self.model, *self.owners]), leaving_no_trace(self.model):
            counted = self._repeatable(part, None)
            with without_count():
                mean = self._repeatable(part, None)
        ratio = counted / mean if counted and mean else 0.0
        return ratio if math.isfinite(ratio) else 0.0

    def _candidates(self, normalizer: LossNormalizer) -> tuple[LossReduction, ...]:
        """Returns those of the normalizer, and those with target values that the passes so far may have ignored."""
        return with_ignored(normalizer.candidates, self._ignored.found)

    def _cut_all(self, normalizer: LossNormalizer, parts: Sequence[Part], num_items: object) -> list[Observation]:
        """Splits micro-batches where that separates most of the open reductions."""
        found: list[Observation] = []
        wanted = 1 if normalizer.trusts_class or normalizer.is_confirmed else self.rounds
        # if two joined samples ran out of memory, the processes would make different numbers of passes
        joins = not self.must_match or self._largest > 1
        cuts = find_cuts(parts, self._candidates(normalizer)) if joins else []
        is_small_seen = False
        num_informative = 0
        for _ in range(wanted if self.must_match else MAX_CUTS):
            missed = {candidate for item in found for candidate in item.misses}
            asked = MAIN if normalizer.is_certain else normalizer.open_reductions(among=self._candidates(normalizer))
            alive = [item for item in asked if item not in missed]
            best = max(cuts, key=lambda cut: cut.rank(alive, is_small_seen), default=None)
            if not self.must_match and is_enough(best, alive, is_small_seen, num_informative >= wanted):
                break
            if best is None:
                for _ in range(3):
                    self._loss(parts[0], num_items)
                continue
            seen = self._compare(normalizer, best, num_items)
            found += seen
            is_informative = any(item.misses for item in seen)
            num_informative += is_informative
            is_small_seen |= best.is_small and is_informative
            cuts.remove(best)
            for cut in cuts:
                cut.weigh(self._candidates(normalizer))
                cut.uses += cut.whole is best.whole
        return found

    def _test_sum(self, parts: Sequence[Part], found: Sequence[Observation], num_items: object) -> list[Observation]:
        """Tests on copies of a batch a loss that looked like a sum over its parts.

        A mean whose divisor has a lower bound looks like a sum as long as the number of targets is below that bound.
        """
        is_sum = any(SUM in item.fits for item in found) and not any(SUM in item.misses for item in found)
        if self.copies == 1:
            return [Observation(is_open=True)] if is_sum else []
        if not self.agree(is_sum):
            return []
        one = max(parts, key=lambda part: (is_of_rows(part), MAIN[0].weigh(part.counts.labels, part.counts.samples)))
        with self._measuring(one) as sizes:
            loss = self._loss(one, num_items)
        number = min(self.copies, max(sum(sizes), SMALL) // (OUTPUTS * max(sizes)))
        copied = join([one] * number) if number > 1 and is_of_rows(one) else None
        of_copies = self._loss(copied or one, num_items)
        if not is_sum:
            return []
        if copied is None or loss is None or of_copies is None:
            return [Observation(is_open=True)]
        split = Split(of_copies, loss, loss * (number - 1), lambda _: None, self._tolerance).observe([SUM])
        return [replace(split, is_open=number < self.copies or not split.fits)]

    @contextmanager
    def _measuring(self, part: Part) -> Iterator[list[int]]:
        """Collects the bytes of a batch and of the outputs of each layer, all of which a step holds."""
        sizes = [value.nbytes for value in tree_leaves(part.batch) if isinstance(value, Tensor)]

        def measure(module: nn.Module, inputs: object, outputs: object) -> None:
            sizes.extend(value.nbytes for value in tree_leaves(outputs) if isinstance(value, Tensor))

        layers = [module for module in self.model.modules() if not any(module.children())]
        handles = [layer.register_forward_hook(measure) for layer in layers]
        try:
            yield sizes
        finally:
            for handle in handles:
                handle.remove()

    def _loss(self, part: Part, num_items: object) -> float | None:
        """Returns the loss of a batch, or of samples of two; None if it has none or the pass failed."""
        self.failure = None
        try:
            self._ignored.labels = part.counts.labels
            with self._ignored:
                # user code may change its inputs in place
                loss = self.loss_of(recast(copy.copy(part.batch), torch.clone), num_items)
        except Exception as error:
            fits_step = part.counts.samples <= self._largest and not self.must_match
            if is_out_of_memory(error) and (fits_step or self.is_gated):
                raise  # with must_match, the step itself will run out of memory and notify the other processes
            self.failure = f"{type(error).__name__}: {error}"
            logger.debug("A forward pass of the loss probe failed: %s", self.failure)
            return None
        if loss is None:
            return None
        self._tolerance = tolerance_of(loss.dtype, self._dtype)
        return float(loss.detach().mean())

    def _effect_of_doubling(self, first: float | None, second: float | None) -> str:
        """Returns "ignored", "scaled" or "partly", by the losses with a count and with twice the count; "unknown" if
        they cannot be compared.
        """
        if not first or not second or not math.isfinite(first) or not math.isfinite(second):
            return "unknown"
        ratio, allowed = second / first, max(10 * self._tolerance, 1e-4)
        if abs(ratio - 1) <= allowed:
            return "ignored"
        return "scaled" if abs(ratio - 0.5) <= allowed else "partly"

    def _change_count(self, normalizer: LossNormalizer, part: Part, num_items: Any) -> Observation:
        """Tests if the loss depends on the count, with the same random numbers.

        Args:
            normalizer: the loss normalizer whose reduction is tested.
            part: the micro-batch.
            num_items: its count; None: this process has no count, and only runs the passes that the others run.
        """
        first = self._repeatable(part, num_items)
        second = self._repeatable(part, None if num_items is None else num_items * 2)
        count = self._effect_of_doubling(first, second) if num_items is not None else "unknown"
        is_asked = count in ("scaled", "partly")
        multiple = 0.0
        if self.agree(is_asked):
            mean, number = self._repeatable(part, None), self._num_targets(normalizer, part)
            if is_asked and first and mean and number:
                multiple = first * float(num_items) / (mean * number)
        return Observation(count=count, multiple=multiple)

    def _repeatable(self, part: Part, num_items: object) -> float | None:
        """Returns the loss of a micro-batch; the next call draws the same random numbers."""
        with preserved_rng():
            return self._loss(part, num_items)

    def _num_targets(self, normalizer: LossNormalizer, part: Part) -> int:
        """Returns the number of targets of a micro-batch; `compute_loss` without a count returns the mean over them."""
        own = LossReduction("tokens", shifted=normalizer.shifts)
        return own.weigh(part.counts.labels, part.counts.samples, part.counts.is_shifted)

    def _compare(self, normalizer: LossNormalizer, cut: Cut, num_items: object) -> list[Observation]:
        """Compares the loss of a micro-batch with the losses of its two parts."""
        whole, *others = cut.parts()
        if whole not in self._wholes or self.must_match:
            self._wholes[whole] = self._loss(whole, num_items)
        losses = [self._wholes[whole], *(self._loss(part, num_items) for part in others)]
        known = [value for value in losses if value is not None]
        if len(known) < 3 or not math.isfinite(known[0]):
            return []
        candidates = self._candidates(normalizer)
        cut.weigh(candidates)
        return [Split(known[0], known[1], known[2], cut.shares.get, self._tolerance).observe(candidates)]


# ---- where to split


def choose_parts(window: Sequence[Counts], own: int, number: int) -> list[int]:
    """Returns the indices of at most `number` micro-batches to probe beside `own`, from each kind in turn."""
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for index, item in enumerate(window):
        if index != own and item.weight > 0:
            rows = [main.row_weights(item.labels, item.samples, item.is_shifted) for main in MAIN[:2]]
            kinds.setdefault(tuple(min(row) > 0 for row in rows), []).append(index)
    rounds = itertools.zip_longest(*kinds.values())
    return [index for each in rounds for index in each if index is not None][:number]


@dataclass(eq=False)
class Cut:
    """A micro-batch that can be split after its first samples.

    Attributes:
        whole: the micro-batch.
        place: the number of its samples before the split.
        shares: the first part's share of the weight, under each reduction in which the micro-batch has a weight.
        is_safe: both parts keep targets under any shift; else a loss may be a mean over zero targets.
        is_small: one part has no more targets than any micro-batch: a lower bound of the divisor would show.
        num_weighed: number of candidates for which `shares` was computed.
        uses: number of probes at other positions of this micro-batch.
    """

    whole: Part
    place: int
    shares: dict[LossReduction, float]
    is_safe: bool
    is_small: bool
    num_weighed: int
    uses: int = 0

    def weigh(self, candidates: Sequence[LossReduction]) -> None:
        """Computes the shares under candidates that were added after the others."""
        counts = self.whole.counts
        for item in candidates[self.num_weighed :]:
            rows = item.row_weights(counts.labels, counts.samples, counts.is_shifted)
            if any(rows):
                self.shares[item] = round(sum(rows[: self.place]) / sum(rows), 9)
        self.num_weighed = len(candidates)

    def parts(self) -> tuple[Part, Part, Part]:
        """Returns the whole, and both parts."""
        size = self.whole.counts.samples
        return self.whole, self.whole.cut(0, self.place), self.whole.cut(self.place, size)

    def tells(self, alive: Sequence[LossReduction]) -> bool:
        """Returns True if this split distinguishes some of these reductions."""
        return len({self.shares.get(item) for item in alive}) > 1

    def rank(self, alive: Sequence[LossReduction], is_small_seen: bool) -> tuple[bool, bool, float]:
        """Returns the sort key (distinguishes reductions, is the first with a small part, score); larger is better."""
        return self.tells(alive), self.is_small and not is_small_seen, self.score(alive)

    def score(self, alive: Sequence[LossReduction]) -> float:
        """Returns the informativeness of a probe: the number of distinguished reductions plus their largest distance,
        discounted if the split is unsafe or its micro-batch was used before.
        """
        shares = {self.shares.get(item, 0.0) for item in alive}
        balance = min(self.place, self.whole.counts.samples - self.place) / self.whole.counts.samples
        score = len(shares) + max(shares, default=0.0) - min(shares, default=0.0) + 0.01 * balance
        return score * (1.0 if self.is_safe else 0.1) * 0.7**self.uses


def is_enough(best: Cut | None, alive: Sequence[LossReduction], is_small_seen: bool, has_enough: bool) -> bool:
    """Returns True if no further probe is needed: `best` is None, or adds nothing new after enough probes."""
    return best is None or (has_enough and not any(best.rank(alive, is_small_seen)[:2]))


def find_cuts(parts: Sequence[Part], candidates: Sequence[LossReduction]) -> list[Cut]:
    """Returns every position at which one of these micro-batches can be split."""
    found = []
    least = min(filter(None, (MAIN[0].weigh(part.counts.labels, part.counts.samples) for part in parts)), default=0)
    for whole in cuttable(parts):
        counts = whole.counts
        weights = {item: item.row_weights(counts.labels, counts.samples, counts.is_shifted) for item in candidates}
        places = range(1, counts.samples)
        for place in places[:: max(1, len(places) // MAX_PLACES)]:
            totals = {item: (sum(rows[:place]), sum(rows)) for item, rows in weights.items()}
            shares = {item: round(first / both, 9) for item, (first, both) in totals.items() if both}
            keeps = all(0 < totals[item][0] < totals[item][1] for item in MAIN[:2])
            first, both = totals[MAIN[0]]
            found.append(Cut(whole, place, shares, keeps, min(first, both - first) <= least, len(candidates)))
    return found


def cuttable(parts: Sequence[Part]) -> Iterator[Part]:
    """Yields the micro-batches of several samples, and joined halves of two neighbours.

    A joined pair has no more samples than the larger micro-batch, or two samples.
    """
    parts = [part for part in parts if is_of_rows(part)]
    yield from (part for part in parts if part.counts.samples > 1)
    for one, other in itertools.pairwise(parts):
        joined = join([part.cut(0, (part.counts.samples + 1) // 2) for part in (one, other)])
        if joined is not None:
            yield joined


def is_of_rows(part: Part) -> bool:
    """Returns True if the batch has one row per sample."""
    try:
        return batch_size_of(part.batch) == part.counts.samples
    except ValueError:
        return False


def join(parts: Sequence[Part]) -> Part | None:
    """Joins the samples of micro-batches; None if their shapes differ, or they hold more than tensors."""
    first = parts[0].batch
    if not all(isinstance(part.batch, Mapping) and part.batch.keys() == first.keys() for part in parts):
        return None
    joined: dict[str, Any] = {}
    for name, value in first.items():
        for part in parts:
            beside = part.batch[name]
            if not isinstance(beside, Tensor) or beside.shape != (part.counts.samples, *value.shape[1:]):
                return None
        joined[name] = torch.cat([part.batch[name] for part in parts])
    labels = [part.counts.labels for part in parts if part.counts.labels is not None]
    samples = sum(part.counts.samples for part in parts)
    counts = Counts(samples, torch.cat(labels) if labels else None, 0, parts[0].counts.is_shifted)
    return Part(rebuild_mapping(first, joined), counts)
