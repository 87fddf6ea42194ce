"""The micro-batch size of a run with `auto_find_batch_size`: halved when memory runs out, doubled again later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.args.plan import Plan
from paceline.core.counts import is_count, shown

logger = logging.getLogger(__name__)

# the note of an out-of-memory that is not retried
PARTLY_APPLIED = (
    "auto_find_batch_size does not retry it: the optimizer was updating the parameters, and some of them may be "
    "updated already. Resume from the last checkpoint. Smaller micro-batches do not reduce the memory of this part of "
    "a step; optim='adafactor' or 'sgd' does, and with PyTorch optimizer_state_dtype='bfloat16' or "
    "optimizer_in_backward=True."
)
FIRST_WAIT = 100  # optimizer steps; a try that fails costs about one


def may_retry(error: BaseException, is_applying: bool) -> bool:
    """Returns True if a step that ran out of memory may be repeated; else adds a note with the reason to the error."""
    if is_applying:
        error.add_note(PARTLY_APPLIED)
    return not is_applying


class MicroBatchSize:
    """Decides the micro-batch size; the global batch size stays.

    After `wait` optimizer steps without an out-of-memory, the previous size is tried again. The wait is doubled if
    memory then runs out within it, and is the first one again otherwise.

    Args:
        plan: the plan with the original size.

    Attributes:
        plan: the plan with the current size.
        is_reduced: the current size is below the original one.
        is_watched: memory has run out in this run, so that steps are counted.
    """

    def __init__(self, plan: Plan) -> None:
        self.original = self.plan = plan
        self.wait = FIRST_WAIT
        self.num_good = 0  # optimizer steps since the size changed
        self.is_watched = False
        self._has_grown = False  # the last change was an increase

    @property
    def is_reduced(self) -> bool:
        return self.plan.micro_batch_size < self.original.micro_batch_size

    def shrink(self, error: Exception) -> None:
        """Halves the size after an out-of-memory.

        Raises:
            MemoryError: a micro-batch is one sample already.
        """
        if self.plan.micro_batch_size <= 1:
            raise MemoryError(
                "auto_find_batch_size: out of memory with one sample per micro-batch. Use a smaller model or "
                "shorter inputs, bf16=True, or activation_checkpointing=True."
            ) from error
        if self._has_grown:
            self.wait = 2 * self.wait if self.num_good < self.wait else FIRST_WAIT
        self.plan = self.plan.halved()
        self.is_watched, self.num_good, self._has_grown = True, 0, False
        logger.warning(
            "Out of memory: continuing with %d samples per micro-batch; the global batch size stays %d.",
            self.plan.micro_batch_size,
            self.plan.global_batch_size,
        )

    def count_step(self) -> bool:
        """Counts an optimizer step without an out-of-memory. Returns True if the size was increased."""
        self.num_good += 1
        if self.num_good < self.wait or not self.is_reduced:
            return False
        if self._has_grown:  # the size that was tried has lasted
            self.wait = FIRST_WAIT
        smaller, self.plan = self.plan, self._reduced_to(self.plan.micro_batch_size + 1)
        logger.info(
            "Trying %d samples per micro-batch after %d optimizer steps with %d; the global batch size stays %d.",
            self.plan.micro_batch_size,
            self.num_good,
            smaller.micro_batch_size,
            self.plan.global_batch_size,
        )
        self.num_good, self._has_grown = 0, True
        return True

    def _reduced_to(self, size: int) -> Plan:
        """Returns the plan, halved as often as its micro-batch size stays at least `size` samples."""
        plan = self.original
        while plan.micro_batch_size > 1 and (smaller := plan.halved()).micro_batch_size >= size:
            plan = smaller
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Returns the current size and the counts, in JSON types; empty if memory has not run out."""
        if not self.is_watched:
            return {}
        return {
            "size": self.plan.micro_batch_size,
            "wait": self.wait,
            "good_steps": self.num_good,
            "has_grown": self._has_grown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state; without `auto_find_batch_size`, the size stays the original one.

        Raises:
            ValueError: it is damaged.
        """
        if not state or not self.original.auto_find_batch_size:
            return
        size, wait, num_good = (state.get(name) for name in ("size", "wait", "good_steps"))
        if not (is_count(size) and size and is_count(wait) and wait and is_count(num_good)):
            raise ValueError(f"the micro-batch size cannot be {shown(dict(state))}")
        self.plan = self._reduced_to(min(size, self.original.micro_batch_size))
        self.wait, self.num_good, self._has_grown = wait, num_good, bool(state.get("has_grown"))
        self.is_watched = True
