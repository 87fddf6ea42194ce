"""How many floating-point operations training on a batch takes, by the model's own count of its parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def operations_per_token(model: nn.Module) -> int:
    """6 per parameter that is no embedding (arXiv:2001.08361, section 2.1); 0 where the model has no count of them.

    Models of transformers have one (`num_parameters`).
    """
    count = getattr(model, "num_parameters", None)
    return 6 * int(count(exclude_embeddings=True)) if callable(count) else 0


def count_inputs(model: nn.Module, inputs: Any) -> int:
    """Elements of the model's main input in a batch; 0 where it is not there."""
    main = inputs.get(getattr(model, "main_input_name", "input_ids")) if hasattr(inputs, "get") else None
    return main.numel() if isinstance(main, Tensor) else 0


def estimate_operations(model: nn.Module, inputs: Any) -> int:
    """Operations of a forward and backward pass: by the model's own `floating_point_ops`, else by its parameters."""
    own = getattr(model, "floating_point_ops", None)
    return int(own(inputs)) if callable(own) else operations_per_token(model) * count_inputs(model, inputs)
