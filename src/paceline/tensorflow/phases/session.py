"""The session of a TFTrainer with training phases: it begins each phase between two epochs.

As in PyTorch, the phases are one run: one loop, one log, one optimizer. When a phase begins, the optimizer step is
compiled again, for the variables that are trained, the loss and the schedule of the phase.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.args import phases as options
from paceline.args.errors import UnsupportedOption
from paceline.args.phases import Phase
from paceline.args.plan import Plan
from paceline.core.contracts import Hooks, Notifying
from paceline.core.ledger import Ledger
from paceline.core.loop import Loop
from paceline.core.outputs import TrainOutput
from paceline.core.phases.lengths import PhaseLengths
from paceline.core.phases.objects import PhaseCallbacks, loaded
from paceline.core.phases.progress import STATE, PhaseProgress
from paceline.core.session import Run
from paceline.tensorflow import session
from paceline.tensorflow.adapters import adapt_callbacks
from paceline.tensorflow.checkpoint.resume_state import read_progress, wrap_load_error
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.data.sources import Source
from paceline.tensorflow.engine import TFEngine, is_own
from paceline.tensorflow.framework import plain
from paceline.tensorflow.model_card import count_numbers
from paceline.tensorflow.optim import phased
from paceline.tensorflow.optim.choose import compiled_optimizer, described_schedule
from paceline.tensorflow.optim.schedules import StepSchedule

logger = logging.getLogger(__name__)

SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")


class PhasedSession(session.Session):
    """The session of a TFTrainer with `phases`."""

    progress: PhaseProgress | None = None
    phases: Sequence[Phase] = ()
    members: Sequence[phased.Member] = ()
    sources: dict[int, Source]  # the last source that has read a dataset, by the id of the dataset
    max_steps = 0
    changes_loss = False
    schedule: phased.PhasedSchedule | None = None
    optimizer_phases: phased.PhasedOptimizer | None = None
    lengths: PhaseLengths
    callbacks: PhaseCallbacks
    own_loss: Callable[..., Any] | None
    feed: TFFeed
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

    def start(self, trial: object) -> None:
        super().start(trial)
        if not self.has_own_optimizer and self.lr_scheduler is not None:
            raise UnsupportedOption(
                "phases with a learning-rate schedule of your own are not supported: set lr_scheduler_type of each "
                "phase, and leave optimizers=(..., schedule) out."
            )
        self.phases = [loaded(phase) for phase in self.options.phases]
        self.check_overrides()
        self.changes_loss = any(phase.loss is not None for phase in self.phases)
        self.own_loss = self.facade.compute_loss_func
        self.sources = {}
        self.members = phased.find_members(self.model, self.phases)
        self.progress = PhaseProgress(self.phases)
        self.callbacks = PhaseCallbacks(self, self.phases, self.progress, adapt_callbacks)
        self.callback_handler.add_callback(self.progress)

    def check_overrides(self) -> None:
        """Refuses methods of a subclass that would do what a phase is to do.

        Raises:
            UnsupportedOption: there is such a method; the message names it.
        """
        facade = self.facade
        for phase in self.phases:
            methods = {
                "get_train_tfdataset": (phase.changes_data, "data or a batch size of its own"),
                "run_model": (phase.loss is not None, "a loss of its own"),
                "apply_gradients": (bool(phase.freeze), "variables that it freezes"),
                "distributed_training_steps": (bool(phase.freeze), "variables that it freezes"),
            }
            for name, (is_affected, what) in methods.items():
                if is_affected and is_own(getattr(facade, name), name):
                    raise UnsupportedOption(
                        f"phases[{phase.name!r}] has {what}, and {name} is overridden, which decides that: leave one "
                        "of them out."
                    )

    @contextmanager
    def within_phase(self, index: int) -> Iterator[None]:
        """Gives the facade the arguments and the data of a phase, while entered."""
        facade, phase = self.facade, self.phases[index]
        before = self.args, facade.train_dataset, facade.data_collator
        changes: dict[str, Any] = {**phase.options(), "phases": None}
        if phase.learning_rate is not None:
            changes["learning_rate"] = phase.learning_rate
        if self.max_steps:
            changes["max_steps"] = self.max_steps
        self.args = changed(self.args, changes)
        if phase.train_dataset is not None:
            facade.train_dataset = phase.train_dataset
        if phase.data_collator is not None:
            facade.data_collator = phase.data_collator
        try:
            yield
        finally:
            self.args, facade.train_dataset, facade.data_collator = before

    @property
    def running_progress(self) -> PhaseProgress:
        """The progress of the run in progress."""
        assert self.progress is not None
        return self.progress

    def open_data(self, checkpoint: Path | None) -> tuple[TFFeed, Plan]:
        progress = self.running_progress
        saved = read_progress(checkpoint) if checkpoint is not None else {}
        states = saved.get("callbacks") or {}
        if STATE in states:
            with wrap_load_error(checkpoint):
                progress.load_state_dict(states[STATE])
            self.check_sizes(saved)
        elif checkpoint is not None:
            logger.warning("%s was written without phases: the run goes on in its first phase.", checkpoint)
        self.lengths = PhaseLengths(
            self.phases,
            self.epoch_lengths(),
            max_steps=self.options.max_steps,
            num_train_epochs=self.options.num_train_epochs,
            rises=lambda phase: phase.end.rises(self.options, phase.greater_is_better),
        )
        self.max_steps = self.lengths.max_steps
        self.check_schedules()
        progress.last_step = self.lengths.last_step(progress.index, progress.began)
        with self.within_phase(progress.index):
            self.feed, plan = super().open_data(checkpoint)
        self.feed.before_epoch = self.advance_phase
        self.plan = self.lengths.with_notes(plan)
        return self.feed, self.plan

    def check_sizes(self, saved: Mapping[str, Any]) -> None:
        """Refuses to resume with other batches if epochs are counted in steps of these.

        Raises:
            UnsupportedOption: the number of replicas, the batch size or the accumulation has changed.
        """
        counts_epochs = any(phase.end.kind == options.OWN_EPOCHS for phase in self.phases)
        if not counts_epochs and self.options.max_steps > 0:
            return
        before = {name: (saved.get("arguments") or {}).get(name) for name in SIZES}
        before["replicas"] = (saved.get("traces") or {}).get("num_replicas")
        now = {**{name: getattr(self.options, name) for name in SIZES}, "replicas": self.num_replicas}
        for name, value in now.items():
            if before[name] not in (None, value):
                raise UnsupportedOption(
                    f"The checkpoint was written with {name}={before[name]}, and now it is {value}: phases that count "
                    f"epochs are resumed with the same batches; set it to {before[name]}, or give the phases and the "
                    "run their length in steps."
                )

    def epoch_lengths(self) -> list[int | None]:
        """Returns the optimizer steps in an epoch of each phase; None if its data has no length."""
        found: list[int | None] = []
        shared: list[int | None] = []  # of the phases with the data and batch size of the arguments
        for index, phase in enumerate(self.phases):
            if phase.changes_data or not shared:
                with self.within_phase(index):
                    source = self.open_source()
                    accumulation = self.options.gradient_accumulation_steps
                length = None if source.num_batches is None else -(-source.num_batches // accumulation)
                if not phase.changes_data:
                    shared.append(length)
                found.append(length)
            else:
                found += shared
        return found

    def check_schedules(self) -> None:
        """Checks the schedule of each phase before the first step.

        Raises:
            ValueError: its settings are invalid.
        """
        for index, length in enumerate(self.lengths.longest()):
            try:
                self.schedule_of(index, length)
            except (TypeError, ValueError, KeyError, ArithmeticError) as error:
                raise ValueError(
                    f"phases[{self.phases[index].name!r}]: the schedule of the learning rate (lr_scheduler_type, "
                    f"lr_scheduler_kwargs, warmup_steps) is invalid: {error}"
                ) from error

    def schedule_of(self, index: int, length: int) -> StepSchedule:
        """Returns the schedule of a phase of `length` optimizer steps, counted from its start."""
        with self.within_phase(index):
            args = self.options
            found = described_schedule(
                str(args.lr_scheduler_type),
                args.learning_rate,
                dict(args.lr_scheduler_kwargs or {}),
                num_training_steps=length,
                warmup_steps=args.get_warmup_steps,
                power=args.poly_power,
            )
        assert isinstance(found, StepSchedule)  # those that follow a metric are refused by the arguments
        return found

    def restore_position(self, feed: TFFeed, plan: Plan, checkpoint: Path) -> Plan:
        with self.within_phase(self.running_progress.index):
            return super().restore_position(feed, plan, checkpoint)

    # ---- optimizer and engine

    def optimized_variables(self) -> list[Any]:
        return [member.variable for member in self.members if any(member.is_trained)]

    def prepare_optimizer(self, plan: Plan) -> None:
        before, decay = self.args, max((phase.weight_decay or 0.0 for phase in self.phases), default=0.0)
        is_given = compiled_optimizer(self.model) is not None or not (self.optimizer is None or self.has_own_optimizer)
        # variables without decay are named when the optimizer is made
        if decay and not self.options.weight_decay and not is_given:
            self.args = changed(before, {"weight_decay": decay})
        try:
            super().prepare_optimizer(plan)
        finally:
            self.args = before
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        self.check_optimizer(inner)
        base = self.options.weight_decay if self.has_own_optimizer else getattr(inner, "weight_decay", None)
        self.optimizer_phases = phased.PhasedOptimizer(self.optimizer, self.members, self.phases, base)
        if self.has_own_optimizer:
            assert isinstance(self.lr_scheduler, StepSchedule)
            self.schedule = phased.PhasedSchedule(self.lr_scheduler)
            inner.learning_rate = self.lr_scheduler = self.callback_handler.lr_scheduler = self.schedule
        progress = self.running_progress
        if not progress.starts:
            progress.starts = [self.optimizer_phases.num_steps]
        index = progress.index
        self.begin_training(index)
        self.callbacks.add(index)
        if self.changes_loss:
            self.use_loss(self.phases[index].loss or self.own_loss)
        self.state.phase = self.phases[index].name

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuses learning rates of phases for an optimizer that the Trainer did not make.

        Raises:
            UnsupportedOption: a phase sets the rate, and the optimizer has its own.
        """
        for phase in self.phases if not self.has_own_optimizer else ():
            for name in phased.RATE_SETTINGS:
                if getattr(phase, name) is not None:
                    raise UnsupportedOption(
                        f"phases[{phase.name!r}].{name}={getattr(phase, name)!r} is not supported with an optimizer of "
                        f"your own, {type(optimizer).__name__}, which has its own rate: name it in optim, and leave "
                        "optimizers=(...) and the optimizer of compile() out."
                    )

    def make_engine(self, plan: Plan, ledger: Ledger) -> TFEngine:
        engine = super().make_engine(plan, ledger)
        engine.follow(self.objective, self.trained_in(self.running_progress.index))
        return engine

    def trained_in(self, index: int) -> list[Any]:
        """Returns the variables that a phase trains."""
        return [member.variable for member in self.members if member.is_trained[index]]

    def make_loop(self, run: Run, hooks: Hooks, saves: Notifying) -> Loop:
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
        """Begins a phase: what is trained, the optimizer's settings, the data, the loss, the callbacks."""
        progress, state = self.running_progress, self.state
        assert self.engine is not None
        assert self.optimizer_phases is not None
        self.callbacks.end()
        progress.begin(index, state.global_step)
        progress.starts.append(self.optimizer_phases.num_steps)
        progress.last_step = self.lengths.last_step(index, progress.began)
        if self.phases[index].changes_data or self.phases[index - 1].changes_data:
            self.replace_data(index)
        if self.changes_loss:
            self.use_loss(self.phases[index].loss or self.own_loss)
        self.begin_training(index)
        trained = self.trained_in(index)
        self.engine.follow(self.objective, trained)
        state.phase = progress.phase.name
        self.callbacks.begin(index)
        logger.info(
            "Phase %s begins after step %d: %s parameters are trained, at a learning rate of %g.",
            progress.phase.name,
            state.global_step,
            f"{count_numbers([plain(each) for each in trained]):,}",
            self.engine.learning_rate(),
        )

    def begin_training(self, index: int) -> None:
        """Sets the optimizer's settings of a phase."""
        progress = self.running_progress
        assert progress.last_step is not None
        assert self.optimizer_phases is not None
        self.optimizer_phases.begin(index, progress.starts)
        if self.schedule is not None:
            length = max(progress.last_step - progress.began, 1)
            self.schedule.begin(self.schedule_of(index, length), progress.starts[index])

    def replace_data(self, index: int) -> None:
        """Opens the data of a phase, which the next epoch reads."""
        with self.within_phase(index - 1):
            self.sources[id(self.facade.train_dataset)] = self.feed.source
        with self.within_phase(index):
            source = self.open_source()
            plan = self.make_plan(source)
            source.go_on_from(self.sources.get(id(self.facade.train_dataset)))
        self.plan = replace(plan, notes=self.plan.notes, num_epochs=self.plan.num_epochs)
        self.feed.replace_source(source, plan.accumulation_steps)
        self.loop.follow(self.plan)

    def use_loss(self, function: Callable[..., Any] | None) -> None:
        """Computes the loss by another function; None: the model's own loss."""
        self.facade.compute_loss_func = function
        self.facade.use_model(self.model)


def changed(args: Any, changes: Mapping[str, Any]) -> Any:
    """Returns arguments with other values, and the same devices."""
    made = replace(args, **changes)
    if "_strategy" in vars(args):  # there may be one strategy per process
        vars(made)["_strategy"] = vars(args)["_strategy"]
    return made
