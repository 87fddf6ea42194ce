"""The losses of single samples, from the outputs of a pass that returned one loss for the batch.

They are computed by the function and the reduction that give the returned loss. These are found in the first passes, by
comparison; in all later ones the difference is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.model.loss import Counts, LossNormalizer, align
from paceline.pytorch.model.outputs import as_mapping, candidate_logits
from paceline.pytorch.model.reductions import LossReduction
from paceline.pytorch.model.soft_targets import reduce_items, widen

GIVEN = "sample_losses"  # output of a model: its losses, `(samples,)`
CROSS_ENTROPY = "cross_entropy"
UNITS = ("tokens", "samples", "all_samples", "sum")
NUM_LOOKS = 2  # passes in which every form is compared
ROUNDING, HALF_ROUNDING = 1e-4, 2e-2  # relative, of losses in 32 and in 16 bits


@dataclass(frozen=True)
class Form:
    """One way in which a loss may be computed.

    Attributes:
        kind: `CROSS_ENTROPY`, a key of `FUNCTIONS`, or `GIVEN`.
        unit: see `LossReduction`.
        shifted: see `LossReduction`.
    """

    kind: str
    unit: str
    shifted: bool = False


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared errors."""
    return (outputs - targets).square()


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute errors."""
    return (outputs - targets).abs()


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the binary cross-entropies."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared_error": square,
    "binary_cross_entropy": binary,
    "absolute_error": absolute,
}


Items = Callable[[Form], tuple[Tensor, Tensor]]  # the losses of items, `(samples, ...)`, and a mask of those that count


class SampleLosses:
    """Computes the losses of the samples of each pass.

    Args:
        normalizer: knows the targets that do not count, and the assumed reduction.
        smoothing: `label_smoothing_factor`.
        option: the option that needs them, for the error.

    Attributes:
        error: largest difference from the returned loss so far, in units of rounding, on the device; None before any.
    """

    def __init__(self, normalizer: LossNormalizer, smoothing: float, option: str) -> None:
        self._normalizer, self._smoothing, self._option = normalizer, smoothing, option
        self._forms: list[Form] = []  # that fit so far
        self._num_looks = 0
        self.error: Tensor | None = None

    @torch.no_grad()
    def __call__(self, outputs: Any, counts: Counts, loss: Tensor, num_items: Any) -> Tensor | None:
        """Returns the sums of the losses and their weights by sample, `(2, samples)`; None if no loss was finite yet.

        The mean loss of any samples is the sum of their losses, divided by that of their weights: their targets if the
        returned loss is a mean over targets, else their number.

        Args:
            outputs: the model's.
            counts: the counts of the micro-batch.
            loss: that was returned.
            num_items: `num_items_in_batch`, or None.

        Raises:
            UnsupportedOption: the returned loss has no known form.
        """
        items_of, candidates = self._items(outputs, counts)
        if self._num_looks < NUM_LOOKS:
            self._look(items_of, candidates, loss, num_items)
        if not self._forms:
            return None
        form = self._forms[0]
        values, kept = items_of(form)
        self._compare(difference(form, values, kept, loss, num_items), loss)
        rows = torch.where(kept, values, 0.0).reshape(len(values), -1).sum(1)
        weights = kept.reshape(len(kept), -1).sum(1)
        if form.unit in ("samples", "all_samples"):
            rows = rows / weights.clamp(min=1)
            weights = weights > 0 if form.unit == "samples" else torch.ones_like(weights)
        return torch.stack([rows, weights.to(rows.dtype)])

    # ---- losses of items

    def _items(self, outputs: Any, counts: Counts) -> tuple[Items, list[Form]]:
        """Returns the losses of items as a function of the form, and the forms in question, the likeliest first."""
        given = (as_mapping(outputs) or {}).get(GIVEN)
        if isinstance(given, Tensor) and given.shape == (counts.samples,):
            losses, all_count = widen(given.detach()), torch.ones_like(given, dtype=torch.bool)
            return lambda form: (losses, all_count), [Form(GIVEN, "all_samples"), Form(GIVEN, "sum")]
        labels, assumed = counts.labels, self._normalizer.reduction
        if labels is None:
            raise self._unknown(
                f"the batch has no targets under {' or '.join(self._normalizer.label_names) or 'any name'}"
            )
        logits = self._logits(outputs, labels)
        targets = labels.to(logits.device, non_blocking=True)
        if logits.dim() > targets.dim() and logits.shape[-1] == 1:  # a regression on integers
            logits, targets = logits.squeeze(-1), targets.to(logits.dtype)
        units = sorted(UNITS, key=lambda unit: unit != assumed.unit)
        if targets.is_floating_point():
            kept, known = ~targets.isnan(), targets.nan_to_num().to(logits.dtype)
            forms = [Form(kind, unit) for kind in FUNCTIONS for unit in units]
            return lambda form: (FUNCTIONS[form.kind](logits, known), kept), forms
        shifts = sorted((False, True), key=lambda shifted: shifted != assumed.shifted) if labels.dim() > 1 else [False]
        return (
            lambda form: self._cross_entropies(logits, targets, form.shifted and not counts.is_shifted),
            [Form(CROSS_ENTROPY, unit, shifted) for shifted in shifts for unit in units],
        )

    def _cross_entropies(self, logits: Tensor, targets: Tensor, shifts: bool) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropies of integer targets; the logits have the classes last."""
        if shifts:
            logits, targets = logits[:, :-1], targets[:, 1:]
        kept = targets != self._normalizer.reduction.ignore_index
        known = targets.clamp(0, logits.shape[-1] - 1)
        own = logits.gather(-1, known.unsqueeze(-1)).squeeze(-1)
        if self._smoothing:
            own = (1 - self._smoothing) * own + self._smoothing * logits.mean(-1)
        return logits.logsumexp(-1) - own, kept

    def _logits(self, outputs: Any, labels: Tensor) -> Tensor:
        for each in candidate_logits(outputs):
            if labels.is_floating_point():
                fits = each.numel() == labels.numel() and each.shape[0] == labels.shape[0]
                found = each.reshape(labels.shape) if fits else None
            else:
                found = align(each, labels)
            if found is not None:
                return widen(found.detach())
        classes = "" if labels.is_floating_point() else ", classes"
        raise self._unknown(f"no output has the shape ({', '.join(map(str, labels.shape))}{classes})")

    # ---- the form of the loss

    def _look(self, items_of: Items, candidates: list[Form], loss: Tensor, num_items: Any) -> None:
        """Keeps the forms that give the returned loss. Synchronizes with the device."""
        if not torch.isfinite(loss):
            return
        candidates = [form for form in candidates if not self._forms or form in self._forms]
        self._forms = [form for form in candidates if difference(form, *items_of(form), loss, num_items) <= 1]
        if not self._forms:
            raise self._unknown(
                "the loss is no mean and no sum of cross-entropies, squared or absolute errors without weights and "
                "further terms"
            )
        self._num_looks += 1

    def _compare(self, error: Tensor, loss: Tensor) -> None:
        """Keeps the largest difference from a finite loss."""
        error = torch.where(torch.isfinite(loss), error, torch.zeros_like(error))
        self.error = error if self.error is None else torch.maximum(self.error, error)

    def _unknown(self, reason: str) -> UnsupportedOption:
        return UnsupportedOption(
            f"{self._option} needs the losses of single samples, and they cannot be computed from the outputs of the "
            f"model: {reason}. Let the model return them under {GIVEN!r}, of shape (samples,), or leave it out."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the forms that fit so far."""
        return {"forms": json.dumps(list(map(astuple, self._forms))), "num_looks": self._num_looks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the forms."""
        self._forms = [Form(*form) for form in json.loads(state["forms"])]
        self._num_looks = int(state["num_looks"])


def difference(form: Form, values: Tensor, kept: Tensor, loss: Tensor, num_items: Any) -> Tensor:
    """Returns the difference between a loss and the reduction of the losses of items, in units of rounding.

    Args:
        form: the reduction.
        values: losses of items, `(samples, ...)`.
        kept: mask of those that count.
        loss: to compare with.
        num_items: `num_items_in_batch`, by which the loss may have been divided; or None.
    """
    loss = loss.detach()
    reduction = LossReduction(form.unit)
    # a sum that is divided by the count of the optimizer step is a mean over targets
    divisors = [None] if num_items is None or form.unit != "tokens" else [None, num_items]
    expected = torch.stack([reduce_items(values, kept, reduction, divisor) for divisor in divisors])
    unit = (ROUNDING if loss.dtype.itemsize > 2 else HALF_ROUNDING) * loss.abs() + 1e-6
    return ((expected - loss).abs() / unit).amin()
