"""Draws tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_WIDEST = 48  # characters of a cell


def draw_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], widest: Mapping[str, int] | None = None
) -> list[str]:
    """Returns the lines of a table with left-aligned columns; long cells are cut, control characters become spaces.

    Args:
        head: the titles.
        rows: the cells.
        widest: maximum width by title, in characters, where it is not `_WIDEST`.
    """
    limits = [(widest or {}).get(title, _WIDEST) for title in head]
    cells = [[_cell(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in (head, *rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(text: str, limit: int) -> str:
    plain = "".join(character if character.isprintable() else " " for character in text)
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
