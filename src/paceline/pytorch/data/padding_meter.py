"""Logs the padding ratio and useful tokens per second."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.ledger import training_seconds


class PaddingMeter:
    """Adds `pad_ratio` and `useful_tokens_per_second`, over all processes, to log rows if tokens were counted."""

    def __init__(self) -> None:
        self.useful = self.elements = 0
        self._useful_in_rows = self._elements_in_rows = 0
        self._seconds = 0.0

    def add(self, useful: int, elements: int) -> None:
        """Adds the counts of an optimizer step.

        Args:
            useful: tokens without padding.
            elements: tokens with padding.
        """
        self.useful += useful
        self.elements += elements

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a log row.

        Args:
            times: seconds by activity since the last row.
        """
        useful, elements = self.useful - self._useful_in_rows, self.elements - self._elements_in_rows
        self._useful_in_rows, self._elements_in_rows = self.useful, self.elements
        seconds = training_seconds(times)
        self._seconds += seconds
        if not elements or seconds <= 0:
            return {}
        return {
            "pad_ratio": round(1 - useful / elements, 4),
            "useful_tokens_per_second": round(useful / seconds, 1),
        }

    def describe(self) -> str:
        """Returns the padding of the whole run as a sentence; empty if nothing was counted."""
        if not self.elements or self._seconds <= 0:
            return ""
        padding, rate = 1 - self.useful / self.elements, self.useful / self._seconds
        return f"Padding {100 * padding:.1f} % of {self.elements:,} tokens; {rate:,.0f} useful tokens per second"
