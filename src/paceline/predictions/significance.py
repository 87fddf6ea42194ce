"""Paired tests between the predictions of two models on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class McNemar(NamedTuple):
    """The result of McNemar's exact test.

    Attributes:
        only_first, only_second: samples that only one of the models predicts right.
        p_value: two-sided; the probability of such a difference if both models are equally good.
    """

    only_first: int
    only_second: int
    p_value: float


class Bootstrap(NamedTuple):
    """The result of a paired bootstrap.

    Attributes:
        difference: metric of the second model minus that of the first.
        low, high: bounds of its confidence interval (percentiles).
        p_value: two-sided: twice the share of resamples on the other side of 0, at most 1.
    """

    difference: float
    low: float
    high: float
    p_value: float


def mcnemar(first: Array, second: Array, labels: Array) -> McNemar:
    """Tests whether two models are right on the same share of samples (McNemar 1947, exact binomial).

    Args:
        first, second: predicted classes, `(samples,)`.
        labels: true classes; -100 leaves a sample out.

    Raises:
        ValueError: the shapes differ.
    """
    one, two, truth = (np.asarray(each) for each in (first, second, labels))
    if not one.shape == two.shape == truth.shape or one.ndim != 1:
        raise ValueError(
            f"shapes {one.shape}, {two.shape} and {truth.shape} differ: expected predicted classes and labels"
        )
    counts = truth != -100
    is_one, is_two = (one == truth)[counts], (two == truth)[counts]
    only_first, only_second = int((is_one & ~is_two).sum()), int((is_two & ~is_one).sum())
    number = only_first + only_second
    fewer = min(only_first, only_second)
    tail = sum(math.comb(number, k) for k in range(fewer + 1))
    return McNemar(only_first, only_second, min(1.0, 2 * tail / 2**number) if number else 1.0)


def paired_bootstrap(
    first: Array,
    second: Array,
    labels: Array,
    metric: Callable[[Array, Array], float],
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Bootstrap:
    """Compares a metric of two models by resampling samples, the same for both (Efron and Tibshirani 1993).

    Args:
        first, second: predictions, one row per sample.
        labels: one row per sample.
        metric: `(predictions, labels) -> float`.
        num_resamples: number of resamples, each of which calls the metric twice.
        confidence: the level of the interval.
        seed: the seed of the resampling.

    Raises:
        ValueError: the numbers of rows differ, an argument is invalid, or the metric of a resample is not finite.
    """
    one, two, truth = (np.asarray(each) for each in (first, second, labels))
    number = len(truth)
    if not len(one) == len(two) == number or number == 0:
        raise ValueError(f"{len(one)}, {len(two)} and {number} rows: expected the same number, above 0")
    if num_resamples < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"num_resamples={num_resamples}, confidence={confidence}: expected at least 1, and within 0 to 1"
        )
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_resamples):
        rows = rng.integers(0, number, number)
        found.append(metric(two[rows], truth[rows]) - metric(one[rows], truth[rows]))
    differences = np.asarray(found, dtype=np.float64)
    if not np.isfinite(differences).all():
        raise ValueError(
            f"the metric is not finite for {int((~np.isfinite(differences)).sum())} of {num_resamples} resamples: let "
            "it return a number where it is undefined, such as for labels of one class"
        )
    low, high = np.quantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    smaller = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    p_value = min(1.0, 2 * (smaller + 1) / (num_resamples + 1))
    return Bootstrap(float(metric(two, truth) - metric(one, truth)), float(low), float(high), p_value)
