"""What a refused option raises, and the words of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnsupportedOption(ValueError):
    """An option that exists but cannot be honoured here. The message names it, its value and what to do."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the candidate nearest to `word`, or an empty string where none is near."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def wrong_value(name: str, value: object, expected: str, hint: str = "") -> ValueError:
    """The error for an option with a value that it cannot take."""
    return ValueError(f"{name}={value!r} is not possible: {expected}{hint}" + ("" if hint.endswith("?") else "."))
