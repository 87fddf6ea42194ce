"""Running summary of the optimizer steps since the last log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.counts import is_count
from paceline.core.journal import NOT_COMPUTED, UpdateRow


@dataclass
class UpdateSummary:
    """Running sums over optimizer steps; JSON-serialisable, for a checkpoint between two logs.

    Attributes:
        num_updates: all steps.
        num_counted: steps that have a loss.
        loss_sum: the sum of their losses.
        num_finite: steps whose loss is finite.
        finite_sum: the sum of their losses.
        grad_norm: the last step's gradient norm before clipping; `NOT_COMPUTED` if it was not computed.
        learning_rate: the last step's learning rate.
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
        """Builds a summary from the result of `dataclasses.asdict`.

        Raises: TypeError, for unknown names or values that are not numbers.
        """
        counts = {name: value for name, value in saved.items() if name.startswith("num_")}
        others = (value for name, value in saved.items() if name not in counts)
        if not all(map(is_count, counts.values())) or not all(type(each) in (int, float) for each in others):
            raise TypeError("the summary of steps since the last log holds values that are not numbers")
        values: dict[str, Any] = {name: value if name in counts else float(value) for name, value in saved.items()}
        return cls(**values)

    def add(self, rows: Sequence[UpdateRow]) -> None:
        """Adds optimizer steps in their order."""
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
        """Returns the mean loss and the number of steps it covers; None if no step has a loss.

        Args:
            leave_out_non_finite: take the mean of the finite losses if there are any.
        """
        if leave_out_non_finite and self.num_finite:
            return self.finite_sum / self.num_finite, self.num_finite
        return (self.loss_sum / self.num_counted, self.num_counted) if self.num_counted else None
