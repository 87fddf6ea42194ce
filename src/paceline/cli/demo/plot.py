"""Text plots for a terminal: a curve and a table of counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[float, float]]

BRAILLE = 0x2800
LARGEST = 1e300
# bits of the 2 x 4 dots of a braille character, by row and column
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Glyphs:
    """The characters of a drawing.

    Attributes:
        line: the symbol of the line in the legend.
        mark: a point of the marked series.
        vertical, horizontal, corner, tick: the axes.
    """

    line: str
    mark: str
    vertical: str
    horizontal: str
    corner: str
    tick: str


UNICODE = Glyphs("⠒⠒", "●", "│", "─", "└", "┤")
ASCII = Glyphs("..", "o", "|", "-", "+", "+")


def can_draw_unicode() -> bool:
    """True if the standard output can encode braille characters."""
    try:
        "⠒●┤".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw_curve(
    line: Points,
    marks: Points = (),
    *,
    labels: tuple[str, str] = ("training", "held out"),
    x_label: str = "step",
    width: int = 64,
    height: int = 12,
    unicode: bool = True,
) -> str:
    """Draws a line with marked points and the range of both axes.

    Args:
        line: `(x, y)` points joined by a line; non-finite ones are omitted.
        marks: `(x, y)` points drawn one by one.
        width, height: size of the drawing area, in characters.
        unicode: True uses braille dots and box lines; False only ASCII.

    Returns:
        The drawing as text; one sentence if there is no finite point.
    """
    line, marks = _finite(line), _finite(marks)
    points = [*line, *marks]
    if not points:
        return "(nothing to draw: no finite number was logged)"
    glyphs = UNICODE if unicode else ASCII
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float, columns: int, rows: int) -> tuple[int, int]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        down = (high_y - y) / (high_y - low_y) if high_y > low_y else 0.5
        return round(across * (columns - 1)), round(down * (rows - 1))

    if unicode:
        cells = _draw_dots(_join([place(x, y, 2 * width, 4 * height) for x, y in line]), width, height)
    else:
        cells = [[" "] * width for _ in range(height)]
        for column, row in _join([place(x, y, width, height) for x, y in line]):
            cells[row][column] = "."
    for x, y in marks:
        column, row = place(x, y, width, height)
        cells[row][column] = glyphs.mark
    return _frame(cells, (low_x, high_x), (low_y, high_y), glyphs, labels if marks else labels[:1], x_label)


def draw_table(rows: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Draws a confusion matrix (rows: true, columns: predicted); zeros off the diagonal are dots."""
    cell = max(len(str(value)) for value in [*names, *(count for row in rows for count in row)]) + 1
    side = max(len(name) for name in names)
    lines = [" " * side + "  " + "".join(name.rjust(cell) for name in names)]
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        shown = (str(count) if count or i == j else "." for j, count in enumerate(row))
        lines.append(name.rjust(side) + "  " + "".join(text.rjust(cell) for text in shown))
    return "\n".join(line.rstrip() for line in lines)


def _finite(points: Points) -> list[tuple[float, float]]:
    """Returns the points that can be drawn; beyond `LARGEST` their differences would overflow."""
    return [(x, y) for x, y in points if abs(x) <= LARGEST and abs(y) <= LARGEST]


def _join(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns every cell on the straight lines between neighbouring points."""
    cells = list(points[:1])
    for (x, y), (next_x, next_y) in pairwise(points):
        steps = max(abs(next_x - x), abs(next_y - y), 1)
        cells += [
            (round(x + (next_x - x) * i / steps), round(y + (next_y - y) * i / steps)) for i in range(1, steps + 1)
        ]
    return cells


def _draw_dots(dots: Sequence[tuple[int, int]], width: int, height: int) -> list[list[str]]:
    bits = [[0] * width for _ in range(height)]
    for x, y in dots:
        bits[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return [[chr(BRAILLE + value) if value else " " for value in row] for row in bits]


def _frame(
    cells: list[list[str]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    glyphs: Glyphs,
    labels: tuple[str, ...],
    x_label: str,
) -> str:
    top, bottom = f"{y_range[1]:.3g}", f"{y_range[0]:.3g}"
    margin = max(len(top), len(bottom)) + 1
    lines = []
    names = [top, *[""] * (len(cells) - 2), bottom][: len(cells)]
    for name, row in zip(names, cells, strict=True):
        lines.append(name.rjust(margin) + " " + (glyphs.tick if name else glyphs.vertical) + "".join(row).rstrip())
    blank = " " * (margin + 1)
    lines.append(blank + glyphs.corner + glyphs.horizontal * len(cells[0]))
    left, right = f"{x_range[0]:g}", f"{x_range[1]:g} {x_label}"
    lines.append(blank + " " + left + right.rjust(len(cells[0]) - len(left)))
    legend = "   ".join(f"{glyph} {label}" for glyph, label in zip((glyphs.line, glyphs.mark), labels, strict=False))
    lines.append(blank + " " + legend)
    return "\n".join(lines)
