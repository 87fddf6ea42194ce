"""The session of a run with training phases, as far as it is the same for all frameworks.

A phase differs from the one before it in the parameters that are trained, in the optimizer's settings and in the data.
It is one run nevertheless: one loop, one log, one optimizer. The last epoch of a phase ends with it, and the next phase
begins before the next epoch. The position among the phases is the state of a callback, so that a checkpoint has it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.args.phases import Phase
from paceline.args.plan import Plan
from paceline.core.contracts import Hooks, Notifying
from paceline.core.loop import Loop
from paceline.core.outputs import TrainOutput
from paceline.core.phases.lengths import PhaseLengths
from paceline.core.phases.objects import PhaseCallbacks, loaded
from paceline.core.phases.progress import STATE, PhaseProgress
from paceline.core.session import FacadeType, RunType, Session

logger = logging.getLogger(__name__)


class PhasedSession(Session[RunType, FacadeType]):
    """The base of the sessions with phases; it precedes the session of the framework among their bases.

    Attributes:
        progress: the position among the phases; None outside of a run.
        lengths: optimizer steps of the phases, once the data is open.
        max_steps: optimizer steps of the run; 0 until they are known.
        own_loss: the loss function that was given to the Trainer.
        changes_loss: a phase has another one.
        plan: of the data of the phase in progress.
    """

    progress: PhaseProgress | None = None
    phases: Sequence[Phase] = ()
    max_steps = 0
    changes_loss = False
    own_loss: Callable[..., Any] | None
    lengths: PhaseLengths
    callbacks: PhaseCallbacks
    optimizer_phases: Any = None
    feed: Any
    plan: Plan
    loop: Loop

    def train(
        self, folder: Path, resume: str | bool | None, trial: object = None, ignore_keys: list[str] | None = None
    ) -> TrainOutput:
        try:
            return super().train(folder, resume, trial, ignore_keys)
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the phases: loss, optimizer and callbacks are as before the run."""
        progress, self.progress = self.progress, None
        if progress is None:
            return
        self.callbacks.remove()
        self.callback_handler.remove_callback(progress)
        if self.optimizer_phases is not None:
            self.optimizer_phases.end()
        if self.changes_loss:
            self.use_loss(self.own_loss)
        self.state.phase = None

    # ---- before the first step

    def load_phases(self) -> None:
        """Reads the phases of the arguments, with the objects that they name."""
        self.phases = [loaded(phase) for phase in self.options.phases]
        self.changes_loss = any(phase.loss is not None for phase in self.phases)

    def start_phases(self, adapt: Callable[[list[Any]], list[Any]] = list) -> None:
        """Begins to count the phases.

        Args:
            adapt: converts callbacks of another library.
        """
        facade: Any = self.facade
        self.own_loss = facade.compute_loss_func
        self.progress = PhaseProgress(self.phases)
        self.callbacks = PhaseCallbacks(self, self.phases, self.progress, adapt)
        self.callback_handler.add_callback(self.progress)

    @property
    def running_progress(self) -> PhaseProgress:
        """The progress of the run in progress."""
        assert self.progress is not None
        return self.progress

    def restore_progress(self, saved: Mapping[str, Any], checkpoint: Path | None) -> None:
        """Restores the position among the phases from the progress of a checkpoint, if there is one."""
        states = saved.get("callbacks") or {}
        if STATE in states:
            self.running_progress.load_state_dict(states[STATE])
        elif checkpoint is not None:
            logger.warning("%s was written without phases: the run goes on in its first phase.", checkpoint)

    @contextmanager
    def within_phase(self, index: int) -> Iterator[None]:
        """Gives the facade the arguments and the data of a phase, while entered."""
        facade: Any = self.facade
        phase = self.phases[index]
        before = self.args, facade.train_dataset, facade.data_collator
        changes: dict[str, Any] = {**phase.options(), "phases": None}
        if self.max_steps:
            changes["max_steps"] = self.max_steps
        self.args = self.arguments_of(phase, changes)
        if phase.train_dataset is not None:
            facade.train_dataset = phase.train_dataset
        if phase.data_collator is not None:
            facade.data_collator = phase.data_collator
        try:
            yield
        finally:
            self.args, facade.train_dataset, facade.data_collator = before

    def find_lengths(self) -> None:
        """Finds the optimizer steps of the run, and of an epoch of each phase."""
        self.max_steps = 0
        self.lengths = PhaseLengths(
            self.phases,
            self.epoch_lengths(),
            max_steps=self.options.max_steps,
            num_train_epochs=self.options.num_train_epochs,
            rises=lambda phase: phase.end.rises(self.options, phase.greater_is_better),
        )
        self.max_steps = self.lengths.max_steps

    def check_schedules(self) -> None:
        """Checks the schedule of each phase before the first step.

        Raises:
            ValueError: its settings are invalid.
        """
        for index, length in enumerate(self.lengths.longest()):
            try:
                self.try_schedule(index, length)
            except (TypeError, ValueError, KeyError, ArithmeticError) as error:
                raise ValueError(
                    f"phases[{self.phases[index].name!r}]: the schedule of the learning rate (lr_scheduler_type, "
                    f"lr_scheduler_kwargs, warmup_steps) is invalid: {error}"
                ) from error

    def join_phase(self, index: int) -> None:
        """Adds the callbacks and the loss of the phase that the run starts in."""
        self.callbacks.add(index)
        if self.changes_loss:
            self.use_loss(self.phases[index].loss or self.own_loss)
        self.state.phase = self.phases[index].name

    def make_loop(self, run: RunType, hooks: Hooks, saves: Notifying) -> Loop:
        self.loop = super().make_loop(run, hooks, saves)
        return self.loop

    # ---- from phase to phase

    def advance_phase(self) -> None:
        """Begins the next phase before an epoch, if the one in progress has ended."""
        progress, feed = self.running_progress, self.feed
        is_within = feed.is_restored and feed.consumed > 0  # resumed in the last epoch of a phase, which must end first
        if progress.is_ended and not is_within and not progress.is_last:
            self.begin_phase(progress.index + 1)

    def begin_phase(self, index: int) -> None:
        """Begins a phase: the data, the loss, what is trained, the optimizer's settings, the callbacks."""
        progress, state = self.running_progress, self.state
        self.callbacks.end()
        progress.begin(index, state.global_step)
        progress.last_step = self.lengths.last_step(index, progress.began)
        if self.phases[index].changes_data or self.phases[index - 1].changes_data:
            self.replace_data(index)
        if self.changes_loss:
            self.use_loss(self.phases[index].loss or self.own_loss)
        self.begin_training(index)
        state.phase = progress.phase.name
        self.callbacks.begin(index)
        logger.info(
            "Phase %s begins after step %d: %s parameters are trained, at a learning rate of up to %g.",
            progress.phase.name,
            state.global_step,
            f"{self.count_trained(index):,}",
            self.current_rate(),
        )

    # ---- of each framework

    @abstractmethod
    def arguments_of(self, phase: Phase, changes: Mapping[str, Any]) -> Any:
        """Returns the arguments of a phase: those of the run with these changes."""

    @abstractmethod
    def epoch_lengths(self) -> list[int | None]:
        """Returns the optimizer steps in an epoch of each phase; None if its data has no length."""

    @abstractmethod
    def try_schedule(self, index: int, length: int) -> None:
        """Makes the schedule of a phase of `length` optimizer steps, to see whether its settings are valid."""

    @abstractmethod
    def begin_training(self, index: int) -> None:
        """Begins to train the parameters of a phase, with its settings of the optimizer."""

    @abstractmethod
    def replace_data(self, index: int) -> None:
        """Opens the data of a phase, which the next epoch reads."""

    @abstractmethod
    def use_loss(self, function: Callable[..., Any] | None) -> None:
        """Computes the loss by another function; None: the model's own loss."""

    @abstractmethod
    def count_trained(self, index: int) -> int:
        """Returns the number of parameters that a phase trains."""

    @abstractmethod
    def current_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""
