"""Draws the losses of a run as a small chart for notebooks, which grows while the run trains."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

WIDTH, HEIGHT, MARGIN = 360, 90, 4  # pixels
MOST_POINTS = 512

Points = Sequence[tuple[float, float]]


class LossCurve:
    """The losses of training and validation over optimizer steps.

    Attributes:
        training: the points of the training loss; beyond `MOST_POINTS`, every second one is left out.
        validation: the points of the validation loss, in the same way.
    """

    def __init__(self) -> None:
        self.training: list[tuple[float, float]] = []
        self.validation: list[tuple[float, float]] = []

    def add(self, step: float, loss: object, is_validation: bool = False) -> None:
        """Adds a point; a loss that is not a finite number is left out."""
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            return
        points = self.validation if is_validation else self.training
        points.append((step, float(loss)))
        if len(points) > MOST_POINTS:
            del points[1:-1:2]

    def render(self) -> str:
        """Returns the chart as an SVG element with a line of text; empty before a series has two points."""
        if max(len(self.training), len(self.validation)) < 2:
            return ""
        everything = [*self.training, *self.validation]
        box = (*_range(step for step, _ in everything), *_range(loss for _, loss in everything))
        lines = _line(self.training, box, "") + _line(self.validation, box, " stroke-dasharray='4 3'")
        series = (("training loss", self.training), ("validation loss (dashed)", self.validation))
        texts = [
            f"{name} {points[-1][1]:.4g}, least {min(y for _, y in points):.4g}" for name, points in series if points
        ]
        label = html.escape(f"Steps {box[0]:,.0f} to {box[1]:,.0f}: {'; '.join(texts)}")
        return (
            f"<div><svg role='img' aria-label='{label}' width='{WIDTH}' height='{HEIGHT}' fill='none' "
            f"stroke='currentColor' stroke-width='1.5'>{lines}</svg><br><small>{label}</small></div>"
        )


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def _line(points: Points, box: tuple[float, float, float, float], style: str) -> str:
    """Returns a polyline; one point is a short stroke."""
    if not points:
        return ""
    left, right, low, high = box
    across = (WIDTH - 2 * MARGIN) / ((right - left) or 1)
    down = (HEIGHT - 2 * MARGIN) / ((high - low) or 1)
    places = [f"{MARGIN + (x - left) * across:.1f},{MARGIN + (high - y) * down:.1f}" for x, y in points]
    if len(places) == 1:
        places.append(f"{float(places[0].split(',')[0]) - 3:.1f},{places[0].split(',')[1]}")
    return f"<polyline points='{' '.join(places)}'{style}/>"
