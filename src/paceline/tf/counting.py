"""Adding up the input tokens of a run, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.tf.batches import to_array


def token_counter(trainer: Any) -> Callable[[Sequence[Any]], None] | None:
    """Adds the input tokens of an update's batches to the state; None where the arguments do not ask for it.

    A batch is that of all replicas and workers, so that nothing is to be summed over them.
    """
    how = str(trainer.args.include_num_input_tokens_seen)
    if how == "no":
        return None
    name = getattr(trainer.model, "main_input_name", "input_ids")
    padding = getattr(trainer.processing_class, "pad_token_id", None)

    def count(features: Any) -> int:
        if not isinstance(features, Mapping) or name not in features:
            raise ValueError(
                f"include_num_input_tokens_seen={how!r}: the features hold no {name!r}. Give them as a dict with that "
                "name, set `main_input_name` on the model to the name of its input, or "
                "include_num_input_tokens_seen='no'."
            )
        tokens = to_array(features[name])
        if how == "all":
            return int(np.size(tokens))
        if features.get("attention_mask") is not None:
            return int(np.sum(to_array(features["attention_mask"])))
        return int(np.size(tokens) if padding is None else np.count_nonzero(tokens != padding))

    def add(batches: Sequence[Any]) -> None:
        trainer.state.num_input_tokens_seen += sum(count(features) for features, _ in batches)

    return add
