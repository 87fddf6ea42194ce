"""The session of a Trainer with training phases: it begins each phase between two epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.phases import Phase
from paceline.args.plan import Plan, resolve_update
from paceline.core.contracts import Hooks, Notifying
from paceline.core.loop import Loop
from paceline.core.methods import is_ours
from paceline.core.phases import session as shared
from paceline.pytorch import session
from paceline.pytorch.checkpoint.resume_state import read_progress
from paceline.pytorch.data.loading import StatefulDataIterator, loader_length
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.optim import phased
from paceline.pytorch.optim.schedulers import get_scheduler
from paceline.pytorch.session import Run
from paceline.pytorch.trainer_protocol import TrainerProtocol
from paceline.pytorch.validation import read_model

PARALLEL = (None, "ddp", "fsdp")


class PhasedSession(shared.PhasedSession[Run, TrainerProtocol], session.Session):
    """The session of a Trainer with `phases`."""

    optimizer_phases: phased.PhasedOptimizer | None = None
    schedule: phased.PhasedSchedule
    members: Sequence[phased.Member] = ()

    def leave(self) -> None:
        if self.progress is not None:
            for member in self.members:
                member.parameter.requires_grad_(True)
        super().leave()

    # ---- before the first step

    def start(self, trial: object) -> None:
        super().start(trial)
        facade = self.facade
        is_own = self.created_lr_scheduler or self.lr_scheduler is None
        if not is_own or not is_ours(facade.create_scheduler):
            raise UnsupportedOption(
                "phases with a learning-rate schedule of your own are not supported: set lr_scheduler_type of each "
                "phase, and leave optimizers=(..., scheduler) and create_scheduler out."
            )
        self.load_phases()
        for phase in self.phases:
            if phase.changes_data and not is_ours(facade.get_train_dataloader):
                raise UnsupportedOption(
                    f"phases[{phase.name!r}] has data or a batch size of its own, and get_train_dataloader is "
                    "overridden, which decides both: leave one of them out."
                )
            if (phase.loss is not None or phase.changes_data) and facade.teacher is not None:
                raise UnsupportedOption(
                    f"phases[{phase.name!r}] has a loss or data of its own, and the losses of a teacher "
                    "are those of one dataset: leave teacher out, or the loss and the data of the phase."
                )
            if phase.loss is not None and not is_ours(facade.compute_loss):
                raise UnsupportedOption(
                    f"phases[{phase.name!r}] has a loss of its own, and compute_loss is overridden, which computes it: "
                    "leave one of them out."
                )
        self.makes_optimizer = self.optimizer is None
        phased.find_members(self.model, self.phases)  # wrong patterns raise before anything is read
        self.start_phases()

    def arguments_of(self, phase: Phase, changes: Mapping[str, Any]) -> Any:
        return replace(self.args, **changes)

    def open_data(self, checkpoint: Path | None) -> tuple[StatefulDataIterator, Plan]:
        progress = self.running_progress
        saved = (read_progress(checkpoint) or {}) if checkpoint is not None else {}
        self.restore_progress(saved, checkpoint)
        self.check_processes(saved)
        # the epochs of all phases are counted in steps of this size, before the data of one of them is opened
        self.resumed_batch_size = super().find_batch_size(checkpoint)
        self.find_lengths()
        progress.last_step = self.lengths.last_step(progress.index, progress.began)
        with self.within_phase(progress.index):
            feed, plan = super().open_data(checkpoint)
        if plan.parallel not in PARALLEL:
            raise UnsupportedOption(f"phases with parallel={plan.parallel!r} are not supported: set 'ddp' or 'fsdp'.")
        feed.before_epoch = self.advance_phase
        self.feed, self.plan = feed, self.lengths.with_notes(plan)
        return feed, self.plan

    def check_processes(self, saved: Mapping[str, Any]) -> None:
        """Refuses to resume on another number of processes if the batch size differs between the phases."""
        before = saved.get("data_size")
        if before not in (None, self.strategy.mesh.data_size) and any(phase.changes_batch for phase in self.phases):
            raise UnsupportedOption(
                f"The checkpoint was written by {before} data-parallel processes, and there are "
                f"{self.strategy.mesh.data_size} now: with phases of different batch sizes, resume on {before}."
            )

    def make_plan(self, loader: object) -> Plan:
        """Returns the plan of a run over a loader; outside of a run, with all phases."""
        if not self.options.phases:  # those of one phase
            return super().make_plan(loader)
        self.load_phases()
        self.find_lengths()
        with self.within_phase(0):
            plan = super().make_plan(self.facade.get_train_dataloader() if self.phases[0].changes_data else loader)
        return self.lengths.with_notes(plan)

    def find_batch_size(self, checkpoint: Path | None) -> int | None:
        return self.resumed_batch_size

    def epoch_lengths(self) -> list[int | None]:
        return [self.epoch_length(index) for index in range(len(self.phases))]

    def epoch_length(self, index: int) -> int | None:
        """Returns the optimizer steps in an epoch of a phase; None if the data has no length."""
        with self.within_phase(index):
            lengths = gather_objects(self.world, loader_length(self.facade.get_train_dataloader()))
            accumulation = resolve_update(self.options, self.strategy.mesh.data_size, self.resumed_batch_size)[0]
        return None if None in lengths else math.ceil(max(lengths) / accumulation)

    def restore_position(self, feed: StatefulDataIterator, plan: Plan, checkpoint: Path) -> Plan:
        with self.within_phase(self.running_progress.index):
            return super().restore_position(feed, plan, checkpoint)

    def prepare_model(self, plan: Plan) -> None:
        super().prepare_model(plan)
        model = self.strategy.unwrap(self.model)
        self.members = phased.find_members(model, self.phases)
        phased.check_optimizer(self.optimizer)
        decayed = self.facade.get_decay_parameter_names(model)
        phased.split_groups(self.optimizer, self.members, decayed, self.makes_optimizer)
        self.optimizer_phases = made = phased.PhasedOptimizer(self.optimizer, self.members, self.phases)
        self.schedule = phased.PhasedSchedule(self.optimizer, self.make_schedule, made.live)
        self.lr_scheduler, self.created_lr_scheduler = self.schedule, True
        self.callback_handler.lr_scheduler = self.schedule
        self.check_schedules()
        index = self.running_progress.index
        self.begin_training(index)
        self.join_phase(index)

    def make_loop(self, run: Run, hooks: Hooks, saves: Notifying) -> Loop:
        self.sync = run.sync
        return super().make_loop(run, hooks, saves)

    # ---- from phase to phase

    def begin_training(self, index: int) -> None:
        for member in self.members:
            member.parameter.requires_grad_(member.is_trained[index])
        self.strategy.follow_trainable(self.strategy.unwrap(self.model))
        assert self.optimizer_phases is not None
        self.optimizer_phases.begin(index)
        self.schedule.begin(index)

    def count_trained(self, index: int) -> int:
        return self.facade.get_num_trainable_parameters()

    def current_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def try_schedule(self, index: int, length: int) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.schedule_of(index, length, optimizer).step()

    def make_schedule(self, index: int) -> Any:
        """Returns the schedule of a phase, over its own length."""
        progress = self.running_progress
        assert progress.last_step is not None
        return self.schedule_of(index, progress.last_step - progress.began, self.optimizer)

    def schedule_of(self, index: int, length: int, optimizer: Any) -> Any:
        """Returns the schedule of a phase of `length` optimizer steps for an optimizer."""
        args = replace(self.args, **{**self.phases[index].options(), "phases": None})
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(length),
            num_training_steps=length,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
        )

    def replace_data(self, index: int) -> None:
        with self.within_phase(index):
            loader = self.facade.get_train_dataloader()
            plan = self.make_plan(loader)
        self.plan = replace(plan, notes=self.plan.notes, num_epochs=self.plan.num_epochs)
        self.feed.replace_loader(loader, plan.accumulation_steps)
        self.sync.expect(plan.accumulation_steps)
        self.loop.follow(self.plan)
        self.callback_handler.train_dataloader = loader

    def use_loss(self, function: Callable[..., Any] | None) -> None:
        """Computes the loss by another function, whose reduction is inferred anew; None: the model's own loss."""
        facade, args = self.facade, self.options
        facade.compute_loss_func = function
        facts = read_model(
            self.model,
            compute_loss=facade.compute_loss,
            compute_loss_func=function,
            label_names=args.label_names,
            loss_weight=args.loss_weight,
            smoothing=args.label_smoothing_factor,
            loss_is_scaled=facade.loss_is_scaled_for_ga,
            linear_cross_entropy=args.linear_cross_entropy,
        )
        self.loss_normalizer.take_over(facts.loss_normalizer)
        facts.objective.report_to(self.loss_normalizer)
        facade.objective = facts.objective
