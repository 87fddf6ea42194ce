"""The session of a TFTrainer with training phases: it begins each phase between two epochs.

As in PyTorch, the phases are one run: one loop, one log, one optimizer. When a phase begins, the optimizer step is
compiled again, for the variables that are trained, the loss and the schedule of the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.args import phases as options
from paceline.args.errors import UnsupportedOption
from paceline.args.phases import Phase
from paceline.args.plan import Plan
from paceline.core.ledger import Ledger
from paceline.core.phases import session as shared
from paceline.core.phases.progress import STATE
from paceline.core.session import Run
from paceline.tensorflow import session
from paceline.tensorflow.adapters import adapt_callbacks
from paceline.tensorflow.checkpoint.resume_state import read_progress, wrap_load_error
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.engine import TFEngine, is_own
from paceline.tensorflow.framework import plain
from paceline.tensorflow.model_card import count_numbers
from paceline.tensorflow.optim import phased
from paceline.tensorflow.optim.choose import compiled_optimizer, described_schedule
from paceline.tensorflow.optim.schedules import StepSchedule
from paceline.tensorflow.session import TFTrainerProtocol

SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")


class PhasedSession(shared.PhasedSession[Run, TFTrainerProtocol], session.Session):
    """The session of a TFTrainer with `phases`.

    Attributes:
        sources: the last source that has read a dataset, by the id of the dataset.
    """

    members: Sequence[phased.Member] = ()
    schedule: phased.PhasedSchedule | None = None
    optimizer_phases: phased.PhasedOptimizer | None = None

    # ---- before the first step

    def start(self, trial: object) -> None:
        super().start(trial)
        if not self.has_own_schedule and self.lr_scheduler is not None:
            raise UnsupportedOption(
                "phases with a learning-rate schedule of your own are not supported: set lr_scheduler_type of each "
                "phase, and leave optimizers=(..., schedule) out."
            )
        self.load_phases()
        self.check_overrides()
        self.members = phased.find_members(self.model, self.phases)
        self.start_phases(adapt_callbacks)

    def check_overrides(self) -> None:
        """Refuses overridden methods of a subclass that would decide what a phase sets.

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

    def arguments_of(self, phase: Phase, changes: Mapping[str, Any]) -> Any:
        rate = {} if phase.learning_rate is None else {"learning_rate": phase.learning_rate}
        return changed(self.args, {**changes, **rate})

    def open_data(self, checkpoint: Path | None) -> tuple[TFFeed, Plan]:
        progress = self.running_progress
        saved = read_progress(checkpoint) if checkpoint is not None else {}
        with wrap_load_error(checkpoint):
            self.restore_progress(saved, checkpoint)
        if STATE in (saved.get("callbacks") or {}):
            self.check_sizes(saved)
        self.find_lengths()
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

    def try_schedule(self, index: int, length: int) -> None:
        self.schedule_of(index, length)

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
        self.set_optimizer(index)
        self.join_phase(index)

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

    # ---- from phase to phase

    def begin_phase(self, index: int) -> None:
        assert self.optimizer_phases is not None
        self.running_progress.starts.append(self.optimizer_phases.num_steps)
        super().begin_phase(index)

    def begin_training(self, index: int) -> None:
        assert self.engine is not None
        self.set_optimizer(index)
        self.engine.follow(self.objective, self.trained_in(index))

    def count_trained(self, index: int) -> int:
        return count_numbers([plain(each) for each in self.trained_in(index)])

    def current_rate(self) -> float:
        assert self.engine is not None
        return self.engine.learning_rate()

    def set_optimizer(self, index: int) -> None:
        """Sets the optimizer's settings of a phase."""
        progress = self.running_progress
        assert progress.last_step is not None
        assert self.optimizer_phases is not None
        self.optimizer_phases.begin(index, progress.starts)
        if self.schedule is not None:
            length = max(progress.last_step - progress.began, 1)
            self.schedule.begin(self.schedule_of(index, length), progress.starts[index])

    def replace_data(self, index: int) -> None:
        with self.within_phase(index):
            source = self.open_source()
            plan = self.make_plan(source)
        self.plan = replace(plan, notes=self.plan.notes, num_epochs=self.plan.num_epochs)
        self.feed.replace_source(source, plan.accumulation_steps)
        self.loop.follow(self.plan)

    def use_loss(self, function: Callable[..., Any] | None) -> None:
        self.facade.compute_loss_func = function
        self.facade.use_model(self.model)


def changed(args: Any, changes: Mapping[str, Any]) -> Any:
    """Returns arguments with other values, and the same devices."""
    made = replace(args, **changes)
    if "_strategy" in vars(args):  # there may be one strategy per process
        vars(made)["_strategy"] = vars(args)["_strategy"]
    return made
