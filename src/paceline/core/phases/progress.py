"""The position of a run among its training phases, as the state of a callback."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.args import phases as options
from paceline.args.phases import Phase
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

STATE = "Phases"


class PhaseProgress(TrainerCallback):
    """Counts the steps of the phase in progress, watches its metric, and ends its last epoch.

    Args:
        phases: the phases of the run.

    Attributes:
        index: the phase in progress.
        began: optimizer steps of the run before it.
        last_step: the optimizer step after which it ends at the latest; None until the length of the run is known.
        is_ended: it has ended, and the next epoch begins the next one.
        starts: the optimizer's own count of its steps when each phase began, for frameworks whose optimizers have one
            count for all parameters; else empty.
    """

    state_key = STATE
    adds_callbacks = True

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases
        self.index = self.began = 0
        self.last_step: int | None = None
        self.is_ended = False
        self.starts: list[int] = []
        self._best: float | None = None
        self._num_stale = 0
        self._is_missed = False  # evaluations since the last step, none of which had the metric
        self._last_seen = -1  # step of the last evaluation with the metric

    @property
    def phase(self) -> Phase:
        """The phase in progress."""
        return self.phases[self.index]

    @property
    def is_last(self) -> bool:
        """True in the last phase."""
        return self.index == len(self.phases) - 1

    def begin(self, index: int, step: int) -> None:
        """Begins a phase after an optimizer step of the run."""
        self.index, self.began, self.is_ended = index, step, False
        self._best, self._num_stale, self._is_missed = None, 0, False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the epoch after the last step of the phase.

        Raises:
            ValueError: the evaluations since the last step did not have the metric that the phase waits for.
        """
        if self._is_missed:
            raise ValueError(
                f"phases[{self.phase.name!r}].until={self.phase.until!r}: the evaluation has no metric "
                f"{self.phase.end.metric!r}."
            )
        if self.last_step is not None and state.global_step >= self.last_step:
            self._end(state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the phase if its metric is reached, or has not improved for `patience` evaluations."""
        end = self.phase.end
        metrics: Mapping[str, float] = kwargs.get("metrics") or {}
        if not end.is_measured or self.is_ended or state.global_step == self.began:
            return
        name = end.metric if end.metric in metrics else f"eval_{end.metric}"
        self._is_missed = name not in metrics and self._last_seen != state.global_step
        if name not in metrics:
            return
        self._last_seen = state.global_step
        if self._is_over(float(metrics[name]), end.rises(args, self.phase.greater_is_better)):
            logger.info("Phase %s ends at step %d: %s is %g.", self.phase.name, state.global_step, name, metrics[name])
            self._end(state, control)

    def _is_over(self, value: float, rises: bool) -> bool:
        end = self.phase.end
        if end.kind == options.METRIC:
            return end.is_reached(value)
        if end.is_better(value, self._best, self.phase.min_delta, rises):
            self._best, self._num_stale = value, 0
            return False
        self._num_stale += 1
        return self._num_stale >= self.phase.patience

    def _end(self, state: TrainerState, control: TrainerControl) -> None:
        self.is_ended = True
        if not self.is_last:
            control.should_epoch_stop = True
        elif state.global_step < state.max_steps:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Returns the position for `trainer_state.json`, which other libraries read."""
        return {"args": {}, "attributes": self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position among the phases, the best value of the watched metric, and the evaluations since it."""
        return {
            "name": self.phase.name,
            "index": self.index,
            "began": self.began,
            "is_ended": self.is_ended,
            "best": self._best,
            "num_stale": self._num_stale,
            **({"starts": self.starts} if self.starts else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the position.

        Raises:
            ValueError: the run has no such phase.
        """
        index = state["index"]
        if not 0 <= index < len(self.phases) or self.phases[index].name != state["name"]:
            raise ValueError(
                f"phases: the checkpoint was written in phase {index + 1}, {state['name']!r}, which this run does not "
                f"have: its phases are {', '.join(phase.name for phase in self.phases)}."
            )
        self.begin(index, state["began"])
        self.is_ended, self._best, self._num_stale = state["is_ended"], state["best"], state["num_stale"]
        self.starts = list(state.get("starts") or ())
