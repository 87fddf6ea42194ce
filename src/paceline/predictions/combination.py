"""Combines several predictions of the same samples: their mean, median, maximum or vote, their agreement and spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import numpy as np

Array = Any  # of numpy, or of the framework of a subclass
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

    Attributes:
        functions: the module of array functions, of which those with the same name and meaning in numpy and torch are
            used.

    Raises:
        ValueError: a name is unknown, or the reduction is not defined for such outputs.
    """

    functions: Any = np

    def __init__(self, reduce: str, outputs: str) -> None:
        check_reduction(reduce, outputs)
        self.reduce = cast(Reduce, reduce)
        self.outputs = cast(Outputs, outputs)
        self.total = 0.0  # weight of the passes so far
        self._shape: tuple[int, ...] | None = None
        self._sum: tuple[Array, ...] = ()
        self._all: list[Array] = []
        self._votes: Array = None
        self._mean: Array = 0.0
        self._squares: Array = 0.0

    # ---- what differs between numpy and torch

    def widen(self, predictions: Array) -> Array:
        """Returns predictions in 32 bits, or in 64 if they have 64."""
        return np.asarray(predictions, np.float64 if predictions.dtype == np.float64 else np.float32)

    def sort(self, stacked: Array) -> Array:
        """Returns an array, sorted along its first dimension."""
        return np.sort(stacked, axis=0)

    def classes(self, values: Array) -> Array:
        """Returns the indices of the last dimension, where the values are."""
        return np.arange(values.shape[-1])

    def to_type(self, value: Array, like: Array) -> Array:
        """Returns an array in the type of another one."""
        return np.asarray(value, like.dtype)

    def log_softmax(self, values: Array) -> Array:
        """Returns log-probabilities over the last dimension."""
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))

    def log_sigmoid(self, values: Array) -> Array:
        """Returns the logarithms of the probabilities of logits of labels."""
        return -np.logaddexp(0, -values)

    # ---- accumulation

    def add(self, predictions: Array, weight: float = 1.0) -> None:
        """Adds the predictions of one pass, `(samples, ...)`; a weight of 0 adds nothing.

        Raises:
            ValueError: the shape differs from that of the first pass, or has no classes.
        """
        self._check(tuple(predictions.shape))
        if weight == 0:
            return
        values = self.widen(predictions)
        self.total += weight
        with np.errstate(divide="ignore", invalid="ignore"):  # the logarithm of a probability of 0
            self._add(values, weight)

    def _add(self, values: Array, weight: float) -> None:
        if self.outputs != "values":
            votes = self._vote(values) * weight
            self._votes = votes if self._votes is None else self._votes + votes
        points = self._points(values)
        self._add_spread(points, weight)
        if self.reduce == "median":
            self._all.append(points)
        elif self.reduce != "vote":
            self._accumulate(self._terms(values, weight))

    def _check(self, shape: tuple[int, ...]) -> None:
        if self._shape is not None and shape != self._shape:
            raise ValueError(
                f"the predictions of one pass have the shape {shape}, those of the first {self._shape}: an `inverse` "
                "must bring them to the same shape"
            )
        has_classes = len(shape) >= 2 and shape[-1] >= 2
        if self.outputs in ("logits", "probabilities") and not has_classes:
            raise ValueError(
                f'outputs="{self.outputs}" is invalid for predictions of shape {shape} without a '
                'dimension of classes: expected outputs="binary_logits" for logits of labels, or "values" for numbers'
            )
        self._shape = shape

    def _vote(self, values: Array) -> Array:
        if self.outputs == "binary_logits":
            return self.to_type(values > 0, values)
        return self.to_type(values.argmax(-1)[..., None] == self.classes(values), values)

    def _points(self, values: Array) -> Array:
        """Returns probabilities, or the values themselves."""
        if self.outputs == "logits":
            return self.functions.exp(self.log_softmax(values))
        return self.functions.exp(self.log_sigmoid(values)) if self.outputs == "binary_logits" else values

    def _add_spread(self, points: Array, weight: float) -> None:
        """Adds one pass to the weighted mean and sum of squared deviations (West 1979)."""
        change = points - self._mean
        self._mean = self._mean + change * (weight / self.total)
        self._squares = self._squares + weight * change * (points - self._mean)

    def _terms(self, values: Array, weight: float) -> tuple[Array, ...]:
        """Returns the terms of the running sums, in logarithms where probabilities are averaged."""
        kind, reduce = self.outputs, self.reduce
        if kind == "logits":
            values = self.log_softmax(values)
        if reduce == "max":
            return (values,)
        if reduce == "geometric":
            return (weight * (self.functions.log(values) if kind == "probabilities" else values),)
        shift = float(np.log(weight))
        if kind == "logits":
            return (values + shift,)
        if kind == "binary_logits":
            return (self.log_sigmoid(values) + shift, self.log_sigmoid(-values) + shift)
        return (weight * values,)

    def _accumulate(self, terms: tuple[Array, ...]) -> None:
        in_logs = self.reduce == "mean" and self.outputs in ("logits", "binary_logits")
        join = self.functions.maximum if self.reduce == "max" else self.functions.add
        if in_logs:
            join = self.functions.logaddexp
        self._sum = tuple(map(join, self._sum, terms)) if self._sum else terms

    # ---- results

    def result(self) -> Array:
        """Returns the combined predictions, in the form of one pass: log-probabilities for logits, logits for binary
        ones, shares for a vote.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.reduce == "vote":
                return self._votes / self.total
            if self.reduce == "median":
                return self._from_points(self._median())
            return self._finish(*self._sum)

    def _median(self) -> Array:
        """Returns the median over the passes: the mean of the two in the middle of an even number."""
        ordered = self.sort(self.functions.stack(self._all))
        number = len(ordered)
        return (ordered[(number - 1) // 2] + ordered[number // 2]) / 2

    def _finish(self, value: Array, opposite: Array = None) -> Array:
        kind, reduce = self.outputs, self.reduce
        if opposite is not None:
            return value - opposite
        if reduce == "geometric":
            value = value / self.total
            if kind == "probabilities":
                return self.functions.exp(self.log_softmax(value))
        if kind == "logits":
            return self.log_softmax(value)
        if reduce == "mean":
            return value / self.total
        return self._normalized(value) if kind == "probabilities" else value

    def _from_points(self, points: Array) -> Array:
        if self.outputs == "binary_logits":
            return self.functions.log(points) - self.functions.log1p(-points)
        if self.outputs == "values":
            return points
        shares = self._normalized(points)
        return shares if self.outputs == "probabilities" else self.functions.log(shares)

    def _normalized(self, points: Array) -> Array:
        """Returns positive numbers, scaled to a sum of 1 over the last dimension; equal ones if all are 0."""
        total = points.sum(-1)[..., None]
        equal = self.functions.ones_like(points) / points.shape[-1]
        return self.functions.where(total > 0, points / total, equal)

    def agreement(self) -> Array:
        """Returns `(samples,)`, the weighted share of passes that predict what the combination predicts.

        It is the mean over positions or labels; None for values.
        """
        if self._votes is None:
            return None
        shares = self._votes / self.total
        combined = self.result()
        if self.outputs == "binary_logits":
            is_positive = combined > (0.5 if self.reduce == "vote" else 0.0)
            agreeing = self.functions.where(is_positive, shares, 1 - shares)
        else:
            is_chosen = combined.argmax(-1)[..., None] == self.classes(combined)
            agreeing = (shares * is_chosen).sum(-1)
        return by_sample(agreeing)

    def spread(self) -> Array:
        """Returns `(samples,)`, the standard deviation of probabilities or values over the passes, in their unit.

        It is the mean over the elements of a sample.
        """
        squares = self._squares / self.total
        squares = self.functions.where(squares < 0, self.functions.zeros_like(squares), squares)  # by rounding
        return by_sample(self.functions.sqrt(squares))


def by_sample(values: Array) -> Array:
    """Returns the mean of each row of an array."""
    return values.reshape(len(values), math.prod(values.shape[1:])).mean(1) if values.ndim > 1 else values


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


def check_kind(shape: Sequence[int], label_shape: Sequence[int] | None, outputs: str) -> None:
    """Checks that predictions which are to be read as logits or probabilities are not those of a regression.

    Args:
        shape: the shape of the predictions.
        label_shape: the shape of labels that are one floating-point array; None for other labels.
        outputs: the kind of the predictions.

    Raises:
        ValueError: the labels are floating-point numbers of the shape of the predictions.
    """
    if outputs in ("logits", "probabilities") and label_shape is not None and tuple(label_shape) == tuple(shape):
        raise ValueError(
            f'outputs="{outputs}" is invalid for floating-point labels of the shape of the predictions, '
            f'{tuple(shape)}: expected outputs="values" for numbers, or "binary_logits" for logits of labels'
        )
