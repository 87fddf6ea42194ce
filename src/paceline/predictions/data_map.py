"""Data maps: how a model learned each training sample, from the passes of training.

Confidence, variability and correctness of a sample over its presentations (Swayamdipta et al., 2020, arXiv:2009.10795),
forgetting events (Toneva et al., 2019, arXiv:1812.05159), and the mean margin between its target and the best other
class, which is low for wrong labels (area under the margin; Pleiss et al., 2020, arXiv:2001.10528).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SUMS = ("times", "confidence", "square", "loss", "margin", "correct", "forgotten", "last")
COLUMNS = (
    "sample",
    "times_seen",
    "confidence",
    "variability",
    "correctness",
    "loss",
    "margin",
    "forgetting_events",
)
COLOURS = ("#aa3344", "#ccbb44", "#4477aa")  # by correctness: never, sometimes, always
MOST_POINTS = 5000  # points in a picture


class DataMap:
    """Sums over the presentations of each sample, 64 bytes a sample.

    Args:
        num_samples: number of samples of the dataset.

    Attributes:
        sums: arrays `(num_samples,)` by the names in `SUMS`; `last` is 1 if the last presentation was right, 0 if it
            was wrong, -1 before the first.
    """

    def __init__(self, num_samples: int) -> None:
        self.sums: dict[str, Array] = {name: np.zeros(num_samples) for name in SUMS}
        self.sums["last"] -= 1

    def add(self, samples: Array, loss: Array, confidence: Array, margin: Array, correct: Array) -> None:
        """Adds presentations, in their order.

        Args:
            samples: `(n,)`, indices in the dataset.
            loss, confidence, margin: `(n,)`; the confidence is the probability of the target.
            correct: `(n,)`, 1 if the prediction was right, else 0.
        """
        if len(np.unique(samples)) < len(samples):  # a sample twice: its presentations are added one after the other
            half = len(samples) // 2
            for part in (slice(0, half), slice(half, None)):
                self.add(samples[part], loss[part], confidence[part], margin[part], correct[part])
            return
        sums = self.sums
        right = correct.astype(np.float64)
        confident = confidence.astype(np.float64)
        sums["times"][samples] += 1
        sums["confidence"][samples] += confident
        sums["square"][samples] += confident * confident
        sums["loss"][samples] += loss
        sums["margin"][samples] += margin
        sums["correct"][samples] += right
        sums["forgotten"][samples] += (sums["last"][samples] == 1) & (right == 0)
        sums["last"][samples] = right

    def columns(self) -> dict[str, Array]:
        """Returns the samples that were seen, an array `(num_seen,)` for each of `COLUMNS`.

        The variability is the standard deviation of the confidence, the correctness the share of right predictions.
        """
        seen = np.flatnonzero(self.sums["times"])
        own = {name: values[seen] for name, values in self.sums.items()}
        times = own["times"]
        confidence = own["confidence"] / times
        variance = np.maximum(own["square"] / times - confidence**2, 0)
        values = (
            seen,
            times.astype(int),
            confidence,
            np.sqrt(variance),
            own["correct"] / times,
            own["loss"] / times,
            own["margin"] / times,
            own["forgotten"].astype(int),
        )
        return dict(zip(COLUMNS, values, strict=True))

    def label_errors(self, number: int | None = None) -> list[int]:
        """Returns the samples whose labels are most likely wrong: those of the lowest mean margin first."""
        found = self.columns()
        order = np.argsort(found["margin"], kind="stable")
        return [int(sample) for sample in found["sample"][order][:number]]

    def rows(self, samples: list[int] | None = None) -> list[list[Any]]:
        """Returns a row of plain values in the order of `COLUMNS` for each sample; None: all that were seen."""
        found = self.columns()
        places = {int(sample): place for place, sample in enumerate(found["sample"])}
        chosen = list(places) if samples is None else samples
        return [[found[name][places[sample]].item() for name in COLUMNS] for sample in chosen]

    def write_table(self, path: Path) -> None:
        """Writes a CSV file with a row for each sample that was seen."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(
                [f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in self.rows()
            )

    def picture(self) -> tuple[Array, Array, Array]:
        """Returns variability, confidence and group (0 to 2, see `COLOURS`) of at most `MOST_POINTS` samples."""
        found = self.columns()
        step = -(-len(found["sample"]) // MOST_POINTS) or 1
        correctness = found["correctness"][::step]
        groups = np.where(correctness == 0, 0, np.where(correctness == 1, 2, 1))
        return found["variability"][::step], found["confidence"][::step], groups

    def write_map(self, path: Path, size: int = 420) -> None:
        """Writes the map as SVG: confidence over variability, coloured by correctness."""
        margin, span = 45, size - 65
        across, up, groups = self.picture()
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{size}" height="{size}" fill="white"/>',
        ]
        for x, y, group in zip(across, up, groups, strict=True):
            place = f'cx="{margin + 2 * x * span:.1f}" cy="{size - margin - y * span:.1f}"'
            lines.append(f'<circle {place} r="2.5" fill="{COLOURS[group]}" fill-opacity="0.5"/>')
        lines.append(f'<path d="M{margin} {size - margin - span}V{size - margin}h{span}" fill="none" stroke="black"/>')
        for at in (0.0, 0.5, 1.0):
            lines.append(
                f'<text x="{margin + at * span}" y="{size - margin + 15}" text-anchor="middle">{at / 2:g}</text>'
            )
            lines.append(f'<text x="{margin - 5}" y="{size - margin - at * span + 4}" text-anchor="end">{at:g}</text>')
        for group, name in enumerate(("never right", "sometimes", "always right")):
            lines.append(f'<text x="{margin + 10 + 110 * group}" y="14" fill="{COLOURS[group]}">&#9679; {name}</text>')
        lines.append(f'<text x="{margin + span / 2}" y="{size - 10}" text-anchor="middle">variability</text>')
        lines.append(
            f'<text transform="translate(14 {size - margin - span / 2}) rotate(-90)" text-anchor="middle">confidence'
            "</text>"
        )
        path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")

    def pixels(self, size: int = 420) -> Array:
        """Returns the map as an image `(size, size, 3)` of 8-bit colours, for what takes no SVG."""
        image = np.full((size, size, 3), 255, dtype=np.uint8)
        across, up, groups = self.picture()
        colours = np.array([[int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in COLOURS], dtype=np.uint8)
        columns = np.clip((2 * across * (size - 5)).astype(int), 0, size - 5)
        rows = np.clip(((1 - up) * (size - 5)).astype(int), 0, size - 5)
        for down in range(4):
            for right in range(4):
                image[rows + down, columns + right] = colours[groups]
        return image

    def state_dict(self) -> dict[str, Array]:
        """Returns a copy of the sums."""
        return {name: values.copy() for name, values in self.sums.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores the sums.

        Raises:
            ValueError: they are of a dataset with another number of samples.
        """
        num_samples = len(self.sums["times"])
        for name in SUMS:
            if state[name].shape != (num_samples,):
                raise ValueError(f"the data map is of {len(state[name])} samples, and the dataset has {num_samples}")
        self.sums = {name: np.array(state[name], dtype=np.float64) for name in SUMS}
