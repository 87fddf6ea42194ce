"""What a returned loss can be a mean over, and which of these readings fit a loss and the outputs it was made from.

A reading is a weight for every target: it says which targets count, and what their sum is divided by. Readings that
weigh the targets of a batch alike give the same loss there, whatever the outputs are: they tie until a batch comes on
which they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.model.outputs import as_mapping, candidate_logits

IGNORE_INDEX = -100
# targets recomputed at once, so that a look at a large vocabulary stays small beside the model's own logits
LOOK_CHUNK = 4096
CLASSES = "cross-entropy"  # of integer targets
# of floating-point targets, each element one: what is averaged, the likelier first
MEASURES = (
    "squared error",
    "binary cross-entropy",
    "absolute error",
    "smooth absolute error",
    "binary cross-entropy of probabilities",
    "cross-entropy with probabilities",
)
UNITS = ("tokens", "samples", "all_samples")  # the likelier first


@dataclass(frozen=True)
class Meaning:
    """One hypothesis on what a returned loss is: a sum over targets, divided by what.

    Attributes:
        unit: `tokens`: the mean over targets that are not ignored; `samples`: the mean over the samples that have such
            a target (of the mean over each one's targets); `all_samples`: over all samples, those without a target
            counting as 0.
        shifted: the output at position i is compared with the target at i + 1.
        ignore_index: the target value that is left out.
        scaled: the sum was divided by `num_items_in_batch`, not by the micro-batch's own count.
        measure: what is averaged: `CLASSES`, or one of `MEASURES`; of floating-point targets all but NaN count.
    """

    unit: str = "tokens"
    shifted: bool = False
    ignore_index: int = IGNORE_INDEX
    scaled: bool = False
    measure: str = CLASSES

    def weigh(self, labels: Tensor | None, samples: int, is_shifted: bool = False) -> int:
        """The micro-batch's own count, in this meaning's unit."""
        if labels is None or self.unit == "all_samples":
            return samples
        kept = self.kept(labels, is_shifted)
        if self.unit == "samples" and kept.dim() > 1:
            kept = kept.flatten(1).any(1)
        return int(kept.sum())

    def kept(self, labels: Tensor, is_shifted: bool = False) -> Tensor:
        """Which targets count, where they stand when they are compared: of the labels' shape, or one shorter."""
        if labels.is_floating_point():
            return ~labels.isnan()
        if self.shifted and not is_shifted and labels.dim() > 1:
            labels = labels[:, 1:]
        return labels != self.ignore_index

    @classmethod
    def restored(cls, saved: Any) -> Meaning:
        """From what `dataclasses.asdict` made.

        Raises: ValueError, for anything that is no meaning.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        if not isinstance(saved, dict) or {name: type(value) for name, value in saved.items()} != kinds:
            raise ValueError(f"{str(saved)[:80]!r} is no reading of a loss")
        is_known = saved["unit"] in UNITS and saved["measure"] in (CLASSES, *MEASURES)
        if not is_known or not is_target(saved["ignore_index"]):
            raise ValueError(f"{str(saved)[:80]!r} is no reading of a loss")
        return cls(**saved)

    def __str__(self) -> str:
        targets = f"targets that are not {self.ignore_index if self.measure == CLASSES else 'NaN'}"
        unit = {
            "tokens": targets,
            "samples": f"samples that have {targets}",
            "all_samples": f"all samples, those without {targets} counting as 0",
        }[self.unit]
        shift = ", shifted by one" if self.shifted else ""
        divisor = "num_items_in_batch" if self.scaled else "their number"
        measure = "" if self.measure == CLASSES else f" of the {self.measure}"
        return f"a sum{measure} over {unit}{shift}, divided by {divisor}"


def is_target(value: Any) -> bool:
    """Whether a value can be one of a tensor of targets: an int of 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def present(labels: Tensor, values: Sequence[int]) -> list[int]:
    """Those of `values` that are among the targets. One read-back."""
    if not values or labels.is_floating_point():
        return []
    wanted = torch.tensor(values, dtype=torch.int64, device=labels.device)
    found = (labels.reshape(-1, 1) == wanted).any(0).tolist()
    return [value for value, is_there in zip(values, found, strict=True) if is_there]


def signatures(meanings: Sequence[Meaning], labels: Tensor) -> list[tuple[Any, ...]]:
    """For each reading, what tells it from the others on these targets: equal ones give equal losses.

    Returns: `(shifted, ignore_index, unit, scaled, measure)`, in which `ignore_index` is None where nothing is ignored,
        and `unit` the first of those that weigh these targets alike; None where there is no target.
    """
    seen: dict[tuple[bool, int], tuple[bool, dict[str, str | None]]] = {}
    found: list[tuple[Any, ...]] = []
    for meaning in meanings:
        key = (meaning.shifted and labels.dim() > 1, meaning.ignore_index)
        if key not in seen:
            kept = meaning.kept(labels).reshape(len(labels), -1)
            numbers = set(kept.sum(1).tolist())
            even = "tokens" if len(numbers - {0}) == 1 else "samples"
            every = even if 0 not in numbers else "all_samples"
            names: dict[str, str | None] = {"tokens": "tokens", "samples": even, "all_samples": every}
            seen[key] = numbers == {kept.shape[1]}, names if numbers - {0} else dict.fromkeys(names)
        is_whole, names = seen[key]
        found.append((key[0], None if is_whole else key[1], names[meaning.unit], meaning.scaled, meaning.measure))
    return found


def find_outputs(outputs: Any, labels: Tensor) -> list[Tensor]:
    """The tensors among a model's outputs that its loss may have been made from, in a form to compare with `labels`.

    Of integer targets: logits, the classes last; of floating-point ones: predictions, of the targets' shape.
    """
    if not labels.is_floating_point():
        return [x for x in (align(logits, labels) for logits in candidate_logits(outputs)) if x is not None]
    if isinstance(outputs, Tensor):
        sizes = [[size for size in shape if size != 1] for shape in (outputs.shape, labels.shape)]
        is_alike = outputs.is_floating_point() and outputs.dim() > 0 and sizes[0] == sizes[1]
        return [outputs.reshape(labels.shape)] if is_alike else []
    named = as_mapping(outputs)
    values = named.values() if named is not None else outputs if isinstance(outputs, list | tuple) else ()
    return [found for value in values for found in find_outputs(value, labels)]


def align(logits: Tensor, labels: Tensor) -> Tensor | None:
    """Logits with the classes last, `(*labels.shape, num_classes)`, or None where the shapes cannot belong together."""
    if logits.shape[:-1] == labels.shape:
        return logits
    if logits.dim() == labels.dim() + 1 and logits.shape[0] == labels.shape[0] and logits.shape[2:] == labels.shape[1:]:
        return logits.movedim(1, -1)
    return None


def agree(loss: Tensor, logits: Tensor, labels: Tensor, num_items: Any, hypotheses: Sequence[Meaning]) -> list[Meaning]:
    """The hypotheses under which `logits` (or predictions) give `loss`, up to the rounding of their types."""
    tolerance = rounding(loss.dtype, logits.dtype)
    found, labels = float(loss), labels.to(logits.device)
    losses: dict[tuple[str, bool], Tensor] = {}
    sums: dict[tuple[str, bool, int], tuple[Tensor, Tensor] | None] = {}
    agreeing = []
    for meaning in hypotheses:
        if (meaning.measure == CLASSES) == labels.is_floating_point():
            continue
        form = (meaning.measure, meaning.shifted and labels.dim() > 1)
        key = (*form, meaning.ignore_index)
        if form not in losses:
            losses[form] = element_losses(logits, labels, *form)
        if key not in sums:
            kept = meaning.kept(labels)
            sums[key] = row_sums(losses[form], kept if losses[form].shape == kept.shape else kept.any(-1))
        rows = sums[key]
        value = meaning_value(meaning, *rows, num_items) if rows is not None else None
        if value is not None and abs(value - found) <= tolerance * max(abs(found), 1e-6):
            agreeing.append(meaning)
    return agreeing


def rounding(loss: torch.dtype, logits: torch.dtype) -> float:
    """The relative difference that two ways of computing the same loss may show."""
    if loss in (torch.float16, torch.bfloat16):
        return 2e-2
    if logits in (torch.float16, torch.bfloat16):
        return 5e-4
    return 1e-9 if loss == torch.float64 and logits == torch.float64 else 5e-5


def meaning_value(meaning: Meaning, sums: Tensor, numbers: Tensor, num_items: Any) -> float | None:
    """The loss under one hypothesis, from each row's sum and number of targets (float64 and int64, on the host)."""
    if meaning.scaled:
        return float(sums.sum() / float(num_items)) if num_items is not None and float(num_items) > 0 else None
    if not bool((numbers > 0).any()):
        return None
    if meaning.unit == "tokens":
        return float(sums.sum() / numbers.sum())
    means = sums / numbers.clamp(min=1)
    return float((means if meaning.unit == "all_samples" else means[numbers > 0]).mean())


@torch.no_grad()
def element_losses(outputs: Tensor, labels: Tensor, measure: str, shifted: bool) -> Tensor:
    """The loss of every target, of the labels' shape after the shift; NaN where it has none."""
    if measure == CLASSES:
        return cross_entropies(outputs[:, :-1], labels[:, 1:]) if shifted else cross_entropies(outputs, labels)
    precise = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    outputs, labels = outputs.to(precise), labels.to(precise)
    if measure == "squared error":
        return functional.mse_loss(outputs, labels, reduction="none")
    if measure == "absolute error":
        return functional.l1_loss(outputs, labels, reduction="none")
    if measure == "smooth absolute error":
        return functional.smooth_l1_loss(outputs, labels, reduction="none")
    if measure == "binary cross-entropy":
        return functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
    if measure == "cross-entropy with probabilities":  # one loss a row
        return functional.cross_entropy(outputs, labels, reduction="none") if labels.dim() == 2 else labels * torch.nan
    are_probabilities = (outputs >= 0) & (outputs <= 1)
    losses = -(labels * outputs.log().clamp(min=-100) + (1 - labels) * (1 - outputs).log().clamp(min=-100))
    return losses.masked_fill(~are_probabilities, torch.nan)


@torch.no_grad()
def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every target, of the labels' shape; NaN for those that are no class."""
    num_classes = logits.shape[-1]
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    pieces = [
        functional.cross_entropy(part.to(precise), target.clamp(0, num_classes - 1).long(), reduction="none")
        for part, target in zip(
            torch.split(logits.reshape(-1, num_classes), LOOK_CHUNK),
            torch.split(labels.reshape(-1), LOOK_CHUNK),
            strict=True,
        )
    ]
    return torch.cat(pieces).reshape(labels.shape).masked_fill_((labels < 0) | (labels >= num_classes), torch.nan)


def row_sums(losses: Tensor, kept: Tensor) -> tuple[Tensor, Tensor] | None:
    """Each row's sum over the targets that count and their number; None where one of them has no loss."""
    losses, kept = losses.reshape(len(losses), -1), kept.reshape(len(kept), -1)
    sums = torch.where(kept, losses, 0).sum(1, dtype=torch.float64).cpu()
    return None if bool(sums.isnan().any()) or kept.numel() == 0 else (sums, kept.sum(1).cpu())
