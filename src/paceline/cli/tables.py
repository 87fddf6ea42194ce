"""Draws tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.terminal import fit, plain, width_of

_WIDEST = 48  # columns of a cell on a terminal


def draw_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], widest: Mapping[str, int] | None = None
) -> list[str]:
    """Returns the lines of a table with left-aligned columns; long cells are cut, control characters become spaces.

    Args:
        head: the titles.
        rows: the cells.
        widest: maximum width by title, in columns of a terminal, where it is not `_WIDEST`.
    """
    limits = [(widest or {}).get(title, _WIDEST) for title in head]
    cells = [[_cell(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in (head, *rows)]
    widths = [max(width_of(row[place]) for row in cells) for place in range(len(head))]
    return [
        "  ".join(cell + " " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _cell(text: str, limit: int) -> str:
    shown = plain(text)
    return shown if width_of(shown) <= limit else fit(shown, limit - 2)[:-1] + "..."
