"""The updates since the last log, summed up: what the log says of them, whatever their number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.journal import NOT_COMPUTED, UpdateRow


@dataclass
class UpdateSummary:
    """Running sums over updates; JSON-able, for a checkpoint between two logs.

    Attributes:
        num_updates: all of them.
        num_counted: those that have a loss.
        loss_sum: over those.
        num_finite: those whose loss is finite.
        finite_sum: over those.
        grad_norm: of the last update, before clipping; `NOT_COMPUTED` where it was not.
        learning_rate: of the last update.
    """

    num_updates: int = 0
    num_counted: int = 0
    loss_sum: float = 0.0
    num_finite: int = 0
    finite_sum: float = 0.0
    grad_norm: float = NOT_COMPUTED
    learning_rate: float = 0.0

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> UpdateSummary:
        """From what `dataclasses.asdict` made.

        Raises: TypeError, for anything but numbers under the names of this class.
        """
        if not all(type(value) in (int, float) for value in saved.values()):
            raise TypeError("the summary of updates since the last log holds something else than numbers")
        return cls(**saved)

    def add(self, rows: Sequence[UpdateRow]) -> None:
        """Take in updates, in their order."""
        for row in rows:
            if row.is_counted:
                self.num_counted += 1
                self.loss_sum += row.loss
                if math.isfinite(row.loss):
                    self.num_finite += 1
                    self.finite_sum += row.loss
        if rows:
            self.num_updates += len(rows)
            self.grad_norm, self.learning_rate = rows[-1].grad_norm, rows[-1].learning_rate

    def mean_loss(self, leave_out_non_finite: bool) -> tuple[float, int] | None:
        """The mean loss and the number of updates it is a mean of; None when no update has a loss.

        Args:
            leave_out_non_finite: take the mean of the finite losses, where there are any.
        """
        if leave_out_non_finite and self.num_finite:
            return self.finite_sum / self.num_finite, self.num_finite
        return (self.loss_sum / self.num_counted, self.num_counted) if self.num_counted else None
