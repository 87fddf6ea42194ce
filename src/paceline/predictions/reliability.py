"""Reliability of probabilities: the expected calibration error, a table by confidence, and a diagram."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.predictions.calibration import checked

Array = np.ndarray[Any, Any]


class Bin(NamedTuple):
    """Samples of similar confidence.

    Attributes:
        low, high: bounds of the confidence.
        num_samples: their number.
        confidence: their mean confidence; NaN without samples.
        accuracy: their share of right predictions; NaN without samples.
    """

    low: float
    high: float
    num_samples: int
    confidence: float
    accuracy: float


def reliability_table(probabilities: Array, labels: Array, num_bins: int = 15) -> list[Bin]:
    """Returns bins of equal width of the confidence in the predicted class, (low, high].

    Raises:
        ValueError: the arrays do not fit together, or the rows are no probabilities.
    """
    rows, classes = as_probabilities(probabilities, labels)
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins} is invalid: expected at least 1")
    confidence, is_right = rows.max(1), rows.argmax(1) == classes
    places = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    table = []
    for index in range(num_bins):
        own = places == index
        means = (float(confidence[own].mean()), float(is_right[own].mean())) if own.any() else (np.nan, np.nan)
        table.append(Bin(index / num_bins, (index + 1) / num_bins, int(own.sum()), *means))
    return table


def expected_calibration_error(probabilities: Array, labels: Array, num_bins: int = 15) -> float:
    """Returns the mean distance of accuracy from confidence over the bins, 0 to 1 (Naeini et al. 2015)."""
    table = [each for each in reliability_table(probabilities, labels, num_bins) if each.num_samples]
    total = sum(each.num_samples for each in table)
    return sum(each.num_samples * abs(each.accuracy - each.confidence) for each in table) / total


def as_probabilities(probabilities: Array, labels: Array) -> tuple[Array, Array]:
    """Returns probabilities and labels without the samples that are left out.

    Raises:
        ValueError: the arrays do not fit together, or the rows are no probabilities.
    """
    rows, classes = checked(probabilities, labels)
    check_probabilities(rows)
    return rows, classes


def check_probabilities(rows: Array) -> None:
    """Checks that each row of an array, `(samples, classes)`, is a distribution.

    Raises:
        ValueError: it is not.
    """
    are_rows = rows.ndim == 2 and np.isfinite(rows).all()
    if not are_rows or (rows.size and (rows.min() < -1e-6 or np.abs(rows.sum(1) - 1).max() > 1e-3)):
        raise ValueError("expected probabilities: rows from 0 to 1 with a sum of 1. Apply a softmax or a calibration.")


def write_diagram(table: list[Bin], path: str | Path, size: int = 320) -> Path:
    """Writes a reliability diagram as SVG: a bar for the accuracy of each bin, a line for perfect calibration."""
    margin, span = 40, size - 60
    left, bottom = margin, size - margin

    def bar(each: Bin) -> str:
        x, height = left + each.low * span, each.accuracy * span
        width = (each.high - each.low) * span
        title = f"{each.num_samples} samples: confidence {each.confidence:.3f}, accuracy {each.accuracy:.3f}"
        return (
            f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="#4477aa" '
            f'stroke="white"><title>{title}</title></rect>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        *[bar(each) for each in table if each.num_samples],
        f'<path d="M{left} {bottom}L{left + span} {bottom - span}" stroke="#aa3344" stroke-dasharray="4"/>',
        f'<path d="M{left} {bottom - span}V{bottom}H{left + span}" fill="none" stroke="black"/>',
        f'<text x="{left + span / 2}" y="{size - 10}" text-anchor="middle">confidence</text>',
        f'<text transform="translate(14 {bottom - span / 2}) rotate(-90)" text-anchor="middle">accuracy</text>',
        *[
            f'<text x="{left + at * span}" y="{bottom + 15}" text-anchor="middle">{at:g}</text>'
            f'<text x="{left - 5}" y="{bottom - at * span + 4}" text-anchor="end">{at:g}</text>'
            for at in (0.0, 0.5, 1.0)
        ],
        "</svg>",
    ]
    Path(path).write_text("\n".join(parts) + "\n", encoding="utf-8")
    return Path(path)
