"""Finds the loss and the predictions in a model's outputs of any structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class ModelOutputError(TypeError, ValueError):
    """Raised if no loss can be read from a model's outputs; the message describes the outputs and the remedy."""


class IncompleteBatch(ModelOutputError):
    """Raised for a batch that lacks labels, or another input that the model needs for its loss."""


ADVICE = (
    "Return the loss first in a tuple, or under the key or attribute `loss`; or pass `compute_loss_func=` to the "
    "Trainer, or override `Trainer.compute_loss`, to make the loss from the outputs."
)


def describe(value: object, depth: int = 0) -> str:
    """Returns a short description of a value: types, keys and shapes, never contents."""
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    named = as_mapping(value)
    if depth >= 2 or value is None or isinstance(value, str | int | float | bool):
        return type(value).__name__ if value is not None else "None"
    if named is not None:
        inner = ", ".join(f"{key}: {describe(item, depth + 1)}" for key, item in named.items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(describe(item, depth + 1) for item in value[:8])})"
    return type(value).__name__


def as_mapping(outputs: object) -> Mapping[str, Any] | None:
    """Returns the named fields of a dict, ModelOutput, dataclass or namedtuple; None for everything else."""
    if isinstance(outputs, Mapping):
        return outputs
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    names = getattr(outputs, "_fields", None)
    if isinstance(outputs, tuple) and isinstance(names, tuple):
        return dict(zip(names, outputs, strict=True))
    return None


def is_scalar_loss(value: object) -> bool:
    """Returns True if a value can be a loss: a floating-point tensor of one element and at most one dimension."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1 and value.dim() <= 1


def find_loss(outputs: object) -> Tensor | None:
    """Returns the 0-dim loss among the outputs of a model, or None if there is none.

    The loss is `loss` of a dict, ModelOutput, dataclass or namedtuple; the first entry of a tuple or list; or the
    output itself if it is a scalar.
    """
    named = as_mapping(outputs)
    candidate: Any = None
    positional = False
    if named is not None and ("loss" in named or not isinstance(outputs, tuple)):
        candidate = named.get("loss")
        if isinstance(candidate, Tensor) and not is_scalar_loss(candidate):
            raise ModelOutputError(
                f"The model returned `loss` as a {describe(candidate)}; expected one number. Return its mean, or "
                "weigh it yourself in `compute_loss_func=` or an overridden `Trainer.compute_loss`."
            )
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str) and len(outputs) > 0:
        candidate, positional = outputs[0], True
    elif isinstance(outputs, Tensor):
        candidate, positional = outputs, True
    if not isinstance(candidate, Tensor) or not is_scalar_loss(candidate) or (positional and candidate.dim() > 0):
        return None  # an unnamed tensor of shape (1,) is a prediction for a batch of one
    return candidate.reshape(())


def read_loss(outputs: Any, inputs: Mapping[str, Any] | Sequence[Any]) -> Tensor:
    """Returns the loss that a model returned.

    Raises:
        ModelOutputError: there is no loss, or it is not one number; the message describes the outputs.
        IncompleteBatch: there is no loss.
    """
    # fast path for the two common forms, because this runs for every micro-batch
    kind = type(outputs)
    first = None
    if kind is dict:
        first = outputs.get("loss")
    elif kind is tuple and outputs:
        first = outputs[0]
    if isinstance(first, Tensor) and first.dim() == 0 and first.is_floating_point():
        return first
    loss = find_loss(outputs)
    if loss is None:
        given = ", ".join(inputs) if isinstance(inputs, Mapping) else f"{len(inputs)} positional values"
        raise IncompleteBatch(
            f"The model did not return a loss from the inputs: no loss can be read from {describe(outputs)} (its "
            f"inputs were: {given}). " + ADVICE
        )
    return loss


def check_loss(loss: Any, source: str) -> Tensor:
    """Returns the loss that user code computed as a 0-dim tensor.

    Raises:
        ModelOutputError: it is not one number.
    """
    if not is_scalar_loss(loss):
        raise ModelOutputError(f"{source} returned {describe(loss)}; a loss must be a tensor of one number.")
    scalar: Tensor = loss
    return scalar if scalar.dim() == 0 else scalar.reshape(())


def no_gradient() -> ModelOutputError:
    """Returns the error for a loss without a gradient."""
    return ModelOutputError(
        "The loss does not depend on any parameter that is trained: it was detached (.item(), .detach(), no_grad, "
        "numpy) on its way, or everything it is made of is frozen (requires_grad=False)."
    )


class LossPlace:
    """Decides if an unnamed scalar in a model's outputs, alone or in the first place, is a loss or a prediction.

    A batch of several samples decides, because its predictions have rows. The prediction for a single sample may be
    0-dim (`squeeze()`), so a batch of one sample is judged like the larger batches before it. If there was none, the
    scalar is a loss if the batch's loss was read from it.
    """

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def holds(self, outputs: object, loss: Tensor | None, num_samples: int, has_labels: bool = True) -> bool:
        """Returns True if the first of these outputs, or the output itself, is a loss.

        Args:
            outputs: as the model returned them.
            loss: the loss of this batch, from any source, or None.
            num_samples: number of samples in the batch.
            has_labels: True if the batch had labels; without labels a model may return a different structure.
        """
        candidate = find_loss(outputs)
        kind = (has_labels, type(outputs), len(outputs) if isinstance(outputs, list | tuple) else None)
        if num_samples > 1:
            self._known[kind] = candidate is not None
        elif candidate is not None and kind not in self._known:
            return loss is not None and is_same_value(loss, candidate)
        return self._known.get(kind, candidate is not None)


def is_same_value(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are the same object or start at the same memory address."""
    return one is other or (one.data_ptr() != 0 and one.data_ptr() == other.data_ptr())


def is_named(outputs: object) -> bool:
    """Returns True if a loss in these outputs would be named."""
    named = as_mapping(outputs)
    return named is not None and ("loss" in named or not isinstance(outputs, tuple))


def read_predictions(outputs: object, ignore_keys: Sequence[str] = (), holds_loss: bool = True) -> Any:
    """Returns the outputs without the loss: one value, a tuple of several, or None.

    A bare tensor with rows is the predictions, and is never sliced. Entries that are None or named in `ignore_keys`
    are dropped.

    Args:
        outputs: as the model returned them.
        ignore_keys: names to drop.
        holds_loss: True if an unnamed scalar, alone or in the first place, is a loss; see `LossPlace`.
    """
    named = as_mapping(outputs)
    if named is not None and is_named(outputs):
        skipped = {"loss", *ignore_keys}
        kept = tuple(value for key, value in named.items() if key not in skipped and value is not None)
    elif isinstance(outputs, list | tuple):
        rest = outputs[1:] if holds_loss and find_loss(outputs) is not None else outputs
        kept = tuple(value for value in rest if value is not None)
    elif isinstance(outputs, Tensor):
        kept = () if outputs.dim() == 0 and holds_loss else (outputs,)
    else:
        kept = ()
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else kept


def detach(value: object) -> Any:
    """Returns the same nested structure with its tensors detached from the graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detach(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(*map(detach, value)) if hasattr(value, "_fields") else type(value)(map(detach, value))
    return value


def candidate_logits(outputs: object) -> list[Tensor]:
    """Returns the candidate logits: all floating-point tensors with at least two dimensions in the outputs, in order.

    Nested outputs count only if the levels above contain none.
    """
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() and outputs.dim() >= 2 else []
    named = as_mapping(outputs)
    values: Sequence[Any] = []
    if named is not None:
        values = list(named.values())
    elif isinstance(outputs, list | tuple):
        values = outputs
    above = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2]
    return above or [found for value in values if not isinstance(value, Tensor) for found in candidate_logits(value)]
