"""Counts the input tokens of batches, and the floating-point operations of training on them, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.methods import is_ours


class Counted(NamedTuple):
    """The counts of micro-batches.

    Attributes:
        tokens: input tokens, as `include_num_input_tokens_seen` counts them.
        operations: floating-point operations of forward and backward passes.
        useful: tokens without padding, in batches whose padding can be identified.
        elements: tokens of these batches with padding.
    """

    tokens: int = 0
    operations: int = 0
    useful: int = 0
    elements: int = 0


def operations_per_token(model: nn.Module) -> int:
    """Returns 6 operations per non-embedding parameter (arXiv:2001.08361, section 2.1).

    Returns 0 if the model has no method `num_parameters`, as models of transformers do.
    """
    count = getattr(model, "num_parameters", None)
    return 6 * int(count(exclude_embeddings=True)) if callable(count) else 0


def count_inputs(model: nn.Module, inputs: object) -> int:
    """Returns the number of elements of the model's main input in a batch; 0 if it is absent."""
    main = inputs.get(getattr(model, "main_input_name", "input_ids")) if hasattr(inputs, "get") else None
    return main.numel() if isinstance(main, Tensor) else 0


def estimate_operations(model: nn.Module, inputs: object) -> int:
    """Returns the operations of a forward and backward pass, by the model's `floating_point_ops` or its parameters."""
    own = getattr(model, "floating_point_ops", None)
    return int(own(inputs)) if callable(own) else operations_per_token(model) * count_inputs(model, inputs)


def measurer(
    model: nn.Module,
    floating_point_ops: Callable[[Any], int],
    count_tokens: Callable[[Any], int] | None,
    count_padding: Callable[[Any], tuple[int, int]] | None = None,
) -> Callable[[Sequence[Any]], Counted] | None:
    """Returns `(micro-batches) -> counts`; None if nothing is counted.

    Args:
        model: the model without wrappers.
        floating_point_ops: the Trainer's, bound; called only if it is overridden, or if the model has its own estimate.
        count_tokens: `(batch) -> input tokens`; None: they are not counted.
        count_padding: `(batch) -> (useful tokens, tokens)`; None: they are not counted.
    """
    per_token = operations_per_token(model)  # computed once, because visiting all parameters is slow
    asks = not is_ours(floating_point_ops) or callable(getattr(model, "floating_point_ops", None))
    if count_tokens is None and count_padding is None and not per_token and not asks:
        return None

    def measure(batches: Sequence[Any]) -> Counted:
        tokens = sum(map(count_tokens, batches)) if count_tokens is not None else 0
        padded = [count_padding(batch) for batch in batches] if count_padding is not None else []
        useful, elements = (sum(column) for column in zip(*padded, strict=True)) if padded else (0, 0)
        if asks:
            operations = sum(map(floating_point_ops, batches))
        else:
            operations = per_token * sum(count_inputs(model, batch) for batch in batches) if per_token else 0
        return Counted(tokens, operations, useful, elements)

    return measure


def token_counter(
    how: str, name: str, padding: int | None, num_filling: Callable[[Any], int] | None = None
) -> Callable[[Any], int] | None:
    """Returns `(batch) -> input tokens`; None if they are not counted.

    Args:
        how: `include_num_input_tokens_seen`: "no", "all", or "non_padding".
        name: the name of the model's main input.
        padding: the padding token, for batches without an `attention_mask`; None: there is no padding.
        num_filling: returns the tokens that fill the ends of a batch's packed rows; None: rows are not packed.
    """
    if how == "no":
        return None

    def count(batch: Any) -> int:
        tokens = batch.get(name) if hasattr(batch, "get") else None
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"include_num_input_tokens_seen={how!r}: the batches hold no tensor {name!r}. Set `main_input_name` on "
                "the model to the name of its input, or include_num_input_tokens_seen='no'."
            )
        if how == "all":
            return tokens.numel()
        if num_filling is not None:
            return tokens.numel() - num_filling(batch)
        if isinstance(batch.get("attention_mask"), Tensor):
            return int(batch["attention_mask"].sum())
        return tokens.numel() if padding is None else int((tokens != padding).sum())

    return count


def uses_tf32() -> bool:
    """Returns True if products of float32 matrices on a CUDA device are rounded to TF32 or less.

    Recent releases of torch refuse to name one precision once a backend's own `fp32_precision` is set.
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return str(getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")) in ("tf32", "bf16")
