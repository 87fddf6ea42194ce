"""Decisions from probabilities: thresholds for a metric, and conformal sets with a stated coverage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.predictions.reliability import as_probabilities, check_probabilities

Array = np.ndarray[Any, Any]
METHODS = ("split", "aps")


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that contain the true one with a probability of at least `coverage`, on average over samples.

    The guarantee holds for any model, if the samples and those of the fit are exchangeable.

    Attributes:
        method: "split" (classes whose probability exceeds a bound; Sadinle et al. 2019) or "aps" (the most probable
            classes up to a sum, which adapts the size of a set to its sample; Romano et al. 2020, not randomized).
        coverage: the stated probability.
        quantile: the bound of the scores.
    """

    method: str
    coverage: float
    quantile: float

    def __call__(self, probabilities: Array) -> Array:
        """Returns `(samples, classes)`, True for the classes of each set.

        Raises:
            ValueError: the rows are no probabilities, as those of the fit were.
        """
        rows = np.asarray(probabilities, dtype=np.float64)
        check_probabilities(rows)
        return np.asarray(scores_of(rows, self.method) <= self.quantile)


def fit_conformal(probabilities: Array, labels: Array, coverage: float = 0.9, method: str = "split") -> ConformalSets:
    """Fits conformal sets on held-out samples that neither training nor a calibration used.

    Raises:
        ValueError: an argument is invalid, or there are too few samples for the coverage: n >= coverage/(1 - coverage).
    """
    if method not in METHODS or not 0 < coverage < 1:
        raise ValueError(
            f"method={method!r}, coverage={coverage}: expected one of {METHODS}, and a number within 0 to 1"
        )
    rows, classes = as_probabilities(probabilities, labels)
    number = len(rows)
    rank = math.ceil((number + 1) * coverage - 1e-9)
    if rank > number:
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise ValueError(f"coverage={coverage} needs at least {least} held-out samples, and there are {number}")
    scores = scores_of(rows, method)[np.arange(number), classes]
    return ConformalSets(method, coverage, float(np.sort(scores)[rank - 1]))


def scores_of(rows: Array, method: str) -> Array:
    """Returns the nonconformity score of each class: higher is less probable."""
    if method == "split":
        return 1 - rows
    order = np.argsort(-rows, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(rows, order, 1), 1)
    scores = np.empty_like(rows)
    np.put_along_axis(scores, order, sums, 1)
    return scores


def f1(truth: Array, chosen: Array) -> float:
    """Returns the F1 score of one label; 0 without true or chosen samples."""
    total = int(truth.sum()) + int(chosen.sum())
    return 2 * int((truth & chosen).sum()) / total if total else 0.0


def fit_thresholds(scores: Array, labels: Array, metric: Callable[[Array, Array], float] = f1) -> tuple[Array, Array]:
    """Returns the threshold of each label with the best metric on held-out samples, and the values of the metric.

    A label is chosen where its score is at least its threshold. Of equal values the threshold nearest to the median
    score is taken. Costs one call of the metric per distinct score (at most 1,000 quantiles) and label.

    Args:
        scores: `(samples, labels)` or `(samples,)`, higher is more probable.
        labels: 0 and 1, in the same shape.
        metric: `(true, chosen) -> float` of two boolean arrays; higher is better.

    Raises:
        ValueError: the arrays do not fit together, or the metric is not a number.
    """
    rows, truth = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if rows.shape != truth.shape or rows.ndim not in (1, 2) or rows.size == 0 or not np.isin(truth, (0, 1)).all():
        raise ValueError(
            f"scores of shape {rows.shape} and labels of shape {truth.shape}: expected equal ones, 0 and 1"
        )
    if not np.isfinite(rows).all():
        raise ValueError("the scores are not finite")
    rows, truth = rows.reshape(len(rows), -1), truth.reshape(len(rows), -1).astype(bool)
    best, values = [], []
    for column, true in zip(rows.T, truth.T, strict=True):
        candidates = np.unique(column)
        if len(candidates) > 1000:
            candidates = np.unique(np.quantile(column, np.linspace(0, 1, 1000), method="nearest"))
        found = [metric(true, column >= candidate) for candidate in candidates]
        if np.isnan(found).any():
            raise ValueError("the metric is NaN for a threshold: let it return a number where it is undefined")
        top = [candidate for candidate, value in zip(candidates, found, strict=True) if value == max(found)]
        best.append(min(top, key=lambda candidate: abs(candidate - np.median(column))))
        values.append(max(found))
    return np.asarray(best), np.asarray(values)
