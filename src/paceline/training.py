"""A training run put together and taken apart again: plan, data, model, optimizer, restore, loop, and what is left.

The steps of `train`, in order, are the functions of this file. Each calls the Trainer's public methods, so that what a
subclass overrides is what runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.args.plan import Plan, resolve
from paceline.assembly import declare_loss
from paceline.checkpoint import files
from paceline.checkpoint.named import load_foreign_optimizer, load_optimizer_shards
from paceline.checkpoint.plausible import blame
from paceline.checkpoint.shards import OPTIMIZER_FOLDER, is_sharded
from paceline.core import folders
from paceline.core.loop import Loop
from paceline.core.metrics import best_metric_value, speed_metrics
from paceline.core.outbox import Outbox
from paceline.core.outputs import TrainOutput
from paceline.core.record import RECORD_NAME, write_run_record
from paceline.core.resuming import PROGRESS_FILE, begin_state, report_changes
from paceline.core.signals import StopSignals
from paceline.counting import measurer
from paceline.data.dispatch import DispatchedLoader
from paceline.data.loading import Feed, KeptLoaders, is_split, loader_length, sample_count
from paceline.distributed.collectives import gather_objects
from paceline.distributed.memory import count_memory
from paceline.distributed.precision import make_precision
from paceline.distributed.random import enable_full_determinism, restore_rng, set_seed
from paceline.distributed.strategy import SingleDevice, choose_strategy
from paceline.distributed.watchdog import Watchdog, watching
from paceline.engine import TorchEngine
from paceline.hooks import bind_hooks
from paceline.hub.publishing import finished_pushes
from paceline.model.factory import check_trainable
from paceline.model.prepare import prepare_model
from paceline.optim.layerwise import check_run, steps_in_backward
from paceline.optim.modes import switch_optimizer
from paceline.optim.schedulers import follows_metrics
from paceline.progress import (
    kept_update_size,
    read_progress,
    restore_callbacks,
    restore_loop,
    restore_position,
)
from paceline.saving import Saves
from paceline.saving import finish as finish_saves
from paceline.sharded_saving import check_format
from paceline.shared_engine import Exchange, SharedEngine, agreeing
from paceline.shared_resuming import find_for_all
from paceline.uploads import finished_uploads
from paceline.window_engine import WindowEngine

if TYPE_CHECKING:
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """The parts of one training run, while it lasts.

    Attributes:
        plan: as it was at the start; the loop's own changes after an out-of-memory.
        feed: hands out the data.
        engine: makes the updates.
        loop: decides when.
        signals: whether the run was asked to stop.
        trial: of a hyper-parameter search, or None.
        ignore_keys: output keys that evaluation leaves out.
        first_step: `global_step` at the start, more than 0 after a resume.
        first_tokens: input tokens seen before it.
        saves: what becomes of its checkpoints.
        loaders: of its evaluations, where their workers live on.
        outbox: writes its journal and its record.
        exchange: what the processes tell each other before an update; None: there is one.
    """

    plan: Plan
    feed: Feed
    engine: TorchEngine
    signals: StopSignals
    trial: Any = None
    ignore_keys: list[str] | None = None
    first_step: int = 0
    first_tokens: int = 0
    loop: Loop | None = None
    saves: Saves = field(default_factory=Saves)
    loaders: KeptLoaders = field(default_factory=KeptLoaders)
    outbox: Outbox = field(default_factory=Outbox)
    exchange: Exchange | None = None


def train(trainer: Trainer, resume: str | bool | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
    """The body of `Trainer.train`."""
    args = trainer.args
    start(trainer, trial)
    checkpoint = find_for_all(trainer.world, args, resume)
    trainer._update_size = kept_update_size(trainer, checkpoint) if checkpoint is not None else None
    if checkpoint is not None:
        trainer._load_from_checkpoint(str(checkpoint))
    loader = trainer.get_train_dataloader()
    plan = make_plan(trainer, loader)
    feed = Feed(
        loader,
        accumulation=plan.accumulation,
        collect=partial(trainer.get_batch_samples, device=trainer.world.device),
        ignore_data_skip=args.ignore_data_skip,
    )
    trainer.state = begin_state(trainer, plan, checkpoint, trial)
    if checkpoint is not None:
        plan = restore_position(trainer, feed, plan, checkpoint)
    signals = StopSignals(args.stop_signals, trainer.world.is_shared)
    delivered, watched = finished_uploads(trainer), watching(trainer.world, args)
    with delivered, finished_pushes(trainer), edited_model(trainer), signals, watched as watchdog:
        prepare(trainer, plan)
        exchange = share(trainer, plan, feed, signals, watchdog) if watchdog is not None else None
        run = Run(plan, feed, make_engine(trainer, plan, exchange), signals, trial, ignore_keys, exchange=exchange)
        trainer.callback_handler.train_dataloader = loader
        progress = restore(trainer, checkpoint) if checkpoint is not None else None
        run.first_step, run.first_tokens = trainer.state.global_step, trainer.state.num_input_tokens_seen
        run.loop = Loop(
            args=args,
            plan=plan,
            state=trainer.state,
            control=trainer.control,
            handler=trainer.callback_handler,
            engine=run.engine,
            feed=feed,
            hooks=bind_hooks(trainer, run),
            signals=signals,
            saves=run.saves.writer,
        )
        if checkpoint is not None and progress is not None:
            with blame(checkpoint / PROGRESS_FILE):
                restore_loop(trainer, run.loop, progress)
        announce(trainer, run)
        with running(trainer, run), agreeing(trainer, exchange):
            run.loop.run()
            output = finish(trainer, run)
    if signals.is_keyboard:
        raise KeyboardInterrupt(f"stopped at step {trainer.state.global_step}; the run can be resumed from there")
    return output


def make_plan(trainer: Trainer, loader: Any) -> Plan:
    """The plan of a run over this loader; the same for all processes, of which one may have more batches."""
    if trainer.world.is_shared and not is_split(loader):
        logger.warning(
            "The training loader is %s's own, and each of the %d processes reads all of it: pass it through "
            "trainer.accelerator.prepare(), or give it a DistributedSampler.",
            type(trainer).__name__,
            trainer.world.world_size,
        )
    lengths = gather_objects(trainer.world, loader_length(loader))
    return resolve(
        trainer.args,
        world_size=trainer.world.world_size,
        local_size=trainer.world.local_size,
        micro_batches_per_epoch=None if None in lengths else max(lengths),
        samples_per_epoch=sample_count(loader),
        update_size=trainer._update_size,
    )


def share(trainer: Trainer, plan: Plan, feed: Feed, signals: StopSignals, watchdog: Watchdog) -> Exchange:
    """Let this process's windows be weighed together with those of the others."""
    exchange = Exchange(
        trainer.world,
        trainer.loss_rule,
        plan.accumulation,
        signals,
        averages=plan.average_tokens_across_devices,
        measure=measurer(trainer),
        watchdog=watchdog,
        mesh=plan.mesh,
    )
    exchange.is_served = isinstance(feed.loader, DispatchedLoader) and not trainer.world.is_first
    feed.meet, feed.collect = exchange.meet, partial(exchange.draw, feed.collect)
    noise_rank = plan.mesh.noise_rank(trainer.world.process_index)
    if noise_rank:  # the same weights everywhere, but not the same dropout
        set_seed(trainer.args.seed + noise_rank)
    return exchange


def start(trainer: Trainer, trial: Any) -> None:
    """Seed, and make a fresh model where the Trainer was given `model_init`."""
    args = trainer.args
    if str(args.eval_strategy) != "no" and trainer.eval_dataset is None:
        trainer.get_eval_dataloader()  # without data this raises now, not after hours of training
    metric = trainer._plan().metric_for_best_model
    if isinstance(trainer.eval_dataset, dict) and metric in ("loss", "eval_loss"):
        logger.warning(
            "metric_for_best_model=%r: evaluating %s gives a loss for each and no eval_loss. Name the one that "
            "decides, for instance metric_for_best_model='%s_loss'.",
            metric,
            ", ".join(map(str, trainer.eval_dataset)),
            next(iter(trainer.eval_dataset), "name"),
        )
    declare_loss(trainer)
    seed_everything(args)
    if trainer.model_init is not None:
        trainer.model = trainer.call_model_init(trial)
        trainer.optimizer, trainer.lr_scheduler = None, None
        trainer.place_model()
    check_trainable(trainer.model)


def seed_everything(args: Any) -> None:
    """The seeds and the determinism that the arguments ask for."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
    if args.tf32 is not None:
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")


@contextmanager
def edited_model(trainer: Trainer) -> Iterator[None]:
    """Make the edits of the model that the arguments ask for, and take back those that only training needs."""
    trainer.edits = prepared = prepare_model(trainer.model, trainer.args)
    for note in prepared.notes:
        logger.info(note)
    try:
        yield
    finally:
        prepared.undo()
        trainer.edits = None


def make_strategy(trainer: Trainer, plan: Plan) -> SingleDevice:
    """Where the tensors of this Trainer's runs live."""
    return choose_strategy(trainer.world, make_precision(plan.precision, trainer.world.device), trainer.args)


def prepare(trainer: Trainer, plan: Plan) -> None:
    """Give the model to the strategy, which calls the factory of optimizer and scheduler when parameters are final."""
    strategy = make_strategy(trainer, plan)
    trainer.strategy, trainer.is_prepared = strategy, True
    if trainer._created_lr_scheduler:  # its length belonged to the run before
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False

    def make_optimizer(model: torch.nn.Module) -> Any:
        trainer.create_optimizer_and_scheduler(num_training_steps=plan.max_steps)
        check_optimizer(trainer.optimizer, model)
        check_run(trainer.optimizer, str(trainer.args.optim), plan)
        return trainer.optimizer

    check_format(trainer)
    prepared = strategy.prepare(trainer.model, make_optimizer)
    if prepared.optimizer is not None:
        trainer.optimizer = prepared.optimizer
    if prepared.make_schedule is not None:
        own = prepared.make_schedule(plan.max_steps, trainer.args.get_warmup_steps(plan.max_steps))
        trainer.lr_scheduler = own if own is not None else trainer.lr_scheduler
    trainer.model_wrapped = trainer._wrap_model(prepared.model)
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Refuse an optimizer that would train something else.

    Raises:
        ValueError: it holds none of the model's parameters.
    """
    groups = getattr(optimizer, "param_groups", None)
    own = set(map(id, model.parameters()))
    if any(id(parameter) in own for parameter in getattr(optimizer, "model_parameters", ())):
        return  # which holds them in parts
    if groups is not None and not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise ValueError(
            "The optimizer holds none of the model's parameters, so training would change nothing: make it from the "
            "model that the Trainer has, or pass optimizer_cls_and_kwargs=(class, kwargs)."
        )


def make_engine(trainer: Trainer, plan: Plan, exchange: Exchange | None = None) -> TorchEngine:
    """The engine of this Trainer, its hooks bound from the instance as it is now."""
    args = trainer.args
    # without clipping the norm is still needed to see a gradient that is not finite
    max_norm = plan.max_grad_norm or (math.inf if plan.nonfinite_policy != "warn" else 0.0)
    kind: Callable[..., TorchEngine] = TorchEngine
    if exchange is not None:
        kind = partial(WindowEngine if trainer.strategy.runs_windows else SharedEngine, exchange=exchange)
    return kind(
        strategy=trainer.strategy,
        model=trainer.model_wrapped,
        optimizer=trainer.optimizer,
        scheduler=trainer.lr_scheduler,
        scheduler_follows_metrics=follows_metrics(trainer.lr_scheduler),
        training_step=trainer.training_step,
        compute_loss=trainer.compute_loss,
        prepare_inputs=trainer._prepare_inputs,
        rule=trainer.loss_rule.begin(),
        max_grad_norm=0.0 if steps_in_backward(trainer.optimizer) else max_norm,
        skips_non_finite=plan.nonfinite_policy == "skip",
        empty_cache_every=args.torch_empty_cache_steps,
    )


def announce(trainer: Trainer, run: Run) -> None:
    """Say what will be done, and write it beside the outputs."""
    plan, args = run.plan, trainer.args
    logger.info("Training:\n%s", plan.describe())
    if trainer.world.is_shared:
        memory = count_memory(trainer.model, trainer.optimizer)
        logger.info("memory     process %d: %s", trainer.world.process_index, memory.describe())
    if args.should_save:
        folder = Path(trainer._get_output_dir(run.trial))
        extra = {
            "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
            "num_trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "resumed_at_step": run.first_step,
        }
        seeds = {"seed": plan.seed, "data_seed": plan.data_seed}
        record: dict[str, Any] = {"args_dict": args.to_dict(), "plan_dict": plan.to_dict()}
        run.outbox.put(folder / RECORD_NAME, partial(write_run_record, folder, **record, seeds=seeds, extra=extra))


@contextmanager
def running(trainer: Trainer, run: Run) -> Iterator[None]:
    """While this is entered the Trainer is in training; the workers are stopped at the end, whatever happens.

    No gradient comes in from before, and none is left by an update that an error cut short.
    """
    trainer.is_in_train, trainer.run = True, run
    trainer.strategy.clear_gradients()
    trainer.model_wrapped.train()
    switch_optimizer(trainer.optimizer, "train")
    try:
        yield
    finally:
        run.feed.close()
        run.loaders.close()
        run.saves.close(Path(trainer._get_output_dir(run.trial)) if trainer.args.should_save else None)
        run.outbox.close()
        trainer.strategy.clear_gradients()
        switch_optimizer(trainer.optimizer, "eval")
        trainer.is_in_train, trainer.run = False, None


def finish(trainer: Trainer, run: Run) -> TrainOutput:
    """Speed and loss of the whole run, the best model if asked, old checkpoints away."""
    state, args, loop = trainer.state, trainer.args, run.loop
    assert loop is not None
    num_updates = state.global_step - run.first_step
    train_loss = loop.mean_loss(num_updates)
    metrics = speed_metrics("train", loop.start_time, num_samples=loop.num_samples, num_steps=num_updates)
    trainer.store_flos()
    metrics["total_flos"] = state.total_flos
    metrics["train_loss"] = train_loss
    metrics.update(trainer.memory_stages.stop("train"))
    trainer.log(metrics)
    finish_saves(trainer, Path(trainer._get_output_dir(run.trial)))
    switch_optimizer(trainer.optimizer, "eval")
    if args.load_best_model_at_end and state.best_model_checkpoint is not None and run.signals.requested is None:
        load_best(trainer, Path(state.best_model_checkpoint))
    trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
    return TrainOutput(state.global_step, train_loss, metrics)


# ---- checkpoints


def load_best(trainer: Trainer, checkpoint: Path) -> None:
    """Load the best checkpoint, or say why not: that is no reason to lose the weights of the last update."""
    problems = folders.verify(checkpoint)
    if problems:
        logger.error("The best model is not loaded, the last one stays: %s: %s.", checkpoint, "; ".join(problems[:3]))
        return
    trainer._load_best_model()


def restore(trainer: Trainer, checkpoint: Path) -> dict[str, Any] | None:
    """Everything but weights and position, which were restored before the strategy took the model.

    Returns: what the checkpoint says of the run's progress, for the loop; None in one of another library.
    """
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    trainer._load_scaler(str(checkpoint))
    progress = read_progress(checkpoint)
    restore_callbacks(trainer, checkpoint, progress)
    if trainer.reports_changes:
        report_changes(trainer, checkpoint, progress)
    trainer._load_rng_state(str(checkpoint))
    logger.info("Resuming from %s: step %d of %d.", checkpoint, trainer.state.global_step, trainer.state.max_steps)
    return progress


def load_rng_state(trainer: Trainer, checkpoint: str | None) -> None:
    """The body of `_load_rng_state`; a checkpoint without random state (`save_only_model`) is gone on from without."""
    if checkpoint is None:
        return
    state = files.load_rng(Path(checkpoint), trainer.world.process_index, trainer.world.world_size)
    if state is None:
        logger.warning("%s holds no random state: the run goes on, but not bit for bit as it would have.", checkpoint)
        return
    with blame(Path(checkpoint, files.rng_name(trainer.world.process_index, trainer.world.world_size))):
        restore_rng(state)


def load_optimizer_and_scheduler(trainer: Trainer, checkpoint: str | None) -> None:
    """The body of `_load_optimizer_and_scheduler`; what a checkpoint lacks (`save_only_model`) starts anew."""
    if checkpoint is None:
        return
    has_named = trainer.optimizer is not None and load_named_optimizer(trainer, Path(checkpoint))
    for name, target, load in (
        (files.OPTIMIZER_NAME, trainer.optimizer, files.load_optimizer),
        (files.SCHEDULER_NAME, trainer.lr_scheduler, files.load_scheduler),
    ):
        if target is trainer.optimizer and has_named:
            continue
        if Path(checkpoint, name).is_file():
            load(target, checkpoint)
            if target is trainer.optimizer:
                trainer.strategy.shard_state(target)
        else:
            logger.warning("%s holds no %s: that part of the run starts anew.", checkpoint, name)


def load_named_optimizer(trainer: Trainer, checkpoint: Path) -> bool:
    """Load the optimizer from shards, or from the files of another trainer; False: none of them is there.

    All of these go by the names of parameters.
    """
    model, optimizer = trainer.strategy.unwrap(trainer.model), trainer.optimizer
    if is_sharded(checkpoint / OPTIMIZER_FOLDER):
        load_optimizer_shards(model, optimizer, checkpoint)
        return True
    if not load_foreign_optimizer(model, optimizer, checkpoint):
        return False
    trainer.strategy.shard_state(optimizer)
    return True


def step_by_metric(scheduler: Any, metrics: dict[str, float], name: str | None) -> None:
    """Step a schedule that follows a metric (plateau, greedy)."""
    scheduler.step(best_metric_value(metrics, name or "loss"))
