"""Losses and gradients that are not finite: found when the numbers are read, handled by the user's policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from paceline.core.journal import UpdateRow

logger = logging.getLogger(__name__)

MAX_REWINDS = 20
MAX_REWINDS_IN_A_ROW = 5  # with no good update between: more bad samples than that hardly lie side by side


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm was not finite, and the policy was to stop. The message names update and samples."""


def find_bad(rows: Sequence[UpdateRow]) -> list[UpdateRow]:
    """The updates whose loss or gradient norm is infinite or NaN."""
    finite = math.isfinite
    return [row for row in rows if row.is_counted and not (finite(row.loss) and finite(row.grad_norm))]


def describe(row: UpdateRow) -> str:
    """One update in words."""
    return (
        f"step {row.step} (loss {row.loss}, gradient norm {row.grad_norm}): epoch {row.epoch}, "
        f"samples {row.first} to {row.first + row.num_samples - 1} in the epoch's order"
    )


class NonFiniteGuard:
    """Applies a policy to the updates of a run.

    Args:
        policy: `warn`: say it and go on. `skip`: the engine did not apply such updates; say how many. `raise`: stop.
            `rollback`: the loop rewinds to the last good state and leaves the samples out.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.num_rewinds = 0
        self._num_in_a_row = 0
        self._last_step = -1  # that was rewound before

    def find(self, rows: Sequence[UpdateRow]) -> UpdateRow | None:
        """Look at updates just read.

        Returns:
            The first bad one where the loop is to rewind before it, else None.

        Raises:
            NonFiniteError: the policy is `raise`, or rewinding did not help: `MAX_REWINDS` times, or
                `MAX_REWINDS_IN_A_ROW` times with no good update between.
        """
        bad = find_bad(rows)
        if not bad:
            return None
        if self.policy == "raise":
            raise NonFiniteError(
                f"Not finite at {describe(bad[0])}. nonfinite_policy='rollback' leaves such samples out, 'skip' such "
                "updates; a lower learning_rate, more warmup_steps or bf16 instead of fp16 are the usual cures."
            )
        done = {"skip": "not applied", "warn": "applied", "rollback": "rewound"}[self.policy]
        logger.warning("%d of %d updates were not finite (%s); first %s.", len(bad), len(rows), done, describe(bad[0]))
        if self.policy != "rollback":
            return None
        self.num_rewinds += 1
        if self.num_rewinds > MAX_REWINDS:
            raise NonFiniteError(f"Rewound {MAX_REWINDS} times, and still not finite at {describe(bad[0])}.")
        self._num_in_a_row = self._num_in_a_row + 1 if bad[0].step <= self._last_step else 1
        self._last_step = bad[0].step
        if self._num_in_a_row > MAX_REWINDS_IN_A_ROW:
            raise NonFiniteError(
                f"Rewound {MAX_REWINDS_IN_A_ROW} times with no good update between, and still not finite at "
                f"{describe(bad[0])}. It is hardly the samples: the model may hold what is not finite outside its "
                "parameters and buffers, which are all that is rewound, or the learning_rate is too high."
            )
        return bad[0]
