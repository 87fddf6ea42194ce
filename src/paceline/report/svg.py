"""Draws a chart as SVG. The page's script redraws the chart when a reader zooms in."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from paceline.report.curves import Chart, Series
from paceline.report.markup import escape

WIDTH, HEIGHT = 640, 260  # size of the view box
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 30  # margins
_NUM_TICKS = 5
LARGEST = sys.float_info.max


def draw(chart: Chart, name: str) -> str:
    """Returns the SVG element of a chart.

    Args:
        chart: the chart.
        name: the element's id.
    """
    x_low, x_high = limits([each.steps for each in chart.series], is_padded=False)
    y_low, y_high = y_limits(chart)
    lines = [_line(each, (x_low, x_high), (y_low, y_high)) for each in chart.series]
    marks = [_tick(value, x_low, x_high, is_x=True) for value in ticks(x_low, x_high, whole=True)]
    marks += [_tick(value, y_low, y_high, is_x=False) for value in ticks(y_low, y_high)]
    box = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    return (
        f'<svg id="{escape(name)}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(describe(chart))}">'
        f'<clipPath id="{escape(name)}-clip"><rect {box}/></clipPath>'
        f'<rect class="plot" {box}/><g class="ticks">{"".join(marks)}</g>'
        f'<g class="lines" clip-path="url(#{escape(name)}-clip)">{"".join(lines)}</g></svg>'
    )


def describe(chart: Chart) -> str:
    """Describes a chart in words, for a screen reader."""
    parts = []
    for each in chart.series:
        if not each.is_faint:
            values = each.heights
            first, last = number(values[0]), number(values[-1])
            low, high = number(values.min()), number(values.max())
            where = f"from step {each.steps[0]:,.0f} to {each.steps[-1]:,.0f}"
            parts.append(f"{each.label} {where}: first {first}, last {last}, least {low}, greatest {high}")
    return f"{chart.title}. " + "; ".join(parts)


def y_limits(chart: Chart) -> tuple[float, float]:
    """Returns the range of a chart's values; of areas, from 0 to the highest one."""
    if chart.series[0].bases is not None:
        return 0.0, max(float(each.values.max()) for each in chart.series) or 1.0
    return limits([each.values for each in chart.series])


def limits(arrays: list[np.ndarray], is_padded: bool = True) -> tuple[float, float]:
    """Returns the range of all values, 5 % wider on each side if padded. The range is never empty."""
    low = min(float(array.min()) for array in arrays)
    high = max(float(array.max()) for array in arrays)
    if low == high:
        margin = abs(low) / 2 or 0.5
    else:
        margin = (high / 20 - low / 20) if is_padded else 0.0  # the difference itself may overflow
    return max(low - margin, -LARGEST), min(high + margin, LARGEST)


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Returns about five round numbers between two limits.

    Args:
        low: the lower limit.
        high: the upper limit.
        whole: True allows whole numbers only.
    """
    span = high - low
    rough = span / _NUM_TICKS
    if not 1e-300 < rough < math.inf:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def number(value: float) -> str:
    """Formats a number with four significant digits; a whole one from 10,000 on, below 1e15, with all of them."""
    is_written_out = 1e4 <= abs(value) < 1e15 and float(value).is_integer()
    return f"{value:,.0f}" if is_written_out else f"{value:.4g}"


def place(values: Any, low: float, high: float, is_x: bool) -> Any:
    """Returns the coordinates of values in the view box: of a number, or of an array of any shape."""
    width = high / 2 - low / 2  # halves, because the difference may overflow
    share = (values / 2 - low / 2) / width if width else values * 0 + 0.5  # 0 for denormal numbers
    if is_x:
        return LEFT + share * (WIDTH - LEFT - RIGHT)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _tick(value: float, low: float, high: float, is_x: bool) -> str:
    at = place(value, low, high, is_x)
    if is_x:
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        anchor = "end" if at > WIDTH - 30 else "middle"  # the last number is not cut
        right = WIDTH - 2 if anchor == "end" else at
        return f'{line}<text x="{right:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{number(value)}</text>'
    line = f'<line y1="{at:.1f}" y2="{at:.1f}" x1="{LEFT}" x2="{WIDTH - RIGHT}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>'


def _line(series: Series, x_limits: tuple[float, float], y_limits: tuple[float, float]) -> str:
    across = place(series.steps, *x_limits, is_x=True)
    down = place(series.values, *y_limits, is_x=False)
    points = [f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True)]
    if series.bases is not None:
        below = place(series.bases, *y_limits, is_x=False)
        points += [f"{x:.1f},{y:.1f}" for x, y in zip(across[::-1].tolist(), below[::-1].tolist(), strict=True)]
        return f'<polygon class="{series.style}" points="{" ".join(points)}"/>'
    if len(points) == 1:  # a line with one point would be invisible
        return f'<circle class="{series.style}" cx="{across[0]:.1f}" cy="{down[0]:.1f}" r="3"/>'
    return f'<polyline class="{series.style}" points="{" ".join(points)}"/>'
