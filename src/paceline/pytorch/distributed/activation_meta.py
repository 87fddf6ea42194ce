"""Shapes and dtype of the activations that one stage sends to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Signature = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ActivationMeta:
    """The shapes and the dtype of the tensors that a stage sends to the next for one micro-batch."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def pack(self, tensors: Sequence[Tensor], length: int) -> Tensor:
        """Returns the tensors concatenated into a 1-dim tensor, zero-padded to `length` elements."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
        return flat if flat.numel() == length else nn.functional.pad(flat, (0, length - flat.numel()))

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that `pack` concatenated; padding is dropped."""
        if flat.numel() != self.numel:
            flat = flat[: self.numel]
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))


def signature_of(batch: Mapping[str, Any]) -> Signature:
    """Returns the shape and dtype of each of a batch's tensors, and the type name of every other entry."""
    return tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__)
        for name, value in batch.items()
    )
