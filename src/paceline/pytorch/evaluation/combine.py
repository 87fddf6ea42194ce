"""Combines several predictions of the same samples that are tensors, on their device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.predictions.combination import Combination


class TensorCombination(Combination):
    """A `Combination` of tensors."""

    functions: Any = torch

    def widen(self, predictions: Tensor) -> Tensor:
        """Returns predictions in 32 bits, or in 64 if they have 64."""
        values = predictions.detach()
        return values if values.dtype == torch.float64 else values.float()

    def sort(self, stacked: Tensor) -> Tensor:
        """Returns a tensor, sorted along its first dimension."""
        return stacked.sort(0).values

    def classes(self, values: Tensor) -> Tensor:
        """Returns the indices of the last dimension, where the values are."""
        return torch.arange(values.shape[-1], device=values.device)

    def to_type(self, value: Tensor, like: Tensor) -> Tensor:
        """Returns a tensor in the type of another one."""
        return value.to(like.dtype)

    def log_softmax(self, values: Tensor) -> Tensor:
        """Returns log-probabilities over the last dimension."""
        return values.log_softmax(-1)

    def log_sigmoid(self, values: Tensor) -> Tensor:
        """Returns the logarithms of the probabilities of logits of labels."""
        return functional.logsigmoid(values)
