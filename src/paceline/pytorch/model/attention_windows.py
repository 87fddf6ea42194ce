"""Finds the attention windows of a model of transformers in its config and nested configs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "local_attention",
    "local_attention_window_len",
    "local_attn_chunk_length",
    "attention_window",
    "attention_window_size",
    "attention_chunk_size",
    "window_size",
)
FULL = frozenset({"full_attention", "attention"})


def configs_in(config: Any) -> Iterator[Any]:
    """Yields a config and its nested configs, such as those of the text and the vision model."""
    yield config
    for value in vars(config).values() if hasattr(config, "__dict__") else ():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from configs_in(value)


def windows_of(config: Any) -> dict[str, int]:
    """Returns the attention windows of some layers in tokens, the largest by option name.

    A window that covers all positions of the model does not count.
    """
    found: dict[str, int] = {}
    for each in configs_in(config):
        positions = getattr(each, "max_position_embeddings", None)
        for name in WINDOWS:
            for size in sizes_in(option_in(each, name)):
                if not isinstance(positions, int) or size < positions:
                    found[name] = max(size, found.get(name, 0))
    return found


def option_in(config: Any, name: str) -> Any:
    """Returns an option of a config; of one whose layers differ in it, a list of theirs."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' own, of configs with options by layer
        return [getattr(layer, name, None) for layer in config.per_layer_config]


@contextmanager
def narrowed(model: nn.Module, config: Any, names: Collection[str], largest: int, size: int) -> Iterator[None]:
    """Shrinks attention windows while entered, in the configs of a model and in its modules.

    Args:
        model: the model.
        config: its config.
        names: the options to change.
        largest: windows above this number of tokens are changed.
        size: tokens of a window meanwhile.
    """
    before = [
        (vars(owner), name, value)
        for owner in (*configs_in(config), *model.modules())
        for name in names
        if isinstance(value := vars(owner).get(name), int) and value > largest
    ]
    for attributes, name, _ in before:
        attributes[name] = size
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes[name] = value


def sizes_in(value: object) -> list[int]:
    """Returns the positive integers in an option, which may be an integer, a list or any other value."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool) and each > 0]


def has_windows(config: Any) -> bool:
    """Returns True if some layers attend to a part of the text only, which only the model's own masks express."""
    if windows_of(config):
        return True
    for each in configs_in(config):
        if set(getattr(each, "layer_types", None) or ()) - FULL:
            return True
        if getattr(each, "attention_type", None) == "block_sparse":
            return True
    return False
