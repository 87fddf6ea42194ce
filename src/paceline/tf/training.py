"""A training run with TensorFlow put together: plan, data, optimizer, engine, restore, the shared loop, the rest."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan, resolve
from paceline.core import folders
from paceline.core.contracts import Hooks
from paceline.core.journal import keep_journal
from paceline.core.loop import Loop
from paceline.core.metrics import best_metric_value, speed_metrics
from paceline.core.outbox import Outbox
from paceline.core.outputs import TrainOutput
from paceline.core.record import RECORD_NAME, write_run_record
from paceline.core.resuming import begin_state, find_checkpoint
from paceline.core.signals import StopSignals
from paceline.hub.publishing import finished_pushes
from paceline.tf import saving
from paceline.tf.arguments import check_tensorflow
from paceline.tf.counting import token_counter
from paceline.tf.engine import TFEngine, has_loss_scale
from paceline.tf.feed import TFFeed
from paceline.tf.following import FollowingSchedule
from paceline.tf.framework import keras
from paceline.tf.overflow import Watch
from paceline.tf.precision import evaluation_precision, in_precision
from paceline.tf.randomness import hold_generators, seed_everything
from paceline.tf.snapshot import rewind, take_snapshot
from paceline.tf.sources import source_of_batches
from paceline.tf.traces import trace_again

if TYPE_CHECKING:
    from paceline.tf.trainer import TFTrainer

logger = logging.getLogger(__name__)


class NothingPending:
    """Checkpoints being written behind the training: none, TensorFlow writes them at once."""

    is_due = False

    def settle(self) -> None:
        """Nothing is left to do."""


@dataclass
class Run:
    """The parts of one training run, while it lasts.

    Attributes:
        plan: as it was at the start.
        feed: hands out the data.
        engine: makes the updates.
        signals: whether the run was asked to stop.
        first_step, first_tokens: of the state at the start, more than 0 after a resume.
        loop: decides when.
        outbox: writes its journal and its record.
    """

    plan: Plan
    feed: TFFeed
    engine: TFEngine
    signals: StopSignals
    first_step: int = 0
    first_tokens: int = 0
    loop: Loop | None = None
    outbox: Outbox = field(default_factory=Outbox)


def train(trainer: TFTrainer, resume: str | bool | None) -> TrainOutput:
    """The body of `TFTrainer.train`."""
    args = trainer.args
    check_tensorflow(args)
    if args.auto_find_batch_size and trainer.world.world_size > 1:
        raise UnsupportedOption(
            f"auto_find_batch_size=True is not supported with {trainer.world.world_size} workers, of which one alone "
            "may run out of memory: set per_device_train_batch_size, with gradient_accumulation_steps."
        )
    seed_everything(args)
    trainer.remake_model()
    check_evaluations(trainer)
    with trainer.strategy.scope():
        hold_generators(trainer.model, args.seed)
    checkpoint = choose_checkpoint(args, resume)
    source = source_of_batches(trainer.get_train_tfdataset())
    feed = TFFeed(
        source,
        accumulation=args.gradient_accumulation_steps,
        label_names=args.label_names,
        ignore_data_skip=args.ignore_data_skip,
    )
    plan = resolve(
        args,
        world_size=trainer.n_replicas,
        micro_batches_per_epoch=source.num_batches,
        samples_per_epoch=source.num_samples,
    )
    trainer.state = begin_state(trainer, plan, checkpoint, None)
    progress = saving.read_progress(checkpoint) if checkpoint is not None else {}
    if checkpoint is not None:
        plan = saving.restore_position(trainer, feed, plan, checkpoint, progress)
    signals = StopSignals(args.stop_signals)
    with finished_pushes(trainer), in_precision(trainer.model, plan.precision), signals:
        prepare_optimizer(trainer, plan)
        run = Run(plan, feed, make_engine(trainer, plan), signals)
        if checkpoint is not None:
            trace_again(run.engine, args, progress)  # first: what a model's code draws while traced is put back
            saving.restore(trainer, checkpoint, progress)
        run.first_step, run.first_tokens = trainer.state.global_step, trainer.state.num_input_tokens_seen
        run.loop = make_loop(trainer, run)
        run.loop.unlogged = saving.restore_summary(progress)
        announce(trainer, run)
        with running(trainer, run):
            run.loop.run()
            output = finish(trainer, run)
    if signals.is_keyboard:
        raise KeyboardInterrupt(f"stopped at step {trainer.state.global_step}; the run can be resumed from there")
    return output


def check_evaluations(trainer: TFTrainer) -> None:
    """Tell now what the first evaluation could not have, and not when many updates have been made.

    Raises:
        ValueError: there is no data for it, or the model cannot compute in its precision.
    """
    args = trainer.args
    if str(args.eval_strategy) == "no":
        return
    if trainer.eval_dataset is None:
        raise ValueError(f"eval_strategy='{args.eval_strategy}' needs an eval_dataset: pass one to TFTrainer.")
    with in_precision(trainer.model, *evaluation_precision(args)):
        pass


def choose_checkpoint(args: Any, resume: str | bool | None) -> Path | None:
    """The checkpoint to go on from: the one named, else the newest good one in `output_dir`, if there is any.

    That a run goes on by itself is what the TFTrainer of transformers did; `resume_from_checkpoint=False` begins anew.

    Raises:
        ValueError: the one named is damaged, or True was given and there is none.
    """
    if resume is None and args.resume_from_checkpoint is None:
        folders.recover(Path(args.output_dir), logger.warning)
        found = folders.newest_valid(Path(args.output_dir), logger.warning)
        if found is not None:
            logger.warning(
                "Going on from %s. train(resume_from_checkpoint=False) begins anew; so does another output_dir.", found
            )
        return found
    return find_checkpoint(args, resume)


def prepare_optimizer(trainer: TFTrainer, plan: Plan) -> None:
    """Make the optimizer where there is none, give it its variables, and scale the loss where it is float16."""
    if trainer.has_own_optimizer:  # its schedule was as long as the run before
        trainer.optimizer = trainer.lr_scheduler = None
    with trainer.strategy.scope():
        trainer.create_optimizer_and_scheduler(plan.max_steps)
        if plan.precision == "fp16" and not has_loss_scale(trainer.optimizer):
            trainer.optimizer = keras.optimizers.LossScaleOptimizer(trainer.optimizer)
        build = getattr(trainer.optimizer, "build", None)
        if callable(build) and not getattr(trainer.optimizer, "built", False):
            build(trainer.model.trainable_variables)
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler


def make_engine(trainer: TFTrainer, plan: Plan) -> TFEngine:
    """The engine of this Trainer, its hooks bound from the instance as it is now."""
    trainer.engine = TFEngine(
        strategy=trainer.strategy,
        objective=trainer.objective,
        optimizer=trainer.optimizer,
        training_step=trainer.training_step,
        apply_gradients=trainer.apply_gradients,
        distributed_training_steps=trainer.distributed_training_steps,
        # without clipping the norm is still needed to see a gradient that is not finite
        max_grad_norm=plan.max_grad_norm or (math.inf if plan.nonfinite_policy != "warn" else 0.0),
        skips_non_finite=plan.nonfinite_policy == "skip",
        is_retried=plan.auto_find_batch_size,
        xla=trainer.args.xla,
        watch=make_watch(trainer),
    )
    return trainer.engine


def make_watch(trainer: TFTrainer) -> Watch | None:
    """What looks for inf and NaN, where `debug` asks for it.

    Raises:
        UnsupportedOption: on a TPU, which cannot ask the host on the way.
    """
    if "underflow_overflow" not in trainer.args.debug:
        return None
    if type(trainer.strategy).__name__.startswith("TPU"):
        raise UnsupportedOption(
            "debug='underflow_overflow' is not supported on a TPU, which reports nothing before an update has ended: "
            "try the same batches with use_cpu=True, or leave it out."
        )
    return Watch(trainer.model)


def make_loop(trainer: TFTrainer, run: Run) -> Loop:
    """The shared loop over this run's parts."""
    return Loop(
        args=trainer.args,
        plan=run.plan,
        state=trainer.state,
        control=trainer.control,
        handler=trainer.callback_handler,
        engine=run.engine,
        feed=run.feed,
        hooks=bind_hooks(trainer, run),
        signals=run.signals,
        saves=NothingPending(),
    )


def bind_hooks(trainer: TFTrainer, run: Run) -> Hooks:
    """What the loop calls back on this Trainer."""

    def act() -> None:
        assert run.loop is not None
        run.loop.log_evaluate_save()

    def evaluate(skip_scheduler: bool) -> dict[str, float]:
        metrics = trainer.evaluate()
        if not skip_scheduler and isinstance(trainer.lr_scheduler, FollowingSchedule):
            name = run.plan.metric_for_best_model or "loss"
            trainer.lr_scheduler.step(best_metric_value(metrics, name), trainer.optimizer)
        return metrics

    folder = Path(str(trainer.args.output_dir)) if trainer.args.should_save else None
    return Hooks(
        log=trainer.log,
        act=act,
        evaluate=evaluate,
        save=trainer._save_checkpoint,
        record=keep_journal(run.outbox, folder, trainer.state.global_step),
        snapshot=partial(take_snapshot, trainer, run.feed),
        rewind=partial(rewind, trainer, run.feed, run.outbox, folder),
        count=token_counter(trainer),
    )


def announce(trainer: TFTrainer, run: Run) -> None:
    """Say what will be done, and write it beside the outputs."""
    plan, args = run.plan, trainer.args
    logger.info("Training:\n%s", plan.describe())
    if args.save_in_background and plan.save_strategy != "no":
        logger.info("Training waits for each checkpoint to be written: TensorFlow writes variables where they are.")
    if args.should_save:
        folder = Path(str(args.output_dir))
        extra = {
            "num_trainable_parameters": sum(math.prod(v.shape) for v in trainer.model.trainable_variables),
            "resumed_at_step": run.first_step,
            "strategy": type(trainer.strategy).__name__,
        }
        seeds = {"seed": plan.seed, "data_seed": plan.data_seed}
        record: dict[str, Any] = {"args_dict": args.to_dict(), "plan_dict": plan.to_dict()}
        run.outbox.put(folder / RECORD_NAME, partial(write_run_record, folder, **record, seeds=seeds, extra=extra))


@contextmanager
def running(trainer: TFTrainer, run: Run) -> Iterator[None]:
    """While this is entered the Trainer is in training; its data is let go of at the end, whatever happens."""
    trainer.is_in_train, trainer.run = True, run
    try:
        yield
    finally:
        run.feed.close()
        run.outbox.close()
        folders.recover(Path(str(trainer.args.output_dir)), logger.info)
        trainer.is_in_train, trainer.run = False, None


def finish(trainer: TFTrainer, run: Run) -> TrainOutput:
    """Speed and loss of the whole run, and the best model if asked."""
    state, args, loop = trainer.state, trainer.args, run.loop
    assert loop is not None
    num_updates = state.global_step - run.first_step
    train_loss = loop.mean_loss(num_updates)
    metrics = speed_metrics("train", loop.start_time, num_samples=loop.num_samples, num_steps=num_updates)
    metrics["total_flos"] = state.total_flos
    metrics["train_loss"] = train_loss
    metrics.update(trainer.memory_stages.stop("train"))
    trainer.log(metrics)
    if args.load_best_model_at_end and state.best_model_checkpoint is not None and run.signals.requested is None:
        load_best(trainer, Path(state.best_model_checkpoint))
    trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
    return TrainOutput(state.global_step, train_loss, metrics)


def load_best(trainer: TFTrainer, checkpoint: Path) -> None:
    """Load the best checkpoint, or say why not: that is no reason to lose the weights of the last update."""
    problems = folders.verify(checkpoint)
    if problems:
        logger.error("The best model is not loaded, the last one stays: %s: %s.", checkpoint, "; ".join(problems[:3]))
        return
    logger.info("Loading the best model, %s (%s).", checkpoint, trainer.state.best_metric)
    saving.restore_variables(checkpoint, trainer.model)
