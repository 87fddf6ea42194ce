"""The session of a TFTrainer: it creates the parts of a run for TensorFlow, and connects them."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.args.errors import UnsupportedOption
from paceline.args.places import output_folder, placed
from paceline.args.plan import Plan, resolve
from paceline.args.sections import Options
from paceline.checkpoint import folders
from paceline.checkpoint.lock import FolderLock, acquire
from paceline.checkpoint.resuming import (
    adapt_intervals,
    announce_resume,
    begin_state,
    find_checkpoint,
    forget_other_best,
    forget_other_count,
    report_changes,
    report_kept,
)
from paceline.core import session as core
from paceline.core.contracts import Hooks
from paceline.core.events import call_own_event
from paceline.core.headlines import RunFacts
from paceline.core.journal import UpdateRow, keep_journal
from paceline.core.ledger import Ledger
from paceline.core.lineage import RunMark, begin_run
from paceline.core.loop import Loop
from paceline.core.metrics import best_metric_value
from paceline.core.optional import LateModule
from paceline.core.session import Kept
from paceline.core.signals import StopSignals
from paceline.core.state import TrainerState
from paceline.tensorflow import header, parts
from paceline.tensorflow.arguments import check_tensorflow
from paceline.tensorflow.checkpoint.resume_state import read_progress, read_unlogged, restore_position, wrap_load_error
from paceline.tensorflow.checkpoint.saving import Checkpointer, requested_actions
from paceline.tensorflow.checkpoint.variables import CallEffects, restore_variables
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.data.sources import Source, source_of_batches
from paceline.tensorflow.devices import World
from paceline.tensorflow.engine import TFEngine, is_own
from paceline.tensorflow.framework import keras, plain, tf
from paceline.tensorflow.model_card import count_numbers
from paceline.tensorflow.objective import Objective
from paceline.tensorflow.optim.averages import WeightAverages, averaging, make_averages, warn_of_average
from paceline.tensorflow.optim.following import FollowingSchedule
from paceline.tensorflow.overflow import Watch
from paceline.tensorflow.precision import in_precision, needs_loss_scale
from paceline.tensorflow.randomness import hold_generators, keras_state, seed_everything
from paceline.tensorflow.rollback import Rollback, Snapshot
from paceline.tensorflow.traces import trace_again

if TYPE_CHECKING:
    from paceline.tensorflow.optim import steered
else:
    steered = LateModule("paceline.tensorflow.optim.steered")

logger = logging.getLogger(__name__)


class NothingPending:
    """Stands for pending checkpoint writes, of which there are none, since TensorFlow writes synchronously."""

    is_due = False

    def settle(self) -> None:
        """Does nothing."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Does nothing: nothing is ever due."""


class TFTrainerProtocol(core.Facade, Protocol):
    """The members of a TFTrainer that a subclass may override and that its session uses; each is documented there.

    Attributes:
        eval_dataset: the evaluation data, or a dict of several.
        data_collator: a list of samples -> a batch; None for the default one.
        compute_loss_func: the loss; None for that of the model.
    """

    eval_dataset: Any
    data_collator: Any
    compute_loss_func: Callable[..., Any] | None
    use_model: Callable[[Any], None]
    run_model: Callable[..., Any]
    remake_model: Callable[[], None]
    get_train_tfdataset: Callable[[], Any]
    get_eval_tfdataset: Callable[..., Any]
    create_optimizer_and_scheduler: Callable[[int], None]
    training_step: Callable[..., Any]
    apply_gradients: Callable[..., Any]
    distributed_training_steps: Callable[..., Any]
    evaluate: Callable[..., dict[str, float]]
    _save_checkpoint: Callable[[], Any]
    _make_checkpointer: Callable[[], Checkpointer]
    _make_token_counter: Callable[[], Callable[[Sequence[Any]], int] | None]
    _finished_pushes: Callable[[], AbstractContextManager[None]]


class Session(core.Session[core.Run, TFTrainerProtocol]):
    """The parts of a TFTrainer, and how they are made for TensorFlow.

    Attributes:
        world: the workers and their devices.
        model: the model as the user gave it, or the latest one from `model_init`.
        optimizer, lr_scheduler: given by the user, or created for the latest run; None before.
        has_own_optimizer: the optimizer was created by the Trainer, and the next run recreates it.
        has_own_schedule: the schedule was created by the Trainer, or by an override, and has the length of one run. A
            schedule that the user gave is used by all runs.
        strategy: places the replicas.
        objective: calls the model and computes its loss.
        engine: the compiled optimizer step; recreated by each run.
        averages: the averages of the weights of the latest run; None without the options.
    """

    data_remedy = "use tf.data with num_parallel_calls, and prefetch(tf.data.AUTOTUNE) at its end"
    world: Kept[World] = Kept()
    model: Kept[Any] = Kept()
    optimizer: Kept[Any] = Kept()
    lr_scheduler: Kept[Any] = Kept()
    has_own_optimizer: Kept[bool] = Kept()
    has_own_schedule: Kept[bool] = Kept()
    strategy: Kept[Any] = Kept()
    objective: Kept[Objective] = Kept()
    engine: Kept[TFEngine | None] = Kept()
    averages: Kept[WeightAverages | None] = Kept()

    @property
    def world_size(self) -> int:
        return 1  # signals are not shared: one to any worker ends the job, as the strategy needs all workers

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas that share an optimizer step, over all workers."""
        return int(self.strategy.num_replicas_in_sync)

    # ---- lifecycle

    @contextmanager
    def lock(self, folder: Path) -> Iterator[FolderLock | None]:
        lock = acquire(folder) if self.world.process_index == 0 else None
        try:
            yield lock
        finally:
            if lock is not None:
                lock.release()

    def start(self, trial: object) -> None:
        args = self.options
        check_tensorflow(args)
        if args.auto_find_batch_size and self.world.world_size > 1:
            raise UnsupportedOption(
                f"auto_find_batch_size=True is not supported with {self.world.world_size} workers, of which one alone "
                "may run out of memory: set per_device_train_batch_size, with gradient_accumulation_steps."
            )
        seed_everything(args.seed, is_deterministic=args.full_determinism, tf32=args.tf32)
        self.facade.remake_model()
        facade = self.facade
        is_overridden = any(is_own(getattr(facade, name), name) for name in ("evaluate", "get_eval_tfdataset"))
        collator = None if is_overridden else facade.data_collator
        parts.check_evaluation(args, self.model, facade.eval_dataset, collator)
        with self.strategy.scope():
            hold_generators(self.model, args.seed)
            keras_state()  # created now, so that a resume restores it before the first step

    def find_checkpoint(self, resume: str | bool | None) -> Path | None:
        return choose_checkpoint(self.options, resume)

    def open_data(self, checkpoint: Path | None) -> tuple[TFFeed, Plan]:
        args = self.options
        source = self.open_source()
        if args.nonfinite_policy == "rollback":
            source.check_rewind()
        feed = TFFeed(
            source,
            accumulation=args.gradient_accumulation_steps,
            label_names=args.label_names,
            ignore_data_skip=args.ignore_data_skip,
        )
        return feed, self.make_plan(source)

    def open_source(self) -> Source:
        """Returns the source of the training batches."""
        return source_of_batches(self.facade.get_train_tfdataset())

    def make_plan(self, source: Source) -> Plan:
        """Returns the plan of a run over a source."""
        return resolve(
            self.options,
            world_size=self.num_replicas,
            micro_batches_per_epoch=source.num_batches,
            samples_per_epoch=source.num_samples,
        )

    def begin_state(self, plan: Plan, checkpoint: Path | None, trial: object) -> TrainerState:
        is_first = self.world.process_index == 0
        is_local = self.world.local_process_index == 0
        state = begin_state(plan, checkpoint, is_local_process_zero=is_local, is_world_process_zero=is_first)
        if self.options.eval_strategy != "no":
            state.num_eval_samples = parts.evaluation_samples(self.facade.eval_dataset)
        return state

    def begin_mark(self, folder: Path, checkpoint: Path | None) -> RunMark:
        mark = begin_run(folder, checkpoint, self.state.global_step, folders.list_checkpoints(folder))
        if self.world.process_index == 0:
            report_kept(folder, mark, checkpoint)
        return mark

    def restore_position(self, feed: TFFeed, plan: Plan, checkpoint: Path) -> Plan:
        with wrap_load_error(checkpoint):
            restored, self.state.max_steps = restore_position(
                feed,
                plan,
                checkpoint,
                read_progress(checkpoint),
                global_step=self.state.global_step,
                arguments=self.options.to_sanitized_dict(),
                warmup_steps=self.options.get_warmup_steps,
            )
        return adapt_intervals(self.state, self.options, plan, restored)

    @contextmanager
    def surroundings(self, plan: Plan) -> Iterator[None]:
        with self.facade._finished_pushes(), in_precision(self.model, plan.precision):
            yield

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, plan: Plan, feed: TFFeed, signals: StopSignals, watchdog: None, folder: Path) -> core.Run:
        self.prepare_optimizer(plan)
        # TensorFlow has no device events for timing, so the host's clock measures the wait for results
        kinds = {device.device_type for device in tf.config.list_logical_devices()}
        ledger = Ledger(waits_unseen=bool(kinds & {"GPU", "TPU"}) and not self.options.use_cpu)
        self.engine = self.make_engine(plan, ledger)
        self.averages = make_averages(self.options, plan, self.model, self.optimizer, self.world.world_size)
        assert self.run_mark is not None
        return core.Run(plan, feed, self.engine, signals, self.run_mark, folder, ledger=ledger)

    def prepare_optimizer(self, plan: Plan) -> None:
        """Creates the optimizer if there is none, and its variables; with float16, adds loss scaling."""
        if self.has_own_optimizer:
            self.optimizer, self.has_own_optimizer = None, False
            if self.has_own_schedule:  # it had the length of the previous run
                self.lr_scheduler, self.has_own_schedule = None, False
        given = self.lr_scheduler
        with self.strategy.scope():
            self.facade.create_optimizer_and_scheduler(plan.max_steps)
            self.has_own_schedule |= self.lr_scheduler is not given
            if needs_loss_scale(self.model, self.optimizer, plan.precision):
                self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
            build = getattr(self.optimizer, "build", None)
            if callable(build) and not getattr(self.optimizer, "built", False):
                build(self.optimized_variables())
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler

    def optimized_variables(self) -> list[Any]:
        """Returns the variables for which the optimizer holds state."""
        return list(self.model.trainable_variables)

    def make_engine(self, plan: Plan, ledger: Ledger) -> TFEngine:
        """Returns the engine of a run."""
        return TFEngine(
            strategy=self.strategy,
            objective=self.objective,
            optimizer=self.optimizer,
            training_step=self.facade.training_step,
            apply_gradients=self.facade.apply_gradients,
            distributed_training_steps=self.facade.distributed_training_steps,
            max_grad_norm=plan.max_grad_norm or math.inf,  # infinity: the norm is logged even without clipping
            skips_non_finite=plan.nonfinite_policy == "skip",
            is_retried=plan.auto_find_batch_size,
            xla=self.options.xla,
            watch=make_watch(self.options, self.strategy, self.model),
            ledger=ledger,
        )

    def restore(self, run: core.Run, checkpoint: Path | None) -> Loop:
        progress: Mapping[str, Any] = {}
        with wrap_load_error(checkpoint):
            if checkpoint is not None:
                progress = read_progress(checkpoint)
                self.restore_items(run, checkpoint, progress)
            run.begin_at(self.state)
            loop = self.make_loop(run, self.hooks(run, progress), NothingPending())
            if checkpoint is not None:
                is_epoch_open = progress.get("is_epoch_open") is True
                unlogged, skipped = read_unlogged(checkpoint, progress)
                evaluation = progress.get("evaluation")
                loop.resume(unlogged, skipped, progress.get("micro_batches"), is_epoch_open, evaluation)
        return loop

    def restore_items(self, run: core.Run, checkpoint: Path, progress: Mapping[str, Any]) -> None:
        """Restores everything that the checkpoint holds, except the position in the data."""
        arguments = self.options.to_sanitized_dict()
        trace_again(run.engine, arguments, progress)  # first: the restore resets random numbers drawn while tracing
        run.engine.uncounted_draws.tell()
        self.facade._make_checkpointer().restore(checkpoint, progress)
        if self.averages is not None:
            self.averages.restore(checkpoint, self.state.global_step)
        else:
            warn_of_average(checkpoint)
        for name, is_requested in requested_actions(self.state).items():
            setattr(self.control, name, is_requested)
        forget_other_best(self.state, progress, arguments)
        forget_other_count(self.state, progress, arguments)
        if self.world.process_index == 0:
            has_variable = steered.TFSettings(self.optimizer, self.lr_scheduler, 1).has_variable
            report_changes(checkpoint, progress, arguments, ("learning_rate",) if has_variable else ())
        announce_resume(self.state, checkpoint)

    def settings(self, run: core.Run) -> steered.TFSettings:
        return steered.TFSettings(self.optimizer, self.lr_scheduler, self.world.world_size)

    def evaluation_obstacle(self) -> str | None:
        return "the run has no evaluation data" if self.facade.eval_dataset is None else None

    def describe(self, run: core.Run) -> RunFacts:
        lines: tuple[str, ...] = ()
        if self.options.save_in_background and run.plan.save_strategy != "no":
            lines = ("Training waits for each checkpoint to be written: TensorFlow writes variables where they are.",)
        return RunFacts(
            num_trainable=count_numbers(self.model.trainable_variables),
            model=type(self.model).__name__,
            num_parameters=count_numbers(self.model.variables),
            device=self.world.device.rpartition("device:")[2],
            num_samples=run.feed.source.num_samples,
            record={"strategy": type(self.strategy).__name__},
            lines=lines,
            describe_parts=partial(self.describe_parts, run.engine),
        )

    def describe_parts(self, engine: TFEngine) -> list[str]:
        """Returns the lines of the header about the optimizer and the memory."""
        if self.has_own_optimizer and self.has_own_schedule:
            rate, schedule = self.options.learning_rate, str(self.options.lr_scheduler_type)
        else:
            schedule = "constant" if self.lr_scheduler is None else type(self.lr_scheduler).__name__
            rate = engine.learning_rate()
        return header.describe_parts(self.model, self.optimizer, rate, schedule)

    def open(self, run: core.Run) -> AbstractContextManager[None]:
        return averaging(self.averages, run.engine, self.callback_handler)

    def close(self, run: core.Run) -> None:
        folders.recover(run.folder, logger.info)

    def settle(self, run: core.Run, train_loss: float) -> float:
        if run.signals.requested is None:
            self.finalize_weights()
        num_updates = self.state.global_step - run.first_step
        if num_updates and not is_finite(self.model):
            logger.error("The weights hold inf or NaN: the training loss is given as NaN. See nonfinite_policy.")
            train_loss = math.nan
        if run.first_step and num_updates:
            logger.warning(
                "The training loss, %.6g, is the mean over the %d optimizer steps since the resume at step %d; earlier "
                "ones are in state.log_history.",
                train_loss,
                num_updates,
                run.first_step,
            )
        return train_loss

    def finalize_weights(self) -> None:
        """Sets the model's weights to the averages of an optimizer with use_ema=True, as `fit` does at its end."""
        finalize = getattr(self.optimizer, "finalize_variable_values", None)
        if callable(finalize):
            with self.strategy.scope():
                finalize(self.model.trainable_variables)

    def complete_saves(self, run: core.Run) -> None:
        """Leaves the average, if any, in the model; each checkpoint was complete when its save returned."""
        if self.averages is not None:
            self.averages.adopt()

    def load_best(self, checkpoint: Path) -> bool:
        checkpoint = placed(self.options, checkpoint)
        problems = folders.verify(checkpoint)
        if problems:
            reason = "; ".join(problems[:3])
            logger.error("The best model was not loaded, the final weights are kept: %s: %s.", checkpoint, reason)
            return False
        logger.info("Loading the best model, %s (%s).", checkpoint, self.state.best_metric)
        restore_variables(checkpoint, self.model)
        return True

    # ---- what the loop calls

    def hooks(self, run: core.Run, progress: Mapping[str, Any]) -> Hooks:
        """Returns the hooks of a run's loop.

        Args:
            progress: contents of the `progress.json` that the run resumes from; empty without a checkpoint.
        """
        folder = run.folder if self.options.should_save else None
        return Hooks(
            log=self.facade.log,
            act=partial(self.act, run),
            evaluate=partial(self.evaluate_in_run, run),
            save=partial(self.save_in_run, run),
            record=keep_journal(run.retry_writer, folder, self.state.global_step, progress),
            snapshot=lambda: self.rollback(run, folder).take_snapshot(self.state),
            rewind=partial(self.rewind, run, folder),
            count=self.counter(),
        )

    def rollback(self, run: core.Run, folder: Path | None) -> Rollback:
        """Returns the rollback of everything that training changes, except the loop, which rewinds itself."""
        return Rollback(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.lr_scheduler,
            callback_handler=self.callback_handler,
            feed=run.feed,
            retry_writer=run.retry_writer,
            folder=folder,
        )

    def rewind(self, run: core.Run, folder: Path | None, snapshot: Snapshot, bad: UpdateRow) -> None:
        """Restores a snapshot; the samples of the bad step will be skipped."""
        self.state.take_back(snapshot.state)
        self.rollback(run, folder).rewind(snapshot, bad)

    def counter(self) -> Callable[[Sequence[Any]], None] | None:
        """Returns a function that adds the input tokens of a window to the state; None if they are not counted."""
        count = self.facade._make_token_counter()
        if count is None:
            return None

        def add(batches: Sequence[Any]) -> None:
            self.state.num_input_tokens_seen += count(batches)

        return add

    def act(self, run: core.Run) -> None:
        """Logs, evaluates and saves if due."""
        assert run.loop is not None
        if run.lock is not None:
            run.lock.check()
        run.loop.log_evaluate_save()

    def evaluate_in_run(self, run: core.Run, skip_scheduler: bool) -> dict[str, float]:
        """Evaluates during a run, and steps a schedule that depends on a metric."""
        with run.evaluation.in_progress(CallEffects(self.model)):
            metrics = self.facade.evaluate()
        call_own_event(self.callback_handler, "on_sets_evaluated", self.args, self.state, self.control)
        if not skip_scheduler and isinstance(self.lr_scheduler, FollowingSchedule):
            name = run.plan.metric_for_best_model or "loss"
            self.lr_scheduler.step(best_metric_value(metrics, name), self.optimizer)
        return metrics

    def save_in_run(self, run: core.Run) -> bool:
        """Writes a checkpoint; returns True if it is complete. An overridden `_save_checkpoint` may return None."""
        run.engine.uncounted_draws.tell()
        is_there = self.facade._save_checkpoint() is not False
        if self.options.should_save and is_there:
            self.claim(run)
        return is_there


def session_of(facade: object, phases: object) -> Session:
    """Returns the session of a call: that of training phases, whose module is imported only if there are any."""
    if not phases:
        return Session(facade)
    made: Session = importlib.import_module("paceline.tensorflow.phases.session").PhasedSession(facade)
    return made


def choose_checkpoint(args: Any, resume: str | bool | None) -> Path | None:
    """Returns the checkpoint to resume from: the named one, else the newest intact one in `output_dir`, if any.

    Resuming by default matches the TFTrainer of transformers; `resume_from_checkpoint=False` starts over.

    Raises:
        ValueError: the named checkpoint is damaged, or True was given and there is no checkpoint.
    """
    folder = output_folder(args)
    wanted = args.resume_from_checkpoint if resume is None else resume
    if wanted is None:
        folders.recover(folder, logger.warning)
        found = folders.newest_valid(folder, logger.warning)
        if found is not None:
            logger.warning(
                "Resuming from %s. train(resume_from_checkpoint=False) begins anew; so does another output_dir.", found
            )
        return found
    found = find_checkpoint(wanted, args.output_dir, args.output_store)
    return None if found is None else placed(args, found)


def make_watch(args: Options, strategy: object, model: object) -> Watch | None:
    """Returns the watch for inf and NaN; None if `debug` does not request it.

    Raises:
        UnsupportedOption: the strategy is a TPU's, which cannot call the host during a step.
    """
    if "underflow_overflow" not in args.debug:
        return None
    if type(strategy).__name__.startswith("TPU"):
        raise UnsupportedOption(
            "debug='underflow_overflow' is not supported on a TPU, which reports nothing before a step has ended: "
            "try the same batches with use_cpu=True, or leave it out."
        )
    return Watch(model)


def is_finite(model: Any) -> bool:
    """True if all trainable weights are finite."""
    found = [tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(plain(v)))) for v in model.trainable_variables]
    return bool(tf.reduce_all(tf.stack(found)))
