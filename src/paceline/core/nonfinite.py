"""Non-finite losses and gradients: detected when metrics are read, handled by the user's policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from paceline.core.journal import UpdateRow

logger = logging.getLogger(__name__)

MAX_REWINDS = 20
MAX_REWINDS_IN_A_ROW = 5  # with no good step between: more consecutive bad samples are unlikely


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm was not finite and the policy was to stop. The message names the step and its samples."""


def find_bad(rows: Sequence[UpdateRow]) -> list[UpdateRow]:
    """Returns the optimizer steps whose loss or gradient norm is infinite or NaN."""
    finite = math.isfinite
    return [row for row in rows if row.is_counted and not (finite(row.loss) and finite(row.grad_norm))]


def describe(row: UpdateRow) -> str:
    """Describes one optimizer step for messages."""
    return (
        f"step {row.step} (loss {row.loss}, gradient norm {row.grad_norm}): epoch {row.epoch}, "
        f"samples {row.first} to {row.first + row.num_samples - 1} in the epoch's order"
    )


class NonFiniteGuard:
    """Applies a policy for non-finite values to the optimizer steps of a run.

    Args:
        policy: `warn` logs a warning. `skip` logs the number of steps that the engine did not apply. `raise` stops.
            `rollback` rewinds to the last good state and skips the samples.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.num_rewinds = 0
        self._num_in_a_row = 0
        self._last_step = -1  # the step of the last rewind

    def find(self, rows: Sequence[UpdateRow]) -> UpdateRow | None:
        """Checks the optimizer steps just read.

        Returns:
            The first bad one if the loop must rewind before it, else None.

        Raises:
            NonFiniteError: the policy is `raise`, or rewinding did not help: `MAX_REWINDS` times, or
                `MAX_REWINDS_IN_A_ROW` times with no good step between.
        """
        bad = find_bad(rows)
        if not bad:
            return None
        if self.policy == "raise":
            raise NonFiniteError(
                f"Not finite at {describe(bad[0])}. nonfinite_policy='rollback' skips such samples, 'skip' such "
                "steps; a lower learning_rate, more warmup_steps or bf16 instead of fp16 are the usual cures."
            )
        done = {"skip": "not applied", "warn": "applied", "rollback": "rewound"}[self.policy]
        logger.warning("%d of %d steps were not finite (%s); first %s.", len(bad), len(rows), done, describe(bad[0]))
        if self.policy != "rollback":
            return None
        self.num_rewinds += 1
        if self.num_rewinds > MAX_REWINDS:
            raise NonFiniteError(f"Rewound {MAX_REWINDS} times, and still not finite at {describe(bad[0])}.")
        self._num_in_a_row = self._num_in_a_row + 1 if bad[0].step <= self._last_step else 1
        self._last_step = bad[0].step
        if self._num_in_a_row > MAX_REWINDS_IN_A_ROW:
            raise NonFiniteError(
                f"Rewound {MAX_REWINDS_IN_A_ROW} times with no good step between, and still not finite at "
                f"{describe(bad[0])}. The samples are hardly the cause: the model may hold non-finite values "
                "outside its parameters and buffers, which a rewind does not restore, or the learning_rate is too high."
            )
        return bad[0]
