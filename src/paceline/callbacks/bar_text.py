"""Lays out the numbers of a training on a terminal: its position beside the bar, its measurements on a line below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.terminal import sparkline, width_of

LEAST_CURVE, MOST_CURVE = 4, 40  # columns of the loss curve
LEAST_BAR = 10  # columns; a narrower line shows no bar
INDENT = "  "  # of the second line


def position_line(count: str, times: str, texts: Mapping[str, str], columns: int) -> str:
    """Returns the part of the first line after the count, as a format string with `{bar}` at the place of the bar.

    Args:
        count: title and count, such as `"train: 3/10"`.
        times: elapsed and remaining time.
        texts: the other texts by name, the most important first, in the order of the line; those that do not fit are
            left out.
        columns: columns of the line.
    """
    room = columns - width_of(f"{count} [{times}]")
    kept = _fitting(texts, room)
    inner = ", ".join([times, *kept])
    room = columns - width_of(f"{count} [{inner}]")
    bar = " |{bar}|" if room >= LEAST_BAR + len(" ||") else ""
    return f"{bar} [{inner.replace('{', '{{').replace('}', '}}')}]"


def value_line(texts: Mapping[str, str], losses: Sequence[float], columns: int, is_unicode: bool = True) -> str:
    """Returns the second line; an empty one without texts.

    Args:
        texts: the texts by name, the most important first, in the order of the line; those that do not fit are left
            out.
        losses: the logged losses, drawn as a curve after the text "loss", as long as there is room.
        columns: columns of the line.
        is_unicode: True draws the curve in block characters.
    """
    kept = _fitting(texts, columns - len(INDENT) + len(", "))
    cells = min(columns - width_of(INDENT + ", ".join(kept)) - 1, MOST_CURVE)
    if texts.get("loss") in kept and cells >= LEAST_CURVE:
        kept[0] = f"{kept[0]} {sparkline(losses, cells, is_unicode)}".rstrip()
    return INDENT + ", ".join(kept) if kept else ""


def _fitting(texts: Mapping[str, str], room: int) -> list[str]:
    """Returns the texts that fit into a number of columns, each with a comma and a space before it."""
    kept = []
    for text in texts.values():
        needed = width_of(text) + len(", ")
        if text and needed <= room:
            kept.append(text)
            room -= needed
    return kept
