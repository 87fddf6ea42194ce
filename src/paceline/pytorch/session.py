"""The session of a Trainer for torch: creates the parts of a run and connects them."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.args.construction import derived_values
from paceline.args.places import placed
from paceline.args.plan import Plan, resolve, resolve_update
from paceline.args.sharding import wants_shards
from paceline.checkpoint import layout as names
from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.output_store import finished_uploads
from paceline.checkpoint.resuming import adapt_intervals, begin_state
from paceline.core import session as core
from paceline.core.contracts import Hooks, Stateful
from paceline.core.headlines import RunFacts, optimizer_line
from paceline.core.journal import NOT_COMPUTED, keep_journal
from paceline.core.ledger import Ledger
from paceline.core.lineage import PROGRESS_FILE, RunMark
from paceline.core.loop import Loop
from paceline.core.methods import is_ours
from paceline.core.metrics import best_metric_value
from paceline.core.optional import LateModule
from paceline.core.session import Kept, meters_in
from paceline.core.signals import StopSignals
from paceline.core.state import TrainerState
from paceline.pytorch.checkpoint.distributed_resume import begin_for_all, find_for_all, locked
from paceline.pytorch.checkpoint.items import CallbackStates, Items, RandomStates
from paceline.pytorch.checkpoint.resume_state import LoopProgress, PositionRestorer, restore_loop, resumed_batch_size
from paceline.pytorch.checkpoint.saves import Saves
from paceline.pytorch.checkpoint.validate_state import wrap_load_error
from paceline.pytorch.data.dispatch import DispatchedLoader
from paceline.pytorch.data.lengths import evaluation_samples
from paceline.pytorch.data.loading import (
    KeptLoaders,
    StatefulDataIterator,
    is_split,
    is_stream,
    loader_length,
    sample_count,
)
from paceline.pytorch.data.padding_meter import PaddingMeter
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.memory import count_memory
from paceline.pytorch.distributed.precision import make_precision, warn_of_emulation
from paceline.pytorch.distributed.random import seed_everything, set_seed
from paceline.pytorch.distributed.simulated import check_real
from paceline.pytorch.distributed.strategy import SingleDevice, choose_strategy
from paceline.pytorch.distributed.watchdog import Watchdog, watching
from paceline.pytorch.distributed.world import World, device_text
from paceline.pytorch.engine import Engine
from paceline.pytorch.loaders import check_train_loader, make_feed
from paceline.pytorch.model.factory import check_trainable
from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.model.objective import adapted
from paceline.pytorch.model.prepare import PreparedModel, prepare_model
from paceline.pytorch.optim.groups import reset_decay
from paceline.pytorch.optim.layerwise import check_options, check_run, steps_in_backward
from paceline.pytorch.optim.modes import switch_optimizer
from paceline.pytorch.optim.schedulers import follows_metrics
from paceline.pytorch.optim.shards import check_shards
from paceline.pytorch.step_parts.registry import Setup, StepParts, make_step_parts
from paceline.pytorch.sync import LocalSync, ProcessSync, Sync, synchronized_control
from paceline.pytorch.trainer_protocol import TrainerProtocol
from paceline.pytorch.validation import check_evaluation, check_optimizer, declare_loss

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import rollback, sharded_format
    from paceline.pytorch.data import sources as data_sources
    from paceline.pytorch.data import window_ids
    from paceline.pytorch.distributed import device_clock, memory_report
    from paceline.pytorch.model import missing_labels
    from paceline.pytorch.optim import averages, steered
    from paceline.pytorch.optim.averages import AveragedWeights
else:
    averages = LateModule("paceline.pytorch.optim.averages")
    device_clock = LateModule("paceline.pytorch.distributed.device_clock")
    data_sources = LateModule("paceline.pytorch.data.sources")
    memory_report = LateModule("paceline.pytorch.distributed.memory_report")
    missing_labels = LateModule("paceline.pytorch.model.missing_labels")
    rollback = LateModule("paceline.pytorch.checkpoint.rollback")
    sharded_format = LateModule("paceline.pytorch.checkpoint.sharded_format")
    steered = LateModule("paceline.pytorch.optim.steered")
    window_ids = LateModule("paceline.pytorch.data.window_ids")

logger = logging.getLogger(__name__)

LAST_LAZY_PROBE = 2  # each probe synchronizes with the device, which then idles until the host has built a graph


@dataclass
class Run(core.Run):
    """The parts of a training run in progress, including those specific to torch.

    Attributes:
        sync: communication of the ranks around an optimizer step.
        saves: the checkpoints of the run, written and being written.
        loaders: evaluation loaders whose workers are kept alive between evaluations.
        padding: counts useful and padding tokens.
    """

    sync: Sync = field(kw_only=True)
    saves: Saves = field(default_factory=Saves)
    loaders: KeptLoaders = field(default_factory=KeptLoaders)
    padding: PaddingMeter = field(default_factory=PaddingMeter)


class Session(core.Session[Run, TrainerProtocol]):
    """Creates the parts of a Trainer for torch.

    Attributes:
        world: the processes, and the device of this process.
        model: the model as the user gave it, or as `model_init` made it last.
        model_wrapped: the model as the strategy and torch.compile have wrapped it.
        optimizer, lr_scheduler: given by the user, or created by the last run; None before the first run.
        strategy: places the tensors; recreated by each run.
        loss_normalizer: scales the losses of micro-batches.
        edits: changes that training made to the model; None outside of training.
        is_prepared: True once training or an evaluation has prepared the model, so that its memory is known.
        reports_changes: log the arguments that have changed since the checkpoint.
        averages: the average of the weights in this run; None without one.
        step_parts: the optional parts of the optimizer steps of the last run; None before the first one.
        created_lr_scheduler: the session created the schedule, for the length of one run.
        resumed_batch_size: global batch size of a run that is resumed on another number of processes; else None.
        current_flos: operations since `state.total_flos` was last updated.
    """

    data_remedy = "raise dataloader_num_workers, or let the dataset do less for each sample"
    sample_ids: window_ids.WindowIds | None = None  # of the windows of this run, if an option needs them
    sample_sources: data_sources.WindowSources | None = None  # of these windows, with loss_by_source
    world: Kept[World] = Kept()
    model: Kept[torch.nn.Module] = Kept()
    model_wrapped: Kept[torch.nn.Module] = Kept()
    optimizer: Kept[Any] = Kept()
    lr_scheduler: Kept[Any] = Kept()
    strategy: Kept[SingleDevice] = Kept()
    loss_normalizer: Kept[LossNormalizer] = Kept()
    edits: Kept[PreparedModel | None] = Kept()
    averages: Kept[AveragedWeights | None] = Kept()
    step_parts: Kept[StepParts] = Kept()
    is_prepared: Kept[bool] = Kept()
    reports_changes: Kept[bool] = Kept()
    current_flos: Kept[float] = Kept()
    created_lr_scheduler: Kept[bool] = Kept("_created_lr_scheduler")
    resumed_batch_size: Kept[int | None] = Kept("_resumed_batch_size")

    @property
    def world_size(self) -> int:
        return self.world.world_size

    # ---- the stages of a run, in order

    def lock(self, folder: Path) -> AbstractContextManager[FolderLock | None]:
        check_real("train()", self.world)  # before the first collective call
        return locked(self.world, folder)

    def start(self, trial: object) -> None:
        args, facade = self.options, self.facade
        check_evaluation(
            facade.eval_dataset,
            facade.get_eval_dataloader,
            strategy=str(args.eval_strategy),
            metric=derived_values(args).get("metric_for_best_model"),
        )
        declare_loss(self.loss_normalizer, args.loss_weight, facade.loss_is_scaled_for_ga)
        warn_of_emulation(args.fp16, self.world.device)
        seed_everything(args.seed, is_deterministic=args.full_determinism, tf32=args.tf32)
        if facade.model_init is not None:
            self.model = facade.call_model_init(trial)
            self.optimizer = self.lr_scheduler = None
            facade.place_model()
            facade._meet_trial(trial)
        check_trainable(self.model)

    def find_checkpoint(self, resume: str | bool | None) -> Path | None:
        wanted = self.options.resume_from_checkpoint if resume is None else resume
        found = find_for_all(self.world, wanted, str(self.options.output_dir), self.options.output_store)
        return None if found is None else placed(self.options, found)

    def open_data(self, checkpoint: Path | None) -> tuple[StatefulDataIterator, Plan]:
        self.resumed_batch_size = self.find_batch_size(checkpoint)
        if checkpoint is not None:
            self.facade._load_from_checkpoint(str(checkpoint))
        loader = self.facade.get_train_dataloader()
        packing, plan = self.facade._find_packing(), self.make_plan(loader)
        check_train_loader(loader, type(self.facade).__name__, packing, plan.micro_batch_tokens)
        collect, device = adapted(self.facade.get_batch_samples, 3), self.world.device

        def draw(batches: Iterator[Any], number: int) -> Any:
            return collect(batches, number, device)

        needs_ids = self.options.data_map or self.options.distillation_cache is not None
        self.sample_ids = window_ids.WindowIds(draw) if needs_ids else None
        drawn = draw if self.sample_ids is None else self.sample_ids.collect
        column = self.options.loss_by_source
        self.sample_sources = data_sources.WindowSources(column, drawn) if column else None
        feed = make_feed(
            loader,
            plan,
            self.model,
            collect=drawn if self.sample_sources is None else self.sample_sources.collect,
            ignore_data_skip=self.options.ignore_data_skip,
            step=lambda: self.state.global_step,
        )
        if self.sample_ids is not None:
            self.sample_ids.follow(feed)
        return feed, plan

    def find_batch_size(self, checkpoint: Path | None) -> int | None:
        """Returns the global batch size of a run that is resumed on another number of processes; else None."""
        if checkpoint is None:
            return None
        data_size = self.strategy.mesh.data_size
        return resumed_batch_size(
            checkpoint,
            data_size=data_size,
            global_batch_size=resolve_update(self.options, data_size, None)[1],
            arguments=self.options.to_sanitized_dict(),
            reads_stream=is_stream(self.facade.train_dataset),
        )

    def make_plan(self, loader: object) -> Plan:
        """Returns the plan of a run over a loader; all ranks use the length of the longest loader."""
        if self.world.is_distributed and not is_split(loader):
            logger.warning(
                "The training loader is %s's own, and each of the %d processes reads all of it: pass it through "
                "trainer.accelerator.prepare(), or give it a DistributedSampler.",
                type(self.facade).__name__,
                self.world.world_size,
            )
        lengths = gather_objects(self.world, loader_length(loader))
        return resolve(
            self.options,
            world_size=self.world.world_size,
            local_size=self.world.local_size,
            micro_batches_per_epoch=None if None in lengths else max(lengths),
            samples_per_epoch=sample_count(loader),
            resumed_batch_size=self.resumed_batch_size,
        )

    def plan_without_data(self) -> Plan:
        """Returns the plan as far as it does not depend on the amount of data."""
        return resolve(
            self.options,
            world_size=self.world.world_size,
            local_size=self.world.local_size,
            micro_batches_per_epoch=1,
        )

    def begin_state(self, plan: Plan, checkpoint: Path | None, trial: object) -> TrainerState:
        state = begin_state(
            plan,
            checkpoint,
            is_local_process_zero=self.world.local_process_index == 0,
            is_world_process_zero=self.world.process_index == 0,
            is_trial=trial is not None,
            trial_name=self.facade._trial_name,
            trial_params=getattr(trial, "params", trial),
        )
        state.num_eval_samples = evaluation_samples(self.facade.eval_dataset)
        return state

    def begin_mark(self, folder: Path, checkpoint: Path | None) -> RunMark:
        return begin_for_all(self.world, folder, checkpoint, self.state.global_step)

    def restore_position(self, feed: StatefulDataIterator, plan: Plan, checkpoint: Path) -> Plan:
        restorer = PositionRestorer(
            checkpoint,
            feed,
            plan,
            global_step=self.state.global_step,
            coordinates=self.strategy.data_coordinates(),
            arguments=self.options.to_sanitized_dict(),
            warmup_steps=self.options.get_warmup_steps,
        )
        restored, self.state.max_steps = restorer.restore()
        return adapt_intervals(self.state, self.options, plan, restored)

    @contextmanager
    def surroundings(self, plan: Plan) -> Iterator[None]:
        with finished_uploads(self.facade.remote_sync), self.facade._finished_pushes():
            self.edits = prepared = prepare_model(self.model, self.options)
            for note in prepared.notes:
                logger.info(note)
            packing = self.facade._find_packing()
            try:
                with packing.applied() if packing is not None else nullcontext():
                    yield
            finally:
                prepared.undo()
                self.edits = None

    def watch(self) -> AbstractContextManager[Watchdog | None]:
        return watching(self.world, self.options)

    def prepare(
        self,
        plan: Plan,
        feed: StatefulDataIterator,
        signals: StopSignals,
        watchdog: Watchdog | None,
        folder: Path,
    ) -> Run:
        self.prepare_model(plan)
        ledger = device_clock.make_ledger(self.world.device)
        sync = self.make_sync(plan, feed, signals, watchdog, ledger)
        self.strategy.check_training_step(self.facade.training_step)
        padding = PaddingMeter()
        edit_meters = self.edits.meters if self.edits is not None else ()
        meters: list[core.Meter] = [padding, *feed.meters, *edit_meters, *meters_in(self.callback_handler)]
        self.step_parts = made = self.make_step_parts(plan, feed, signals)
        meters += made.meters
        engine = self.make_engine(plan, sync, ledger, made.training_step)
        made.join(engine)
        self.callback_handler.train_dataloader = feed.loader
        assert self.run_mark is not None
        parts = (plan, feed, engine, signals, self.run_mark, folder)
        return Run(*parts, sync=sync, ledger=ledger, meters=tuple(meters), padding=padding)

    def restore(self, run: Run, checkpoint: Path | None) -> Loop:
        made = self.make_averages(run)
        if made is not self.averages:
            self.averages = made
        if made is None and checkpoint is not None and (checkpoint / f"{names.AVERAGES}.pt").is_file():
            logger.warning(
                "%s holds averaged weights, and the run has no average: it resumes from them, and not from the weights "
                "that were trained, which are in %s.pt. Set ema_decay or swa_start as before to resume exactly.",
                checkpoint,
                names.AVERAGES,
            )
        progress = self.facade._make_checkpointer().restore(checkpoint) if checkpoint is not None else None
        run.begin_at(self.state)
        loop = self.make_loop(run, self.hooks(run, progress), run.saves.writer)
        if checkpoint is not None and progress is not None:
            with wrap_load_error(checkpoint / PROGRESS_FILE):
                restore_loop(loop, self.loss_normalizer, progress, self.options.label_smoothing_factor)
        return loop

    def settings(self, run: Run) -> steered.TorchSettings:
        engine = run.engine
        # an optimizer of several models clips the gradients of each
        clipper: Any = engine.optimizer if hasattr(engine.optimizer, "limit_norm") else engine
        return steered.TorchSettings(
            engine.optimizer,
            engine.scheduler,
            read_norm=lambda: float(clipper.max_grad_norm),
            limit_norm=clipper.limit_norm,
            clips_itself=self.strategy.clips_itself,
        )

    def evaluation_obstacle(self) -> str | None:
        facade = self.facade
        try:
            check_evaluation(facade.eval_dataset, facade.get_eval_dataloader, strategy="steps", metric=None)
        except ValueError:
            return "the run has no evaluation data"
        return None

    def describe(self, run: Run) -> RunFacts:
        lines = []
        if self.world.is_distributed:
            memory = count_memory(self.model, self.optimizer)
            lines.append(f"memory     process {self.world.process_index}: {memory.describe()}")
        return RunFacts(
            num_trainable=self.facade.get_num_trainable_parameters(),
            num_samples=sample_count(run.feed.loader),
            model=type(self.model).__name__,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            device=device_text(self.world.device),
            record={
                "parameter_dtypes": sorted({str(parameter.dtype) for parameter in self.model.parameters()}),
                **self.step_parts.facts(),
            },
            lines=tuple(lines),
            describe_parts=self.describe_parts,
        )

    def describe_parts(self) -> list[str]:
        """Returns the lines of the header about the optimizer, and about the memory that is known before a step."""
        groups = getattr(self.optimizer, "param_groups", ())
        rates = [group.get("initial_lr", group.get("lr")) for group in groups]
        rates = [rate for rate in rates if isinstance(rate, int | float)]
        kind = self.options.lr_scheduler_type if self.created_lr_scheduler else type(self.lr_scheduler).__name__
        return [
            optimizer_line(type(self.optimizer).__name__, rates, str(kind)),
            f"memory     {count_memory(self.model, self.optimizer).describe()}",
        ]

    @contextmanager
    def open(self, run: Run) -> Iterator[None]:
        self.strategy.clear_gradients()  # left by user code, or by an optimizer step that an error interrupted
        self.model_wrapped.train()
        switch_optimizer(self.optimizer, "train")
        try:
            with (
                synchronized_control(self.callback_handler, run.sync),
                self.averaging(run),
                self.step_parts.active(run.engine, self.callback_handler),
            ):
                yield
        except Exception as error:
            memory_report.report_out_of_memory(
                error,
                self.model,
                self.optimizer,
                self.options,
                batches=run.engine.batches,
                precision=self.strategy.precision,
                world_size=1 if self.strategy.is_sharded else self.world.world_size,
                without_logits=self.facade.objective.computes_no_logits,
            )
            missing_labels.explain_missing_labels(
                error,
                self.facade.train_dataset,
                run.engine.batches,
                accepted=self.facade.objective.signature.names,
                label_names=self.facade.objective.label_names,
                drops_columns=self.options.remove_unused_columns,
            )
            raise
        finally:
            self.strategy.clear_gradients()
            switch_optimizer(self.optimizer, "eval")

    def averaging(self, run: Run) -> AbstractContextManager[None]:
        """Returns a context in which the average of the weights, if any, follows the optimizer steps."""
        if self.averages is None:
            return nullcontext()
        return averages.averaging(self.averages, run.engine, self.callback_handler)

    def close(self, run: Run) -> None:
        run.loaders.close()
        run.saves.close(run.folder if self.options.should_save else None)

    def settle(self, run: Run, train_loss: float) -> float:
        self.facade.store_flos()
        return train_loss

    def complete_saves(self, run: Run) -> None:
        if self.options.should_save:
            self.step_parts.finish(run.folder)
        self.facade._make_checkpointer().finish(run.folder)
        switch_optimizer(self.optimizer, "eval")
        if self.averages is not None:
            self.averages.adopt()

    def gather_times(self, seconds: Mapping[str, float]) -> list[Mapping[str, float]]:
        return gather_objects(self.world, seconds)

    def load_best(self, checkpoint: Path) -> bool:
        return self.facade._make_checkpointer().load_best(placed(self.options, checkpoint))

    # ---- the parts

    def make_strategy(self, plan: Plan) -> SingleDevice:
        """Returns the strategy for the current arguments."""
        precision = make_precision(plan.precision, self.world.device)
        return choose_strategy(self.world, precision, self.options, plan.parallel)

    def prepare_model(self, plan: Plan) -> None:
        """Prepares the model with a new strategy, which creates optimizer and scheduler once the parameters are
        final.
        """
        self.strategy = strategy = self.make_strategy(plan)
        self.is_prepared = True
        if self.created_lr_scheduler:  # it has the length of the previous run
            self.lr_scheduler, self.created_lr_scheduler = None, False

        def make_optimizer(model: torch.nn.Module) -> Any:
            self.facade.create_optimizer_and_scheduler(num_training_steps=plan.max_steps)
            check_optimizer(self.optimizer, model)
            reset_decay(self.optimizer)
            check_run(self.optimizer, str(self.options.optim), plan)
            check_shards(self.optimizer, str(self.options.optim))
            check_options(self.optimizer, self.options, plan)
            return self.optimizer

        if wants_shards(self.options) and plan.save_strategy != "no":
            sharded_format.check_sharded(strategy, self.model, self.options.save_on_each_node)
        prepared = strategy.prepare(self.model, make_optimizer)
        if prepared.optimizer is not None:
            self.optimizer = prepared.optimizer
        if prepared.make_schedule is not None:
            own = prepared.make_schedule(plan.max_steps, plan.warmup_steps)
            self.lr_scheduler = own if own is not None else self.lr_scheduler
        self.model_wrapped = self.facade._wrap_model(prepared.model)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler

    def make_averages(self, run: Run) -> AveragedWeights | None:
        """Returns the average of the weights in a run; None if none is requested."""
        if self.options.ema_decay is None and self.options.swa_start is None:
            return None
        facade = self.facade
        settings = averages.averaging_of(self.options, run.plan.max_steps, run.plan.updates_per_epoch)
        averages.check_support(settings, self.strategy, self.optimizer)
        averages.settle_rate(settings, self.lr_scheduler, self.created_lr_scheduler)

        def run_batch(batch: Any) -> None:
            inputs = facade._prepare_inputs(batch if type(batch) is dict else facade.objective.name_inputs(batch))
            with self.strategy.forward_context():
                facade.compute_loss(self.model, inputs)

        refresh = partial(averages.refresh_statistics, self.model, facade.get_train_dataloader, run_batch)
        model = self.strategy.unwrap(self.model)
        return averages.make_averages(model, settings, self.strategy, refresh, run.feed.loader)

    def make_step_parts(self, plan: Plan, feed: StatefulDataIterator, signals: StopSignals) -> StepParts:
        """Returns the optional parts of a run's optimizer steps."""
        return make_step_parts(
            Setup(
                options=self.options,
                facade=self.facade,
                strategy=self.strategy,
                model=self.model,
                optimizer=self.optimizer,
                normalizer=self.loss_normalizer,
                plan=plan,
                feed=feed,
                signals=signals,
                sample_ids=self.sample_ids,
                sample_sources=self.sample_sources,
                num_steps=lambda: self.state.global_step,
                training_step=self.facade.training_step,
            )
        )

    def make_sync(
        self,
        plan: Plan,
        feed: StatefulDataIterator,
        signals: StopSignals,
        watchdog: Watchdog | None,
        ledger: Ledger,
    ) -> Sync:
        """Returns the sync of a run; with several ranks, it synchronizes their accumulation windows.

        Args:
            watchdog: None with a single process.
        """
        if watchdog is None:
            return LocalSync(self.loss_normalizer)
        sync = ProcessSync(
            self.world,
            self.loss_normalizer,
            plan.accumulation_steps,
            signals,
            averages=plan.average_tokens_across_devices,
            measure=self.facade._make_measurer(),
            watchdog=watchdog,
            mesh=plan.mesh,
            ledger=ledger,
            requests=self.control.requests,
        )
        sync.is_served = isinstance(feed.loader, DispatchedLoader) and not self.world.is_first
        feed.synchronize_with(sync.synchronize, partial(sync.draw, feed.collect))
        rng_rank = plan.mesh.rng_rank(self.world.process_index)
        if rng_rank:  # ranks with the same weights draw different dropout masks
            set_seed(plan.seed + rng_rank)
        return sync

    def make_engine(
        self,
        plan: Plan,
        sync: Sync,
        ledger: Ledger | None = None,
        training_step: Callable[..., Tensor] | None = None,
    ) -> Engine:
        """Returns the engine of a run, or of a `training_step` outside of a run."""
        max_norm = plan.max_grad_norm or math.inf  # the norm is logged even without clipping
        return Engine(
            self.strategy,
            self.loss_normalizer.begin(LAST_LAZY_PROBE if self.strategy.is_lazy else None),
            sync,
            model=self.model_wrapped,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scheduler_follows_metrics=follows_metrics(self.lr_scheduler),
            training_step=self.facade.training_step if training_step is None else training_step,
            compute_loss=self.facade.compute_loss,
            prepare_inputs=self.facade._prepare_inputs,
            max_grad_norm=0.0 if steps_in_backward(self.optimizer) else max_norm,
            skips_non_finite=plan.nonfinite_policy == "skip",
            empty_cache_every=self.options.torch_empty_cache_steps,
            ledger=ledger if ledger is not None else Ledger(),
        )

    def make_lone_engine(self) -> Engine:
        """Returns the engine of a `training_step` that is called outside of a run."""
        return self.make_engine(self.plan_without_data(), LocalSync(self.loss_normalizer))

    def items(self) -> Items:
        """Returns all stateful objects that a run is resumed from, by name; add new items here."""
        run = self.run
        found: dict[str, Stateful | None] = {
            names.MODEL: self.model,
            names.OPTIMIZER: self.optimizer,
            names.SCHEDULER: self.lr_scheduler,
            **self.strategy.stateful(),
            names.CALLBACKS: CallbackStates(self.callback_handler),
            names.LOSS: self.loss_normalizer,
            names.AVERAGES: self.averages,
            **(self.step_parts.items() if self.step_parts is not None else {}),
            names.RNG: RandomStates(),
            names.DATA: run.feed if run is not None else None,
            names.PROGRESS: LoopProgress(run.loop) if run is not None and run.loop is not None else None,
        }
        return {name: item for name, item in found.items() if item is not None}

    def rollback(self, run: Run, folder: Path | None) -> rollback.Rollback:
        """Returns the rollback of everything that training changes, except the loop, which rewinds itself."""
        items = {name: item for name, item in self.items().items() if name != names.PROGRESS}
        return rollback.Rollback(items, self.model, self.state, run.feed, run.retry_writer, folder)

    # ---- hooks of the loop

    def hooks(self, run: Run, progress: Mapping[str, Any] | None) -> Hooks:
        """Returns the hooks of a run's loop.

        Args:
            progress: loop progress of the checkpoint that the run is resumed from; None for a new run.
        """
        folder = run.folder if self.options.should_save else None
        return Hooks(
            log=adapted(self.facade.log, 2),
            act=partial(self.act, run),
            evaluate=partial(self.evaluate_in_run, run),
            save=partial(self.save_in_run, run),
            record=keep_journal(run.retry_writer, folder, self.state.global_step, progress),
            snapshot=lambda: self.rollback(run, folder).take(),
            rewind=lambda snapshot, bad: self.rollback(run, folder).rewind(snapshot, bad),
            count=self.counter(run),
        )

    def counter(self, run: Run) -> Callable[[Sequence[Any]], None] | None:
        """Returns a function that accumulates the counts of each window over all ranks; None if nothing is counted."""
        measure = self.facade._make_measurer()
        if measure is None:
            return None

        def count(batches: Sequence[Any]) -> None:
            counted = run.sync.measured(measure, batches)
            self.state.num_input_tokens_seen += counted.tokens
            self.current_flos += counted.operations
            run.padding.add(counted.useful, counted.elements)

        return count

    def act(self, run: Run) -> None:
        """Logs, evaluates and saves if due, through `_maybe_log_save_evaluate`, which users may override."""
        loop, act = run.loop, self.facade._maybe_log_save_evaluate
        assert loop is not None
        if run.lock is not None:
            run.lock.check()
        is_own = not is_ours(act)
        if is_own and (bad := loop.collect()) is not None:  # an override may log by itself, so it gets collected losses
            loop.rewind(bad)
            return
        past = loop.unlogged
        act(
            torch.tensor(past.loss_sum, dtype=torch.float64),
            past.grad_norm if past.grad_norm != NOT_COMPUTED else None,
            self.model_wrapped,
            run.trial,
            self.state.epoch,
            run.ignore_keys,
            loop.start_time,
            learning_rate=past.learning_rate,
        )

    def evaluate_in_run(self, run: Run, skip_scheduler: bool) -> dict[str, float]:
        """Evaluates during a run, and returns the metrics."""
        run.sync.enter("evaluating")
        with run.evaluation.in_progress(RandomStates()):
            return self.facade._evaluate(run.trial, run.ignore_keys, skip_scheduler=skip_scheduler)

    def save_in_run(self, run: Run) -> bool:
        """Saves a checkpoint; returns True if it is complete, False if it is still being written asynchronously."""
        run.sync.enter("saving a checkpoint")
        run.saves.expect()
        self.step_parts.before_save()
        self.facade._save_checkpoint(self.model_wrapped, run.trial)
        if self.options.should_save and run.saves.is_published:
            self.claim(run)
        return run.saves.is_published


def step_by_metric(scheduler: Any, metrics: dict[str, float], name: str | None) -> None:
    """Steps a schedule that follows a metric (plateau, greedy)."""
    scheduler.step(best_metric_value(metrics, name or "loss"))


def session_of(facade: object, phases: object) -> Session:
    """Returns the session of a call: that of training phases, whose module is imported only if there are any."""
    if not phases:
        return Session(facade)
    made: Session = importlib.import_module("paceline.pytorch.phases.session").PhasedSession(facade)
    return made
