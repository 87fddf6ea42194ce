"""Losses of knowledge distillation per item: soft targets, of all classes or the likeliest, and hidden states.

An item is what the hard loss counts: a sample of a classifier, a target of a language model. `reduce_items` applies the
reduction of the hard loss to them, so that both losses have the same weights under accumulation and over processes.
Source: Hinton et al., 2015 (arXiv:1503.02531).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.pytorch.model.loss import align
from paceline.pytorch.model.outputs import ModelOutputError, as_mapping, candidate_logits, describe
from paceline.pytorch.model.reductions import LossReduction

LEAST = -1e4  # log-probability, of no mass in any dtype


@dataclass(frozen=True)
class TopClasses:
    """The likeliest classes of a teacher at a temperature.

    Attributes:
        log_probabilities: `(..., k)`.
        indices: `(..., k)`, the classes.
        rest: `(...)`, the log-probability of all other classes together.
    """

    log_probabilities: Tensor
    indices: Tensor
    rest: Tensor

    def __getitem__(self, index: Any) -> TopClasses:
        """Returns those of some of the items."""
        return TopClasses(self.log_probabilities[index], self.indices[index], self.rest[index])


def widen(logits: Tensor) -> Tensor:
    """Returns logits in at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def top_classes(logits: Tensor, k: int, temperature: float) -> TopClasses:
    """Returns the `k` likeliest classes of logits `(..., num_classes)`; k is below their number."""
    log_probabilities = functional.log_softmax(widen(logits) / temperature, dim=-1)
    values, indices = log_probabilities.topk(k, dim=-1)
    return TopClasses(values, indices, rest_of(log_probabilities, indices))


def rest_of(log_probabilities: Tensor, indices: Tensor) -> Tensor:
    """Returns the log-probability `(...)` of all classes other than `indices`."""
    return log_probabilities.scatter(-1, indices, float("-inf")).logsumexp(-1)


def divergence(student: Tensor, teacher: Tensor | TopClasses, temperature: float) -> Tensor:
    """Returns KL(teacher || student) of each item, times the square of the temperature.

    With `TopClasses`, all other classes count as one: a lower bound of the divergence over all classes, with a gradient
    for each of their logits.

    Args:
        student: logits `(..., num_classes)`.
        teacher: logits of the same shape, or its likeliest classes.
        temperature: divides both logits.

    Returns:
        `(...)`.
    """
    # clamped, since classes that a model excludes by -inf have no mass, and 0 * -inf is NaN
    own = functional.log_softmax(widen(student) / temperature, dim=-1).clamp(min=LEAST)
    if isinstance(teacher, TopClasses):
        values = teacher.log_probabilities.clamp(min=LEAST)
        known = values.exp() * (values - own.gather(-1, teacher.indices))
        rest = teacher.rest.clamp(min=LEAST)
        other = rest.exp() * (rest - rest_of(own, teacher.indices))
        return (known.sum(-1) + other) * temperature**2
    target = functional.log_softmax(widen(teacher) / temperature, dim=-1).clamp(min=LEAST)
    return functional.kl_div(own, target, reduction="none", log_target=True).sum(-1) * temperature**2


def hidden_distance(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Returns the distance `(...)` of hidden states `(..., width)`: "mse", a mean over the width, or "cosine"."""
    one, other = widen(student), widen(teacher)
    if kind == "mse":
        return (one - other).square().mean(-1)
    return 1 - functional.cosine_similarity(one, other, dim=-1)


def find_logits(outputs: Any, labels: Tensor | None, owner: str, purpose: str = "distillation") -> Tensor:
    """Returns the logits of a model's outputs, classes last.

    Args:
        outputs: a tensor, tuple, dict or object with logits.
        labels: the targets; the logits are `(*labels.shape, num_classes)`. None: they are `(samples, num_classes)`.
        owner, purpose: for the error message: whose outputs they are, and what needs them.

    Raises:
        ModelOutputError: no output has this shape.
    """
    named = as_mapping(outputs)
    candidates = candidate_logits(outputs)
    if named is not None and isinstance(named.get("logits"), Tensor):
        candidates = [named["logits"], *candidates]
    for item in candidates:
        if labels is not None:
            found = align(item, labels)
        else:
            found = item if item.dim() == 2 else None
        if found is not None:
            return found
    shape = "(samples, num_classes)" if labels is None else f"(*{tuple(labels.shape)}, num_classes)"
    raise ModelOutputError(
        f"The {owner} returned no logits of the shape {shape}, which {purpose} needs, but {describe(outputs)}. Return "
        "them under the name `logits`, or leave that out."
    )


def check_classes(student: Tensor, teacher: Tensor) -> None:
    """Checks that student and teacher have the same classes.

    Raises:
        ValueError: the shapes of their logits differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"The student has logits of the shape {tuple(student.shape)} and the teacher of {tuple(teacher.shape)}: a "
            "teacher needs the tokenizer and the classes of the student."
        )


def kept_items(labels: Tensor, reduction: LossReduction, is_shifted: bool) -> tuple[Tensor, bool]:
    """Returns a mask of the items that count, and True if the output at i belongs to the target at i + 1.

    Args:
        labels: integers, `(samples, ...)`.
        reduction: the reduction of the hard loss.
        is_shifted: the collator has shifted the labels.
    """
    kept = labels != reduction.ignore_index
    shifts = reduction.shifted and not is_shifted and labels.dim() > 1
    return (kept[:, 1:], True) if shifts else (kept, False)


def reduce_items(values: Tensor, kept: Tensor, reduction: LossReduction, num_items: Any = None) -> Tensor:
    """Reduces the losses of items as the hard loss does.

    Args:
        values: `(samples, ...)`.
        kept: mask of the items that count, of the same shape.
        reduction: the reduction of the hard loss.
        num_items: the divisor of the sum, if the hard loss is divided by it.

    Returns:
        The loss, 0-dim.
    """
    values = torch.where(kept, values, torch.zeros_like(values))
    if num_items is not None:
        scaled: Tensor = values.sum() / num_items
        return scaled
    if reduction.unit == "sum":
        return values.sum()
    if reduction.unit == "tokens" or (values.dim() == 1 and reduction.unit == "samples"):
        return values.sum() / kept.sum().clamp(min=1)
    rows, counts = values.reshape(len(values), -1).sum(1), kept.reshape(len(values), -1).sum(1)
    means = rows / counts.clamp(min=1)
    return means.mean() if reduction.unit == "all_samples" else means.sum() / counts.count_nonzero().clamp(min=1)


def hidden_items(distances: Tensor, kept: Tensor, shifts: bool, inputs: Mapping[str, Any]) -> Tensor:
    """Returns the distances of hidden states as items: a value for each of `kept`.

    States at the positions of the targets are compared there. Other states count by sample: as the mean over the
    positions that an attention mask of their shape attends to.

    Args:
        distances: `(samples, ...)`.
        kept: mask of the items, `(samples, ...)`.
        shifts: the output at i belongs to the target at i + 1.
        inputs: the batch, for its attention masks.
    """
    if distances.dim() == 2 and shifts and distances.shape[1] == kept.shape[1] + 1:
        return distances[:, :-1]
    if distances.shape == kept.shape:
        return distances
    masks = [value for name, value in inputs.items() if "attention_mask" in name and isinstance(value, Tensor)]
    mask = next((each for each in masks if each.shape == distances.shape), None)
    flat = distances.reshape(len(distances), -1)
    if mask is None:
        means = flat.mean(1)
    else:
        weights = mask.reshape(len(mask), -1).to(flat.dtype)
        means = (flat * weights).sum(1) / weights.sum(1).clamp(min=1)
    return means.reshape(-1, *[1] * (kept.dim() - 1)).expand(kept.shape)
