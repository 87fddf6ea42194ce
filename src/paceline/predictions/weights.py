"""Weights of an ensemble, on the simplex, of the smallest log loss on held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MAX_STEPS = 5000
TOLERANCE = 1e-9  # difference of the log loss, in nats


def log_softmax(logits: Array) -> Array:
    """Returns log-probabilities over the last dimension, in float64."""
    values = np.asarray(logits, dtype=np.float64)
    values = values - values.max(-1, keepdims=True)
    return np.asarray(values - np.log(np.exp(values).sum(-1, keepdims=True)))


def mixture_weights(true_probabilities: Array) -> Array:
    """Returns the weights of a mean of probabilities, by expectation maximization; the problem is convex.

    Args:
        true_probabilities: `(samples, members)`, the probability that each member gives to the true class.
    """
    given = np.maximum(np.asarray(true_probabilities, dtype=np.float64), 1e-300)
    weights = np.full(given.shape[1], 1 / given.shape[1])
    loss = np.inf
    for _ in range(MAX_STEPS):
        mixed = given @ weights
        before, loss = loss, float(-np.log(mixed).mean())
        if before - loss < TOLERANCE:
            break
        weights = weights * (given / mixed[:, None]).mean(0)
        weights /= weights.sum()
    return weights


def logit_weights(logits: Sequence[Array], labels: Array) -> Array:
    """Returns the weights of a mean of log-probabilities, by exponentiated gradients (Kivinen and Warmuth 1997).

    Args:
        logits: the logits of each member, `(samples, classes)`.
        labels: `(samples,)`, the true classes.
    """
    stacked = np.stack([log_softmax(each) for each in logits], -1)
    if not np.isfinite(stacked).all():
        raise ValueError("the logits of a member are not finite: weights cannot be fitted")
    rows = np.arange(len(labels))

    def evaluate(weights: Array) -> tuple[float, Array]:
        combined = log_softmax(stacked @ weights)
        errors = np.exp(combined)
        errors[rows, labels] -= 1
        return float(-combined[rows, labels].mean()), np.einsum("nc,ncm->m", errors, stacked) / len(labels)

    weights = np.full(len(logits), 1 / len(logits))
    loss, gradient = evaluate(weights)
    rate = 1.0
    for _ in range(MAX_STEPS):
        factors = np.exp(-rate * (gradient - gradient.min()))
        proposed = weights * factors / (weights * factors).sum()
        new_loss, new_gradient = evaluate(proposed)
        if new_loss > loss:
            rate /= 2
            if rate < 1e-12:
                break
            continue
        is_done = loss - new_loss < TOLERANCE
        weights, loss, gradient, rate = proposed, new_loss, new_gradient, rate * 1.2
        if is_done:
            break
    return weights
