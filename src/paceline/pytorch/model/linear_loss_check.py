"""Comparison of a loss without logits with torch's, for a few rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, Kernel, linear_cross_entropy
from paceline.pytorch.model.linear_head import Head
from paceline.pytorch.model.reductions import tolerance_of

CHECKED_ROWS = 16


def compare(
    rows: Tensor, targets: Tensor, head: Head, loss: CrossEntropy, kernel: Kernel | None = None
) -> float | None:
    """Returns the difference of the chunked loss and its gradient from torch's for a few rows, in tolerances.

    With a kernel, the gradients of weight and bias are compared too. Returns None if every target is ignored.
    """
    places = (targets != loss.ignore_index).nonzero().squeeze(1)
    places = places[:: max(1, len(places) // CHECKED_ROWS)][:CHECKED_ROWS]
    if not len(places):
        return None
    # gradients of 16-bit logits are rounded before or after the division by the number of rows: a power of two is exact
    places = places[: 1 << (len(places).bit_length() - 1)]
    if loss.weight is not None and loss.reduction == "mean":
        loss = replace(loss, reduction="sum")  # the divisor would be a sum of weights
    part, target = rows.detach()[places], targets[places]
    plain_head = head.detached()
    compared = [] if kernel is None else [each for each in plain_head.tensors if each is not None]
    for each in compared:
        each.requires_grad_()
    size = max(1, len(places) // 2)
    found = []
    for chunked in (False, True):
        leaf = part.clone().requires_grad_()
        with torch.enable_grad():
            if chunked:
                value = linear_cross_entropy(leaf, target, plain_head, loss, size, kernel=kernel)
            else:
                value = loss(plain_head.logits(leaf), target)
            slope, *others = torch.autograd.grad(value.sum(), [leaf, *compared])
        found.append((value.detach().double().sum(), [slope.double(), *others]))
    (value, slopes), (chunked_value, chunked_slopes) = found
    parameters = head.autocast or head.weight.dtype
    tolerance = tolerance_of(torch.float32 if value.dtype != parameters else parameters, parameters)
    if parameters == torch.float64:
        tolerance = tolerance_of(parameters, parameters)
    by_value = (value - chunked_value).abs() / value.abs().clamp(min=1e-6)
    pairs = zip(slopes, chunked_slopes, strict=True)
    by_slope = [((one - other).norm() / one.norm().clamp(min=1e-12)).double() for one, other in pairs]
    worst = float(torch.stack([by_value, *by_slope]).max()) / tolerance
    return worst if worst == worst else float("inf")
