"""Counts the input tokens of a run, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.tensorflow.data.batches import to_array


def token_counter(how: str, input_name: str, padding: int | None) -> Callable[[Sequence[Any]], int] | None:
    """Returns a function that counts the input tokens in the batches of an optimizer step; None for "no".

    A batch is that of all replicas and workers, so no sum over workers is needed.

    Args:
        how: `include_num_input_tokens_seen`: "all", "non_padding" or "no".
        input_name: key of the features that hold token ids.
        padding: the token id that is not counted, in features without an attention mask; None counts all.
    """
    if how == "no":
        return None

    def count(features: object) -> int:
        if not isinstance(features, Mapping) or input_name not in features:
            raise ValueError(
                f"include_num_input_tokens_seen={how!r}: the features hold no {input_name!r}. Give them as a dict with "
                "that name, set `main_input_name` on the model to the name of its input, or "
                "include_num_input_tokens_seen='no'."
            )
        tokens = to_array(features[input_name])
        if how == "all":
            return int(np.size(tokens))
        if features.get("attention_mask") is not None:
            return int(np.sum(to_array(features["attention_mask"])))
        return int(np.size(tokens) if padding is None else np.count_nonzero(tokens != padding))

    return lambda batches: sum(count(features) for features, _ in batches)
