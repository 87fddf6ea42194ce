"""The half sentence that an error about an unknown name ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The nearest of `known` to a misspelt `name`, if there is one, then all of them."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + (", ".join(choices) or "none")
