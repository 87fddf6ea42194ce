"""Confidence intervals of metrics in one pass over the samples.

The bootstrap (Efron, 1979) resamples a set with replacement many times. In one pass, over a set of unknown size, each
sample enters each replicate with a weight drawn from a Poisson distribution of mean 1 (Oza and Russell, 2001, "Online
bagging and boosting"; Chamandy et al., 2012, "Estimating uncertainty for massive data streams"). Whole samples are
resampled, so the tokens of one text, which are not independent, stay together. The weights are a function of the seed
and of the sample's index in the set, independent of the batch size.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# quantile function of a Poisson distribution of mean 1, at 65,536 evenly spaced quantiles
POISSON = np.searchsorted(
    np.cumsum([math.exp(-1) / math.factorial(count) for count in range(12)]), (np.arange(1 << 16) + 0.5) / (1 << 16)
).astype(np.uint8)


def poisson_weights(first: int, count: int, replicates: int, seed: int) -> Array:
    """Returns the bootstrap weights of `count` samples, the first of which has the index `first` in its set.

    They depend on (seed, index) alone: the generator is counter-based (Philox; Salmon et al., 2011), and each sample
    has its own range of the counter.

    Returns:
        `(count, replicates)`, uint8.
    """
    counters = -(-replicates // 16)  # one step of the counter yields 4 x 64 bits, and a weight takes 16 bits
    bits = np.random.Philox(key=seed, counter=first * counters)
    drawn = np.asarray(bits.random_raw(count * counters * 4), dtype="<u8").view("<u2")
    weights: Array = POISSON[drawn.reshape(count, counters * 16)[:, :replicates]]
    return weights


def percentiles(resampled: Array, confidence: float) -> tuple[float, float]:
    """Returns the central percentile interval of the finite values that covers the share `confidence` of them."""
    finite = resampled[np.isfinite(resampled)]
    if finite.size == 0:
        return math.nan, math.nan
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def wilson_interval(successes: float, trials: float, confidence: float) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion (1927, "Probable inference, the law of succession ...").

    Args:
        successes: the number of successful trials.
        trials: at least 1.
        confidence: 0 to 1.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)
