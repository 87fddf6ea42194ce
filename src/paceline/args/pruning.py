"""Pruning: validation of `pruning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.args.errors import did_you_mean, parse_object, wrong_value

SETTINGS = ("sparsity", "method", "unit", "scope", "schedule", "start", "end", "every", "modules", "exclude", "heads")
REMEDY = f"expected a sparsity above 0 and below 1, or a dict with some of {', '.join(SETTINGS)}"


def keep_pruning(name: str, value: object) -> dict[str, Any]:
    """Converts `pruning` (a sparsity, JSON or a mapping) to the arguments of the callback `Pruning`.

    Raises:
        ValueError: an unknown setting, or no sparsity. The callback checks the other values when a Trainer is made.
    """
    parsed = parse_object(name, value)
    if isinstance(parsed, str):
        parsed = number_in(name, parsed)
    if isinstance(parsed, int | float) and not isinstance(parsed, bool):
        parsed = {"sparsity": float(parsed)}
    if not isinstance(parsed, Mapping) or not parsed:
        raise wrong_value(name, value, REMEDY)
    plain = {str(key): setting for key, setting in parsed.items()}
    for key in plain:
        if key not in SETTINGS:
            raise wrong_value(name, value, REMEDY, did_you_mean(key, list(SETTINGS)))
    sparsity = plain.get("sparsity", 0.5 if plain.get("unit") == "2:4" else None)
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 < sparsity < 1:
        raise wrong_value(name, value, "sparsity is above 0 and below 1")
    return plain


def number_in(name: str, text: str) -> float:
    """Returns the number in a text. Raises ValueError if it is none."""
    try:
        return float(text)
    except ValueError:
        raise wrong_value(name, text, REMEDY) from None
