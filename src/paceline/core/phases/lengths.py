"""The lengths of training phases and of their run, in optimizer steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.args import phases as options
from paceline.args.phases import Phase
from paceline.args.plan import Plan


class PhaseLengths:
    """Computes when each phase ends, and when the run does.

    Args:
        phases: the phases of the run.
        epochs: optimizer steps in an epoch of each phase; None if its data has no length.
        max_steps, num_train_epochs: as in the arguments; 0 or less: the phases or the epochs determine the length.
        rises: True if larger values of a phase's metric are better.

    Attributes:
        max_steps: optimizer steps of the run.

    Raises:
        ValueError: the length of the run is unknown, or a phase would begin after it.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        epochs: Sequence[int | None],
        *,
        max_steps: int,
        num_train_epochs: float,
        rises: Callable[[Phase], bool],
    ) -> None:
        self.phases, self.epochs, self._rises = phases, epochs, rises
        self.max_steps = self._run_length(max_steps, num_train_epochs)

    def _run_length(self, max_steps: int, num_train_epochs: float) -> int:
        last = self.phases[-1].end.kind
        if max_steps > 0:
            length: Any = max_steps
        elif last in (options.STEPS, options.OWN_STEPS, options.OWN_EPOCHS):
            length = self._ends(math.inf)[-1]
        elif self.epochs[0] is None:
            raise ValueError("phases: the training data has no length: set max_steps.")
        else:
            length = math.ceil(round(num_train_epochs * self.epochs[0], 6))
        began = 0
        for phase, end in zip(self.phases, self._ends(length), strict=True):
            if began >= length or end > length or end <= began:
                raise ValueError(
                    f"phases[{phase.name!r}].until={phase.until!r}: the phase would take the optimizer steps "
                    f"{began + 1} to {end}, and the run has {length}: change until, max_steps or num_train_epochs."
                )
            began = end if not phase.end.is_measured else began
        return int(length)

    def _ends(self, length: float) -> list[Any]:
        """Returns the last optimizer step of each phase, the latest possible one if a metric ends it."""
        ends: list[Any] = []
        began = 0
        for index in range(len(self.phases)):
            began = self._end_of(index, began, length)
            ends.append(began)
        return ends

    def _end_of(self, index: int, began: int, length: float) -> Any:
        """Returns the last optimizer step of a phase that begins after `began` steps of `length`."""
        phase = self.phases[index]
        end, epoch = phase.end, self.epochs[index]
        if end.kind == options.OWN_EPOCHS and epoch is None:
            raise ValueError(
                f"phases[{phase.name!r}].until={phase.until!r}: the training data has no length: count steps instead."
            )
        own = end.number if epoch is None else end.number * epoch
        return {
            options.STEPS: lambda: int(end.number),
            options.FRACTION: lambda: round(end.number * length),
            options.OWN_STEPS: lambda: began + int(end.number),
            options.OWN_EPOCHS: lambda: began + math.ceil(round(own, 6)),
        }.get(end.kind, lambda: length if phase.max_steps is None else min(began + phase.max_steps, length))()

    def last_step(self, index: int, began: int) -> int:
        """Returns the last possible optimizer step of a phase that begins after `began` steps."""
        return min(int(self._end_of(index, began, self.max_steps)), self.max_steps)

    def longest(self) -> list[int]:
        """Returns the largest possible number of optimizer steps of each phase, at least 1."""
        found, began = [], 0
        for phase, end in zip(self.phases, self._ends(self.max_steps), strict=True):
            found.append(max(end - began, 1))
            began = end if not phase.end.is_measured else began
        return found

    def with_notes(self, plan: Plan) -> Plan:
        """Returns a plan with a note for each phase, and the number of epochs of all phases."""
        notes, began, num_epochs = [], 0, 0
        is_open = False  # a metric decides when an earlier phase ends
        for index, (phase, end) in enumerate(zip(self.phases, self._ends(self.max_steps), strict=True)):
            begins = "from the end of the phase before" if is_open else f"steps {began + 1:,}"
            is_open = is_open or phase.end.is_measured
            frozen = f", freezes {', '.join(phase.freeze)}" if phase.freeze else ""
            latest = " at the latest" if is_open and end < self.max_steps else ""
            notes.append(f"phase {phase.name}: {begins} to {end:,}{latest}{self._condition_of(phase)}{frozen}")
            epoch = self.epochs[index]
            # a phase that ends early leaves steps to those after it
            num_epochs += sys.maxsize if epoch is None else math.ceil((self.max_steps - began) / epoch)
            began = began if phase.end.is_measured else end
        return replace(plan, notes=(*plan.notes, *notes), num_epochs=min(num_epochs, sys.maxsize))

    def _condition_of(self, phase: Phase) -> str:
        """Returns the metric that a phase waits for, in parentheses; empty if it waits for none."""
        if not phase.end.is_measured:
            return ""
        if phase.end.kind != options.PLATEAU:
            return f" (until {phase.until})"
        return f" (until {phase.until}, {'maximized' if self._rises(phase) else 'minimized'})"
