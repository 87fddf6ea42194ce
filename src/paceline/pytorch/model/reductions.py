"""The candidate reductions of a returned loss, and their test on the losses of a batch and of its parts.

Let a batch be split into two parts A and B. A loss that is a mean with weights w satisfies, for these weights and no
others, loss(A and B) * w(A and B) = loss(A) * w(A) + loss(B) * w(B). This test works for any loss, because it does not
recompute the loss from logits.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.pytorch.model.operations import uses_tf32

IGNORE_INDEX = -100
OFTEN_IGNORED = (0, -1, 1, 255)
MOST_IGNORED = 8  # values noted in the passes of one probe; each adds four candidates
# a candidate is contradicted by a difference of this many tolerances; a candidate fits within one tolerance
CLEAR = 20
# relative rounding difference between the loss of a batch and the mean over its parts, by the dtype of the loss
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class LossReduction:
    """One candidate for the reduction of a returned loss.

    Attributes:
        unit: `tokens`: a mean over targets that are not ignored; `samples`: over the samples that have such a target;
            `all_samples`: over all samples; `sum`: a sum.
        shifted: the output at position i is compared with the target at i + 1, so the first target does not count.
        ignore_index: the integer target that does not count. For floating-point targets, NaN does not count.
    """

    unit: str = "samples"
    shifted: bool = False
    ignore_index: int = IGNORE_INDEX

    def row_weights(self, labels: Tensor | None, samples: int, is_shifted: bool = False) -> list[int]:
        """Returns the weight of each sample.

        Args:
            labels: `(samples, ...)`, integers or floats; None if there are none.
            samples: the number of samples.
            is_shifted: the collator has shifted the labels.
        """
        if labels is None or self.unit in ("all_samples", "sum"):
            return [1] * samples
        kept = ~labels.isnan() if labels.is_floating_point() else labels != self.ignore_index
        if labels.dim() > 1:
            if self.shifted and not is_shifted and not labels.is_floating_point():
                kept = kept[:, 1:]
            kept = kept.flatten(1).sum(1) if self.unit == "tokens" else kept.flatten(1).any(1)
        weights: list[int] = kept.tolist()
        return weights

    def weigh(self, labels: Tensor | None, samples: int, is_shifted: bool = False) -> int:
        """Returns the weight of a batch: the sum of `row_weights`."""
        return int(sum(self.row_weights(labels, samples, is_shifted)))

    @classmethod
    def restored(cls, saved: object) -> LossReduction:
        """Returns a reduction from the result of `dataclasses.astuple`.

        Raises:
            ValueError: the value is not a reduction.
        """
        kinds = [type(field.default) for field in fields(cls)]
        if not isinstance(saved, list | tuple) or [type(value) for value in saved] != kinds or saved[0] not in UNITS:
            raise ValueError(f"{str(saved)[:80]!r} is no reduction of a loss")
        return cls(*saved)

    def __str__(self) -> str:
        if self.unit == "sum":
            return "a sum, used as it is"
        if self.unit == "all_samples":
            return "a mean over all samples"
        place = " after the shift by one" if self.shifted else ""
        targets = f"targets{place} (other than {self.ignore_index})"
        return f"a mean over {targets if self.unit == 'tokens' else 'samples with ' + targets}"


OF_TARGETS = ("tokens", "samples")  # units under which a batch without targets has weight 0
UNITS = (*OF_TARGETS, "all_samples", "sum")
MAIN = (
    LossReduction("tokens"),
    LossReduction("tokens", shifted=True),
    LossReduction("samples"),
    LossReduction("all_samples"),
    LossReduction("samples", shifted=True),
    LossReduction("sum"),
)

SUM = MAIN[-1]


def make_candidates(pad_token_id: int | None) -> tuple[LossReduction, ...]:
    """Returns all candidate reductions, the most likely first."""
    padding = [pad_token_id] if isinstance(pad_token_id, int) and not isinstance(pad_token_id, bool) else []
    return with_ignored(MAIN, [*padding, *OFTEN_IGNORED])


def with_ignored(candidates: tuple[LossReduction, ...], indices: Iterable[int]) -> tuple[LossReduction, ...]:
    """Returns the candidates, followed by those in which a target of one of these indices does not count."""
    known = {item.ignore_index for item in candidates}
    added = [index for index in dict.fromkeys(indices) if index not in known]
    others = (LossReduction(m.unit, m.shifted, i) for i in added for m in MAIN if m.unit in OF_TARGETS)
    return (*candidates, *others)


class IgnoredTargets(TorchFunctionMode):
    """Notes the target values that a loss may ignore: any `ignore_index` of torch's losses, and integers with which the
    labels are compared for equality, as in `(labels != 3)`.

    Attributes:
        found: the values, in the order of their first use.
        labels: those of the pass in progress, `(samples, ...)`; None: unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, None] = {}
        self.labels: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = whole_number(kwargs.get("ignore_index"))
        if value is None and func in _EQUALITIES and len(args) == 2:
            value = next((whole_number(one) for one, other in (args, args[::-1]) if self._is_labels(other)), None)
        if value is not None and len(self.found) < MOST_IGNORED:
            self.found[value] = None
        return func(*args, **kwargs)

    def _is_labels(self, value: object) -> bool:
        """Returns True for the labels, for all but the first or the last of each sample, or for shifted ones."""
        labels = self.labels
        if labels is None or not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
            return False
        parts = (labels, labels[:, 1:], labels[:, :-1]) if labels.dim() > 1 else (labels,)
        flat = value.detach().reshape(-1)
        if labels.dim() > 1 and labels.numel() == flat.numel():
            moved = flat.view(labels.shape)[:, :-1].to(labels.device, labels.dtype)
            if torch.equal(moved, labels[:, 1:]):  # shifted, and filled up at the end
                return True
        return any(
            part.numel() == flat.numel() and torch.equal(part.reshape(-1).to(flat.device, flat.dtype), flat)
            for part in parts
        )


def whole_number(value: object) -> int | None:
    """Returns a whole number, also from a 0-dim tensor or a scalar of numpy; None for other values."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.int64, torch.int32):
        return int(value)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


_EQUALITIES = {torch.eq, torch.ne, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__}


@dataclass(frozen=True)
class Split:
    """The losses of a batch and of its two parts.

    Attributes:
        whole, first, second: the losses; `whole` is finite.
        shares: `(reduction) -> the first part's share of the weight`, or None if both weights are 0.
        tolerance: relative difference that rounding may cause.
    """

    whole: float
    first: float
    second: float
    shares: Callable[[LossReduction], float | None]
    tolerance: float

    def observe(self, candidates: Sequence[LossReduction]) -> Observation:
        """Returns the candidates under which the losses of the parts combine to the loss of the whole, and those that
        are clearly contradicted.
        """
        parts = (self.first, self.second)
        scale = max(abs(loss) for loss in (self.whole, *parts) if math.isfinite(loss)) * self.tolerance
        fits, misses = [], []
        for candidate in candidates:
            share = self.shares(candidate)
            if share is None and candidate.unit != "sum":
                continue
            weights = (1, 1) if candidate.unit == "sum" or share is None else (share, 1 - share)
            # a part of weight 0 is left out, because its loss (a mean over zero targets) is NaN
            expected = sum(weight * loss for weight, loss in zip(weights, parts, strict=True) if weight)
            difference = abs(expected - self.whole)
            if difference <= scale:
                fits.append(candidate)
            elif not difference < CLEAR * scale:  # also if it is NaN
                misses.append(candidate)
        return Observation(tuple(fits), tuple(misses))


@dataclass(frozen=True)
class Observation:
    """The result of one probe.

    Attributes:
        fits, misses: candidates that it confirmed and contradicted. It is uninformative if it contradicted none.
        count: result of a probe of `num_items_in_batch`: `scaled`, `ignored`, `partly` or `unknown`; empty for other
            probes.
        multiple: the factor of a loss divided by the count, such as the number of processes; 0: unknown.
        is_open: the loss looks like a sum, but could not be tested on as many targets as an optimizer step has.
        ignored: target values that the loss may ignore, which no candidate had.
    """

    fits: tuple[LossReduction, ...] = ()
    misses: tuple[LossReduction, ...] = ()
    count: str = ""
    multiple: float = 0.0
    is_open: bool = False
    ignored: tuple[int, ...] = ()


def tolerance_of(loss: torch.dtype, parameters: torch.dtype | None) -> float:
    """Returns the relative difference that rounding may cause between two computations of a loss."""
    allowed = max(TOLERANCES.get(loss, 1e-2), 2e-3 if parameters in (torch.bfloat16, torch.float16) else 0.0)
    return max(allowed, 5e-4) if torch.accelerator.is_available() and uses_tf32() else allowed


_is_counted = ContextVar("_is_counted", default=True)


@contextmanager
def uncounted() -> Iterator[None]:
    """Context of cross-entropies that are no part of a loss, such as those of a test of its form: not summed."""
    token = _is_counted.set(False)
    try:
        yield
    finally:
        _is_counted.reset(token)


def is_counted() -> bool:
    """Returns False within `uncounted`."""
    return _is_counted.get()
