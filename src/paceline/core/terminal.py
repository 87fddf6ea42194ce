"""Text for terminals: safe, of a known width in columns, with small curves."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=*#"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FULL, EMPTY, ELLIPSIS, DOT = "━", "─", "…", "·"


def plain(text: object) -> str:
    """Returns a text on one line, with spaces for control and other invisible characters."""
    return "".join(character if character.isprintable() else " " for character in str(text))


def without_controls(text: str) -> str:
    """Returns a text with spaces for control characters other than line feeds and tabs; names of files may hold any."""
    return CONTROLS.sub(" ", text)


def width_of(text: str) -> int:
    """Returns the number of columns of a plain text: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def fit(text: str, columns: int, is_unicode: bool = True) -> str:
    """Returns a plain text of at most `columns` columns; a cut text ends with an ellipsis."""
    if width_of(text) <= columns:
        return text
    mark = ELLIPSIS if is_unicode else "~"
    kept, used = [], 0
    for character in text:
        used += _cells(character)
        if used > columns - 1:
            break
        kept.append(character)
    return "".join(kept) + mark if columns > 0 else ""


def sparkline(values: Sequence[float], cells: int, is_unicode: bool = True) -> str:
    """Returns a curve of at most `cells` characters, each the mean of an equal part; values that are not finite are
    left out."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or cells < 2:
        return ""
    cells = min(cells, len(finite))
    edges = [index * len(finite) // cells for index in range(cells + 1)]
    means = [math.fsum(v / (b - a) for v in finite[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    blocks = BLOCKS if is_unicode else ASCII_BLOCKS
    if not high / 2 > low / 2:
        return blocks[len(blocks) // 2] * cells
    return "".join(blocks[round((mean / 2 - low / 2) / (high / 2 - low / 2) * (len(blocks) - 1))] for mean in means)


def gauge(share: float, cells: int, is_unicode: bool = True) -> str:
    """Returns a bar of `cells` characters, of which a share is filled."""
    full = min(max(int(share * cells), 0), cells) if math.isfinite(share) else 0
    filled, empty = (FULL, EMPTY) if is_unicode else ("#", "-")
    return filled * full + empty * (cells - full)


def shows_unicode(stream: Any) -> bool:
    """True if the encoding of a stream has the characters of bars and curves."""
    try:
        (BLOCKS + FULL + EMPTY + ELLIPSIS + DOT).encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _cells(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
