"""Shapes and dtype of the activations that a stage receives, by the shapes of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Signature = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ActivationMeta:
    """The shapes of the tensors that a stage hands on for one micro-batch, and their type."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def pack(self, tensors: Sequence[Tensor], length: int) -> Tensor:
        """Returns the tensors as one of one dimension, padded to `length`."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
        return flat if flat.numel() == length else nn.functional.pad(flat, (0, length - flat.numel()))

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of a buffer."""
        if flat.numel() != self.numel:
            flat = flat[: self.numel]
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))


def signature_of(batch: Mapping[str, Any]) -> Signature:
    """Returns the shapes and types of a batch's tensors."""
    return tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__)
        for name, value in batch.items()
    )
