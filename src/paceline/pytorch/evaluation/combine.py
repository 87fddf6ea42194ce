"""Combines several predictions of the same samples: their mean, median, maximum or vote, their agreement and spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

Reduce = Literal["mean", "geometric", "median", "max", "vote"]
Outputs = Literal["logits", "binary_logits", "probabilities", "values"]
UNWEIGHTED = ("median", "max")


class Combination:
    """Accumulates predictions of the same samples, one pass at a time.

    Memory: running sums of the size of one prediction; the median stores the predictions of all passes.

    Args:
        reduce: "mean" (of probabilities, or of values), "geometric" (mean of log-probabilities, normalized), "median"
            or "max" (of each probability, normalized), or "vote" (the share of passes whose prediction is each class).
        outputs: the kind of predictions: "logits" over the last dimension; "binary_logits", one per label; or
            "probabilities" over the last dimension; or "values" of a regression.

    Raises:
        ValueError: a name is unknown, or the reduction is not defined for such outputs.
    """

    def __init__(self, reduce: str, outputs: str) -> None:
        check_reduction(reduce, outputs)
        self.reduce = cast(Reduce, reduce)
        self.outputs = cast(Outputs, outputs)
        self.total = 0.0  # weight of the passes so far
        self._shape: torch.Size | None = None
        self._sum: tuple[Tensor, ...] = ()
        self._all: list[Tensor] = []
        self._votes: Tensor | None = None
        self._mean = self._squares = torch.zeros(())

    def add(self, predictions: Tensor, weight: float = 1.0) -> None:
        """Adds the predictions of one pass, `(samples, ...)`; a weight of 0 adds nothing.

        Raises:
            ValueError: the shape differs from that of the first pass, or has no classes.
        """
        self._check(predictions)
        if weight == 0:
            return
        values = predictions.detach()
        values = values if values.dtype == torch.float64 else values.float()
        self.total += weight
        if self.outputs != "values":
            votes = self._vote(values) * weight
            self._votes = votes if self._votes is None else self._votes + votes
        self._add_spread(self._points(values), weight)
        if self.reduce == "median":
            self._all.append(self._points(values))
        elif self.reduce != "vote":
            self._accumulate(self._terms(values, weight))

    def _check(self, predictions: Tensor) -> None:
        if self._shape is not None and predictions.shape != self._shape:
            raise ValueError(
                f"the predictions of one pass have the shape {tuple(predictions.shape)}, those of the first "
                f"{tuple(self._shape)}: an `inverse` must bring them to the same shape"
            )
        has_classes = predictions.ndim >= 2 and predictions.shape[-1] >= 2
        if self.outputs in ("logits", "probabilities") and not has_classes:
            raise ValueError(
                f'outputs="{self.outputs}" is invalid for predictions of shape {tuple(predictions.shape)} without a '
                'dimension of classes: expected outputs="binary_logits" for logits of labels, or "values" for numbers'
            )
        self._shape = predictions.shape

    def _vote(self, values: Tensor) -> Tensor:
        if self.outputs == "binary_logits":
            return (values > 0).float()
        return functional.one_hot(values.argmax(-1), values.shape[-1]).float()

    def _points(self, values: Tensor) -> Tensor:
        """Returns probabilities, or the values themselves."""
        if self.outputs == "logits":
            return values.softmax(-1)
        return values.sigmoid() if self.outputs == "binary_logits" else values

    def _add_spread(self, points: Tensor, weight: float) -> None:
        """Adds one pass to the weighted mean and sum of squared deviations (West 1979)."""
        change = points - self._mean.to(points.device)
        self._mean = self._mean.to(points.device) + change * (weight / self.total)
        self._squares = self._squares.to(points.device) + weight * change * (points - self._mean)

    def _terms(self, values: Tensor, weight: float) -> tuple[Tensor, ...]:
        """Returns the terms of the running sums, in logarithms where probabilities are averaged."""
        kind, reduce = self.outputs, self.reduce
        if kind == "logits":
            values = values.log_softmax(-1)
        if reduce == "max":
            return (values,)
        if reduce == "geometric":
            return (weight * (values.log() if kind == "probabilities" else values),)
        shift = torch.tensor(weight).log().item()
        if kind == "logits":
            return (values + shift,)
        if kind == "binary_logits":
            return (functional.logsigmoid(values) + shift, functional.logsigmoid(-values) + shift)
        return (weight * values,)

    def _accumulate(self, terms: tuple[Tensor, ...]) -> None:
        in_logs = self.reduce == "mean" and self.outputs in ("logits", "binary_logits")
        join = torch.maximum if self.reduce == "max" else torch.add
        if in_logs:
            join = torch.logaddexp
        self._sum = tuple(map(join, self._sum, terms)) if self._sum else terms

    def result(self) -> Tensor:
        """Returns the combined predictions, in the form of one pass: log-probabilities for logits, logits for binary
        ones, shares for a vote.
        """
        if self.reduce == "vote":
            assert self._votes is not None
            return self._votes / self.total
        if self.reduce == "median":
            return self._from_points(median(torch.stack(self._all)))
        return self._finish(*self._sum)

    def _finish(self, value: Tensor, opposite: Tensor | None = None) -> Tensor:
        kind, reduce = self.outputs, self.reduce
        if opposite is not None:
            return value - opposite
        if reduce == "geometric":
            value = value / self.total
            if kind == "probabilities":
                return value.softmax(-1)
        if kind == "logits":
            return value.log_softmax(-1)
        if reduce == "mean":
            return value / self.total
        return normalized(value) if kind == "probabilities" else value

    def _from_points(self, points: Tensor) -> Tensor:
        if self.outputs == "binary_logits":
            return torch.logit(points)
        if self.outputs == "values":
            return points
        return normalized(points) if self.outputs == "probabilities" else normalized(points).log()

    def agreement(self) -> Tensor | None:
        """Returns `(samples,)`, the weighted share of passes that predict what the combination predicts.

        It is the mean over positions or labels; None for values.
        """
        if self._votes is None:
            return None
        shares = self._votes / self.total
        combined = self.result()
        if self.outputs == "binary_logits":
            is_positive = combined > (0.5 if self.reduce == "vote" else 0.0)
            agreeing = torch.where(is_positive, shares, 1 - shares)
        else:
            agreeing = shares.gather(-1, combined.argmax(-1, keepdim=True)).squeeze(-1)
        return agreeing.flatten(1).mean(1) if agreeing.ndim > 1 else agreeing

    def spread(self) -> Tensor:
        """Returns `(samples,)`, the standard deviation of probabilities or values over the passes, in their unit.

        It is the mean over the elements of a sample.
        """
        deviation = (self._squares / self.total).clamp(min=0).sqrt()
        return deviation.flatten(1).mean(1) if deviation.ndim > 1 else deviation


def check_reduction(reduce: str, outputs: str) -> None:
    """Checks a reduction and a kind of outputs.

    Raises:
        ValueError: a name is unknown, or the reduction is not defined for such outputs.
    """
    for name, value, choices in (("reduce", reduce, get_args(Reduce)), ("outputs", outputs, get_args(Outputs))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is invalid: expected one of {', '.join(choices)}")
    if outputs == "values" and reduce in ("geometric", "vote"):
        raise ValueError(f'reduce="{reduce}" is invalid with outputs="values", which have no probabilities: use "mean"')


def check_weights(weights: Sequence[float] | None, number: int, reduce: str) -> list[float]:
    """Returns the weights, normalized to a sum of 1; equal ones for None.

    Raises:
        ValueError: their number differs, one is negative or not finite, all are 0, or the reduction has no weights.
    """
    if weights is None:
        return [1.0 / number] * number
    given = [float(weight) for weight in weights]
    if reduce in UNWEIGHTED:
        raise ValueError(f'weights are invalid with reduce="{reduce}", which gives every pass the same part')
    total = sum(given)
    if len(given) != number or not all(weight >= 0 for weight in given) or not 0 < total < float("inf"):
        raise ValueError(f"weights={given} is invalid: expected {number} numbers from 0 on, one of them above 0")
    return [weight / total for weight in given]


def check_kind(predictions: Any, labels: Any, outputs: str) -> None:
    """Checks that predictions which are to be read as logits or probabilities are not those of a regression.

    Raises:
        ValueError: the labels are floating-point numbers of the shape of the predictions.
    """
    if outputs not in ("logits", "probabilities") or not isinstance(labels, Tensor):
        return
    if labels.is_floating_point() and labels.shape == predictions.shape:
        raise ValueError(
            f'outputs="{outputs}" is invalid for floating-point labels of the shape of the predictions, '
            f'{tuple(labels.shape)}: expected outputs="values" for numbers, or "binary_logits" for logits of labels'
        )


def normalized(points: Tensor) -> Tensor:
    """Returns positive numbers, scaled to a sum of 1 over the last dimension; equal ones if all are 0."""
    total = points.sum(-1, keepdim=True)
    return torch.where(total > 0, points / total, torch.full_like(points, 1.0 / points.shape[-1]))


def median(stacked: Tensor) -> Tensor:
    """Returns the median over the first dimension: the mean of the two in the middle of an even number."""
    ordered = stacked.sort(0).values
    number = len(ordered)
    return (ordered[(number - 1) // 2] + ordered[number // 2]) / 2
