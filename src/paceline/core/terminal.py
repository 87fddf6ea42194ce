"""Text for terminals: safe, of a known width in columns, with small curves."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=*#"
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
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


def show(text: str, stream: Any = None) -> None:
    """Prints a text with a flush, wrapped at spaces on a terminal, with `?` for what the stream cannot encode.

    Args:
        stream: where to; by default the standard output.

    Raises:
        OSError: the stream cannot be written: a full disk, or a pipe that its reader has closed.
    """
    stream = sys.stdout if stream is None else stream
    print(to_show(text, stream), file=stream, flush=True)


def to_show(text: str, stream: Any) -> str:
    """Returns a text as `show` prints it."""
    isatty = getattr(stream, "isatty", None)
    if isatty is not None and isatty():
        text = wrapped(text, _columns_of(stream))
    return encodable(text, stream)


def _columns_of(stream: Any) -> int:
    """Returns the columns of a terminal; COLUMNS counts more than what the system knows, as in the standard library."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


def encodable(text: str, stream: Any, errors: str = "replace") -> str:
    """Returns a text that a stream can encode.

    Args:
        text: the text, of any characters, odd bytes of file names included.
        stream: the text stream.
        errors: how `str.encode` replaces what the stream cannot encode.
    """
    encoding = getattr(stream, "encoding", None)
    if encoding is None:
        return text
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, errors).decode(encoding)
    return text


def wrapped(text: str, columns: int) -> str:
    """Returns a text whose lines of more than `columns` columns are broken at spaces.

    The continuation of a line is indented to its last column, which begins after two spaces or more, as in a list of
    names and their descriptions; words are left whole.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, columns))


def _wrapped_line(line: str, columns: int) -> list[str]:
    if width_of(line) <= columns:
        return [line]
    gaps = [match.end() for match in GAP.finditer(line) if match.end() <= columns * 0.6]
    indent = " " * (gaps[-1] if gaps else len(line) - len(line.lstrip(" ")))
    parts, rest = [], line
    while width_of(rest) > columns:
        room = len(fit(rest, columns + 1)) - 1  # characters of `columns` columns
        # a word longer than a line keeps its line, and the terminal breaks it
        end = rest.rfind(" ", len(indent) + 1, room + 1)
        end = rest.find(" ", max(room, len(indent) + 1)) if end < 0 else end
        if end < 0:
            break
        parts.append(rest[:end].rstrip(" "))
        rest = indent + rest[end:].lstrip(" ")
    return [*parts, rest]


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
