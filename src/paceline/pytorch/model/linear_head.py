"""A linear head, the elementwise operations on its logits, and low-rank additions to it, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.pytorch.model.vocabulary_shard import Shard


@dataclass(frozen=True)
class Scale:
    """Multiplies the logits."""

    factor: float

    def __call__(self, logits: Tensor) -> Tensor:
        return logits * self.factor


@dataclass(frozen=True, eq=False)
class Shift:
    """Adds a number, or one number per class, `(num_classes,)`, to the logits."""

    offset: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        return logits + self.offset


@dataclass(frozen=True)
class Squash:
    """Applies the hyperbolic tangent, as in soft-capped logits."""

    def __call__(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits)


@dataclass(frozen=True)
class Cast:
    """Converts to a dtype. This has no effect on chunks, which are computed in float32 or float64."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


Step = Scale | Shift | Squash | Cast


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank addition to the logits, with inputs of its own.

    Attributes:
        weight: `(num_classes, rank)`.
        scaling: factor of its product.
    """

    weight: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Head:
    """The linear layer, and the operations between it and the loss.

    With adapters, each row holds the inputs of the layer and then those of each adapter.

    Attributes:
        weight: `(num_classes, num_features)`.
        bias: `(num_classes,)`, or None.
        autocast: the dtype of the matrix product under autocast; None: the dtype of the tensors.
        steps: elementwise operations on the logits, in order.
        adapters: low-rank additions to the layer's outputs.
        shard: the classes of the weight and the bias, if other processes have more; None: they are all.
    """

    weight: Tensor
    bias: Tensor | None
    autocast: torch.dtype | None = None
    steps: tuple[Step, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    shard: Shard | None = None

    @property
    def num_classes(self) -> int:
        """Returns the number of classes, of all processes."""
        return self.weight.shape[0] if self.shard is None else self.shard.num_classes

    @property
    def tensors(self) -> list[Tensor | None]:
        """Returns the weight, the bias, and the weights of the adapters."""
        return [self.weight, self.bias, *(adapter.weight for adapter in self.adapters)]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Head:
        """Returns the same head with other tensors, in the order of `tensors`."""
        weight, bias, *rest = tensors
        assert weight is not None
        pairs = zip(self.adapters, rest, strict=True)
        adapters = tuple(replace(adapter, weight=each) for adapter, each in pairs if each is not None)
        return replace(self, weight=weight, bias=bias, adapters=adapters)

    def detached(self) -> Head:
        """Returns the same head without gradients."""
        return self.with_tensors([None if each is None else each.detach() for each in self.tensors])

    def logits(self, rows: Tensor) -> Tensor:
        """Returns the logits of `rows`, `(..., num_classes)`, computed by torch's operations."""
        with torch.autocast(rows.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            found = self._outputs(rows) if self.adapters else functional.linear(rows, self.weight, self.bias)
        if self.shard is not None:
            found = self.shard.gather(found)
        for step in self.steps:
            found = step(found)
        return found

    def gradients(
        self, rows: Tensor, function: Callable[[Tensor, Head], Tensor], slope: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Returns the gradients of a function of the rows and this head, as nodes of the graph.

        Args:
            rows: the inputs of the layer.
            function: `(rows, head) -> result`.
            slope: gradient of the result.
            needs: flags of the rows and of each tensor: a gradient is needed.
        """
        # aliases: the rows may depend on the same weight, as with tied embeddings
        alias, *tensors = [None if each is None else each.view_as(each) for each in (rows, *self.tensors)]
        assert alias is not None
        result = function(alias, self.with_tensors(tensors))
        flagged = list(zip((alias, *tensors), needs, strict=True))
        wanted = [each for each, need in flagged if each is not None and need]
        found = iter(torch.autograd.grad(result, wanted, slope.to(result.dtype), create_graph=True))
        return [next(found) if each is not None and need else None for each, need in flagged]

    def _outputs(self, rows: Tensor) -> Tensor:
        weights = [self.weight, *(adapter.weight for adapter in self.adapters)]
        parts = [part.to(weight.dtype) for part, weight in zip(split(rows, weights), weights, strict=True)]
        base = total = functional.linear(parts[0], self.weight, self.bias)
        for part, adapter in zip(parts[1:], self.adapters, strict=True):
            total = total + functional.linear(part, adapter.weight) * adapter.scaling
        return total.to(base.dtype)


def split(rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the inputs of each weight, `(..., columns of the weight)`, as views of the rows."""
    return torch.split(rows, [weight.shape[1] for weight in weights], -1)
