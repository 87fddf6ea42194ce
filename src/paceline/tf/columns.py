"""Which columns of a table a model of TensorFlow takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tf.batches import KNOWN_LABELS
from paceline.tf.objective import is_functional, parameters_of

# what a model's call takes beside its inputs
NO_INPUTS = {"self", "args", "kwargs", "training", "mask", "return_dict", "output_attentions", "output_hidden_states"}


def columns_of(model: Any, label_names: Sequence[str] | None) -> list[str] | None:
    """The columns that a model takes by their names, labels among them; None where it does not tell names."""
    labels = list(label_names) if label_names else [name for known in KNOWN_LABELS for name in known]
    if is_functional(model):
        inputs = model.input
        return [*map(str, inputs), *labels] if isinstance(inputs, Mapping) else None
    names = [name for name in parameters_of(getattr(model, "call", model.__call__)) if name not in NO_INPUTS]
    if len([name for name in names if name not in labels]) < 2:
        return None  # one input, whatever its name: it is given all the features
    return [*names, *labels]
