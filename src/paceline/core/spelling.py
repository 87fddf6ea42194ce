"""Suggestions for errors about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns text that names the closest match to `name` in `known`, if any, then all of them."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + (", ".join(choices) or "none")
