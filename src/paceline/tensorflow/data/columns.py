"""Selection of the table columns that a TensorFlow model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tensorflow.data.batches import KNOWN_LABELS
from paceline.tensorflow.objective import is_functional, parameters_of

# parameters of a model's `call` that are not inputs
NO_INPUTS = {"self", "args", "kwargs", "training", "mask", "return_dict", "output_attentions", "output_hidden_states"}


def columns_of(model: Any, label_names: Sequence[str] | None) -> list[str] | None:
    """Returns the column names that a model takes, including labels; None if its signature does not name them."""
    labels = list(label_names) if label_names else [name for known in KNOWN_LABELS for name in known]
    if is_functional(model):
        inputs = model.input
        return [*map(str, inputs), *labels] if isinstance(inputs, Mapping) else None
    names = [name for name in parameters_of(getattr(model, "call", model.__call__)) if name not in NO_INPUTS]
    if len([name for name in names if name not in labels]) < 2:
        return None  # a single input of any name gets all features
    return [*names, *labels]
