"""Validation of numbers read from files and given by users. Standard library only."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

MOST = 2**53  # the largest valid number of steps, samples or tokens: larger integers are not exact as floats


def is_count(value: object) -> TypeGuard[int]:
    """True if the value is a valid number of steps, epochs or samples: an integer from 0 to `MOST`."""
    return type(value) is int and 0 <= value <= MOST


def is_amount(value: Any) -> TypeGuard[float]:
    """True if the value is a valid amount of epochs or operations: a finite number, not negative."""
    return type(value) in (int, float) and 0 <= value < 10**300 and math.isfinite(value)


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite integer or float; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**300


def shown(value: object) -> str:
    """Returns the value as text of at most 80 characters for an error message."""
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value) if _is_short(value) else "a number too large"
    return repr(text[:80]) if isinstance(value, str) else text[:80]


def is_json(value: Any, sequences: tuple[type, ...] = (list,), depth: int = 100) -> bool:
    """True if a JSON round trip leaves nested values unchanged: text keys, no tuples or sets, at most `depth` levels.

    Args:
        value: nested dicts and lists.
        sequences: types that count as a list.
        depth: the maximum number of levels.
    """
    if type(value) is dict:
        held = list(value.values())
        return depth > 0 and all(type(key) is str for key in value) and is_json(held, sequences, depth - 1)
    if type(value) in sequences:
        return depth > 0 and all(is_json(item, sequences, depth - 1) for item in value)
    return value is None or isinstance(value, str | int | float)


def _is_short(value: object) -> bool:
    return not isinstance(value, int) or value.bit_length() <= 128
