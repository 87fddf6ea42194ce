"""Factories of the parts of a Trainer."""

from __future__ import annotations

import copy
import importlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.packing import JOINING, budget_of, order_of, packing_of, row_length_of, sampling_of, tokens_of
from paceline.args.places import as_given, output_folder
from paceline.args.sharding import wants_shards
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.memory_stages import MemoryStages
from paceline.checkpoint import output_store
from paceline.checkpoint.retention import Retention, retention_of
from paceline.core.events import CallbackHandler, TrainerCallback, close_run, has_listener
from paceline.core.log_text import LogText
from paceline.core.methods import is_ours
from paceline.core.optional import LateModule
from paceline.core.outputs import EvalLoopOutput, PredictionOutput
from paceline.core.state import TrainerControl
from paceline.core.worker_watch import WorkerWatch
from paceline.pytorch.checkpoint.checkpointer import Checkpointer, SaveHooks, SaveSettings
from paceline.pytorch.checkpoint.full_format import FullFormat
from paceline.pytorch.checkpoint.items import Contents, Format
from paceline.pytorch.checkpoint.model_files import ModelFiles, load_weights
from paceline.pytorch.checkpoint.saves import Saves
from paceline.pytorch.data.lengths import length_of
from paceline.pytorch.data.loading import loader_length, make_loader
from paceline.pytorch.distributed.simulated import check_real
from paceline.pytorch.evaluation import predictor
from paceline.pytorch.evaluation.batch_predictor import BatchPredictor
from paceline.pytorch.evaluation.prediction_buffer import EvaluationOptions, expected_bytes
from paceline.pytorch.evaluation.predictor import EvaluationLoop, Evaluator
from paceline.pytorch.loaders import LoaderFactory, LoaderSettings
from paceline.pytorch.model.operations import measurer, token_counter
from paceline.pytorch.model.prepare import edited_for_evaluation
from paceline.pytorch.model.reductions import LossReduction
from paceline.pytorch.model.signature import innermost
from paceline.pytorch.optim.modes import evaluation_weights
from paceline.pytorch.sync import Measure
from paceline.pytorch.validation import ModelFacts, read_model

if TYPE_CHECKING:
    from torch import nn

    from paceline.checkpoint.remote_sync import Policy, RemoteSync
    from paceline.core import streaming
    from paceline.hub.described import CardFacts, CheckpointForm
    from paceline.predictions import augmentation as augmentations
    from paceline.predictions.augmentation import AugmentedOutput, TestTimeAugmentation
    from paceline.pytorch import model_card, packing
    from paceline.pytorch.checkpoint import sharded_format
    from paceline.pytorch.data import token_counts
    from paceline.pytorch.evaluation import augmentation as tensor_augmentation
    from paceline.pytorch.short_runs import batch_search, trial_run
    from paceline.pytorch.step_parts import token_terms
    from paceline.pytorch.trainer import Trainer
else:
    augmentations = LateModule("paceline.predictions.augmentation")
    tensor_augmentation = LateModule("paceline.pytorch.evaluation.augmentation")
    batch_search = LateModule("paceline.pytorch.short_runs.batch_search")
    model_card = LateModule("paceline.pytorch.model_card")
    packing = LateModule("paceline.pytorch.packing")
    sharded_format = LateModule("paceline.pytorch.checkpoint.sharded_format")
    streaming = LateModule("paceline.core.streaming")
    token_counts = LateModule("paceline.pytorch.data.token_counts")
    token_terms = LateModule("paceline.pytorch.step_parts.token_terms")
    trial_run = LateModule("paceline.pytorch.short_runs.trial_run")

Result = TypeVar("Result")

# ---- the model


def model_facts_of(trainer: Trainer) -> ModelFacts:
    """Returns the facts of the model, and the parts that depend on them."""
    return read_model(
        trainer.model,
        options=trainer._own_options,
        teacher=trainer.teacher,
        processor=trainer.processing_class,
        compute_loss=trainer.compute_loss,
        compute_loss_func=trainer.compute_loss_func,
        label_names=trainer.args.label_names,
        loss_weight=trainer._own_options.loss_weight,
        smoothing=trainer.args.label_smoothing_factor,
        loss_is_scaled=trainer.loss_is_scaled_for_ga,
        linear_cross_entropy=trainer._own_options.linear_cross_entropy,
    )


def card_facts_of(trainer: Trainer) -> CardFacts:
    """Returns the facts for the model's card."""
    return model_card.card_facts(
        trainer.strategy.unwrap(trainer.model),
        plan=trainer._plan(),
        num_shares=trainer.strategy.mesh.data_size,
        global_batch_size=trainer.get_total_train_batch_size(trainer.args),
        optimizer=model_card.optimizer_of(trainer.optimizer),
        eval_dataset=trainer.eval_dataset,
    )


def checkpoint_form() -> CheckpointForm:
    """Returns the files of a checkpoint that make up the model, and those that only a resume needs."""
    return model_card.CHECKPOINT_FORM


# ---- evaluation


def evaluator_of(trainer: Trainer) -> Evaluator:
    """Returns the evaluator of the Trainer's model."""
    args, run = trainer._own_options, trainer.run
    contexts: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(evaluation_weights, trainer.optimizer, trainer.is_in_train, trainer.averages)
    ]
    if trainer.edits is None:  # otherwise training has already edited the model
        contexts.append(partial(edited_for_evaluation, trainer.model, args))
    if run is None:  # a training run has its own watch
        contexts += [WorkerWatch, partial(closed_after_error, trainer)]

    def keeps_workers(loader: object) -> bool:
        return run is not None and (run.loaders.holds(loader) or loader is run.feed.loader)

    return Evaluator(
        make_loop=partial(evaluation_loop_of, trainer),
        contexts=contexts,
        keeps_workers=keeps_workers,
        batch_size=args.eval_batch_size,
        loss_only=args.prediction_loss_only,
        reports_preparation=not trainer.is_prepared,
    )


@contextmanager
def closed_after_error(trainer: Trainer) -> Iterator[None]:
    """Lets the displays of an evaluation without a run close if it fails."""
    try:
        yield
    except BaseException:
        close_run(trainer.callback_handler, trainer.args, trainer.state, trainer.control)
        raise


def evaluation_loop_of(trainer: Trainer, **changes: Any) -> EvaluationLoop:
    """Returns the loop over the batches of an evaluation, with hooks bound to the instance's current methods.

    Args:
        trainer: the Trainer.
        changes: arguments of the loop that replace the Trainer's.
    """
    check_real("An evaluation", trainer.world)
    options = evaluation_options_of(trainer)
    generates = getattr(trainer.args, "predict_with_generate", False)
    keeps_logits = is_ours(trainer.prediction_step) and not generates and trainer.preprocess_logits_for_metrics is None
    expect = partial(expected_bytes, trainer.model, label_names=trainer.label_names, dtype=options.dtype)
    signals = trainer.run.signals if trainer.run is not None else None

    def on_step() -> None:
        fire = trainer.callback_handler.fire
        trainer.control = fire("on_prediction_step", trainer.args, trainer.state, trainer.control)

    kind: Callable[..., EvaluationLoop] = EvaluationLoop
    if trainer.world.is_distributed:
        distributed = importlib.import_module("paceline.pytorch.evaluation.distributed")  # unused with one process
        name = "PipelineEvaluation" if trainer.strategy.runs_windows else "DistributedEvaluation"
        own: dict[str, Any] = {"world": trainer.world, "signals": signals, "compute_loss": trainer.compute_loss}
        kind = partial(getattr(distributed, name), **own, objective=trainer.objective)
    given = {
        "model": trainer.strategy.evaluation_model(trainer.model_wrapped),
        "strategy": trainer.strategy,
        "normalizer": trainer.loss_normalizer,
        "prediction_step": trainer.prediction_step,
        "count_items": item_counter_of(trainer),
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits": trainer.preprocess_logits_for_metrics,
        "options": options,
        "name_inputs": trainer.objective.name_inputs,
        "on_step": on_step,
        "is_stopping": lambda: signals is not None and signals.requested is not None and signals.stops_evaluation,
        "expect": expect if keeps_logits else None,
        "augmented": trainer.augmented,
    }
    if trainer._own_options.log_token_metrics and trainer.augmented is None:  # augmentation combines several passes
        given["token_metrics"] = token_terms.evaluation_metrics(trainer.strategy)
    return kind(**{**given, **changes})


def metrics_of(
    trainer: Trainer, output: EvalLoopOutput, prefix: str, start: float, loader: object, dataset: object
) -> dict[str, float]:
    """Returns the metrics of an evaluation, with those that callbacks add, and warns of missing ones.

    See `paceline.pytorch.within_evaluation.fire`.

    Args:
        output: the result of the loop.
        prefix: prefix of the metric names.
        start: the time at which it began.
        loader: its batches.
        dataset: its dataset, or a name; None: the Trainer's.
    """
    computes, label_names = trainer.compute_metrics, trainer.label_names or trainer.objective.label_names
    streams = trainer.args.prediction_loss_only or trainer.args.batch_eval_metrics or streaming.is_streaming(computes)
    predictor.warn_of_gaps(output, prefix, label_names, computes is not None and not streams)
    metrics = predictor.timed_metrics(output, prefix, start, loader_length(loader))
    if has_listener(trainer.callback_handler, "on_within_evaluation"):
        importlib.import_module("paceline.pytorch.within_evaluation").fire(trainer, loader, dataset, prefix, metrics)
    return metrics


def augmented_call(
    trainer: Trainer, augmentation: TestTimeAugmentation, evaluate: Callable[[], Result]
) -> tuple[Result, tensor_augmentation.TensorSteps]:
    """Returns the result of an evaluation or a prediction with augmentation, and the steps that were run.

    Raises:
        UnsupportedOption: the model is split into pipeline stages, or generates.
        TypeError: `augmentation` is something else.
        ValueError: an overridden `evaluation_loop` did not use the augmentation.
    """
    steps = tensor_augmentation.TensorSteps(augmentation)
    if trainer.strategy.runs_windows or getattr(trainer.args, "predict_with_generate", False):
        obstacle = "a pipeline" if trainer.strategy.runs_windows else "predict_with_generate=True"
        raise UnsupportedOption(f"augmentation={augmentation!r} is not supported with {obstacle}: leave it out.")
    before = trainer.augmented
    trainer.augmented = steps
    try:
        result = evaluate()
    finally:
        trainer.augmented = before
    steps.check_was_used("evaluation_loop", "Trainer")
    return result, steps


def augmented_prediction(
    trainer: Trainer, augmentation: TestTimeAugmentation, predict: Callable[[], PredictionOutput]
) -> AugmentedOutput:
    """Returns the result of a prediction with augmentation."""
    result: AugmentedOutput = augmentations.AugmentedOutput.of(*augmented_call(trainer, augmentation, predict))
    return result


def evaluation_options_of(trainer: Trainer) -> EvaluationOptions:
    """Returns the options of an evaluation, from the arguments."""
    args = trainer._own_options
    dtype = None
    if args.bf16_full_eval:
        dtype = torch.bfloat16
    elif args.fp16_full_eval:
        dtype = torch.float16
    return EvaluationOptions(
        concatenate=args.eval_do_concat_batches,
        streaming=args.batch_eval_metrics or streaming.is_streaming(trainer.compute_metrics),
        include=tuple(args.include_for_metrics or ()),
        host_every=args.eval_accumulation_steps or 1,
        dtype=dtype,
        spill_bytes=None if math.isinf(args.eval_spill_gb) else int(args.eval_spill_gb * 2**30),
        spill_folder=str(output_folder(args)),
        extra_rows=() if trainer.augmented is None else augmentations.EXTRA_ROWS,
    )


def batch_predictor_of(trainer: Trainer) -> BatchPredictor:
    """Returns the batch predictor that the default prediction step uses."""
    return BatchPredictor(
        objective=trainer.objective,
        label_names=trainer.label_names,
        requires_all_labels=bool(trainer.args.label_names),
        can_return_loss=trainer.can_return_loss,
        autocasts=trainer.strategy.precision.autocasts,
        count_items=item_counter_of(trainer),
        prepare_inputs=trainer._prepare_inputs,
        compute_loss=trainer.compute_loss,
        forward_context=trainer.compute_loss_context_manager,
    )


def item_counter_of(trainer: Trainer) -> Callable[[Sequence[Any]], Any]:
    """Returns `(batches) -> num_items_in_batch`; that count is None if no loss is divided by it."""
    return lambda batches: trainer._get_num_items_in_batch(list(batches), trainer.world.device)


# ---- data


def loaders_of(trainer: Trainer) -> LoaderFactory:
    """Returns the factory of loaders and samplers."""
    args, run = trainer._own_options, trainer.run
    settings = LoaderSettings(
        train_batch_size=args.train_batch_size,
        eval_batch_size=args.eval_batch_size,
        accumulation=args.gradient_accumulation_steps,
        sampling=order_of(args),
        # predictions of separate batches cannot be restored to the dataset's order
        eval_sampling=sampling_of(args) if args.eval_do_concat_batches else "sequential",
        seed=trainer._data_seed,
        length_column=args.length_column_name,
        model_input_name=trainer._model_input_name,
        drop_last=args.dataloader_drop_last,
        accelerator=args.accelerator_config,
        budget=budget_of(args),
    )
    return LoaderFactory(
        settings=settings,
        world=trainer.world,
        strategy=trainer.strategy,
        make_loader=partial(make_loader, args=args),
        collate=trainer.data_collator,
        filter_collator=trainer._get_collator_with_removed_columns,
        filter_dataset=trainer._remove_unused_columns,
        kept=run.loaders if run is not None and args.dataloader_persistent_workers else None,
        resumed_batch_size=trainer._resumed_batch_size,
        find_packing=trainer._find_packing,
        source_column=args.loss_by_source,
    )


def find_packing(trainer: Trainer) -> packing.Packing | None:
    """Returns the packing of training batches, determined once per model; None without packing."""
    args, known = trainer._own_options, trainer._packing
    kind = packing_of(args)
    if kind not in JOINING:
        return None
    length = row_length_of(args) if kind == "pack" else None
    if known is not None and known.model is trainer.model and known.asked == (kind, length):
        return known
    trainer._packing = found = packing.find_packing(
        trainer.model,
        trainer.compute_loss,
        kind=kind,
        length=length,
        pad_token_id=getattr(trainer.processing_class, "pad_token_id", None),
        is_compiled=args.torch_compile,
        is_half=trainer.strategy.precision.autocasts,
        strategy=trainer.strategy,
    )
    normalizer = trainer.loss_normalizer
    if normalizer.known is None:  # find_packing checked that a row's loss is the token mean over its documents
        normalizer.know_of(LossReduction("tokens", shifted=found.form.shifts))
    return found


# ---- operations


def measurer_of(trainer: Trainer) -> Measure | None:
    """Returns `(micro-batches) -> counts`; None if nothing is counted."""
    padding, found = getattr(trainer.processing_class, "pad_token_id", None), trainer._find_packing()
    count_tokens = token_counter(
        str(trainer.args.include_num_input_tokens_seen),
        getattr(trainer.model, "main_input_name", "input_ids"),
        padding,
        None if found is None else partial(token_counts.num_filling, form=found.form),
    )
    return measurer(innermost(trainer.model), trainer.floating_point_ops, count_tokens, padding_counter_of(trainer))


def padding_counter_of(trainer: Trainer) -> token_counts.PaddingCounter | None:
    """Returns `(batch) -> (useful tokens, all tokens)`; None without packing or a token budget."""
    args, found, tokens = trainer._own_options, trainer._find_packing(), tokens_of(trainer._own_options)
    if tokens is None and packing_of(args) is None:
        return None
    pad_token_id = getattr(trainer.processing_class, "pad_token_id", None)
    name = getattr(trainer.model, "main_input_name", "input_ids")
    return token_counts.PaddingCounter(name, pad_token_id, tokens, None if found is None else found.form)


# ---- checkpoints


def checkpointer_of(trainer: Trainer) -> Checkpointer:
    """Returns the checkpointer of the Trainer's current state."""
    args, run = trainer._own_options, trainer.run
    saves = run.saves if run is not None else Saves()
    contents = Contents(
        items=trainer._make_session().items(),
        strategy=trainer.strategy,
        world=trainer.world,
        is_training=trainer.is_in_train,
        save_only_model=args.save_only_model,
    )
    chosen: Format = FullFormat(contents, saves)
    if run is not None and wants_shards(args):  # checkpoints outside of a run are full
        chosen = sharded_format.ShardedFormat(contents, saves, args.ddp_timeout_delta)
    return Checkpointer(
        contents=contents,
        format=chosen,
        saves=saves,
        in_run=run is not None,
        state=trainer.state,
        log_text=run.log_text if run is not None else LogText(),
        handler=trainer.callback_handler,
        read_control=lambda: trainer.control,
        read_mark=lambda: trainer.run_mark,
        mark_saved=run.mark_now if run is not None else None,
        hooks=save_hooks_of(trainer),
        settings=SaveSettings(
            should_save=args.should_save,
            push_to_hub=args.push_to_hub,
            in_background=args.save_in_background,
            all_rows=args.save_full_log_history,
            retention=retention_of(args),
            describe_arguments=args.to_sanitized_dict,
            restores_arguments=args.restore_callback_states_from_checkpoint,
            reports_changes=trainer.reports_changes,
        ),
    )


def save_hooks_of(trainer: Trainer) -> SaveHooks:
    """Returns the instance's current methods that write and load the parts of a checkpoint."""

    def fire_saved() -> None:
        run = trainer.run
        control = run.loop.control if run is not None and run.loop is not None else trainer.control
        trainer.control = trainer.callback_handler.fire("on_save", trainer.args, trainer.state, control)
        trainer._share_control()

    return SaveHooks(
        owner=type(trainer).__name__,
        save_checkpoint=trainer._save_checkpoint,
        save_model=trainer.save_model,
        save=trainer._save,
        save_optimizer_and_scheduler=trainer._save_optimizer_and_scheduler,
        save_scaler=trainer._save_scaler,
        save_rng_state=trainer._save_rng_state,
        load_optimizer_and_scheduler=trainer._load_optimizer_and_scheduler,
        load_scaler=trainer._load_scaler,
        load_rng_state=trainer._load_rng_state,
        load_best_model=trainer._load_best_model,
        name_checkpoint=partial(as_given, trainer.args),
        store_flos=trainer.store_flos,
        push=trainer._push_from_checkpoint,
        fire_saved=fire_saved,
    )


def load_weights_of(trainer: Trainer, model: nn.Module | None, checkpoint: str) -> list[str]:
    """Loads the weights of a checkpoint into a model; None: the Trainer's. Returns what there is to warn of."""
    return load_weights(trainer.strategy, trainer.model if model is None else model, checkpoint)


def weights_to_save(trainer: Trainer) -> AbstractContextManager[None]:
    """Returns a context in which the model has the weights that `save_model` writes: those of an average, if any."""
    average = trainer.averages if trainer.is_in_train else None
    return average.applied() if average is not None else nullcontext()


def model_files_of(trainer: Trainer) -> ModelFiles:
    """Returns the writer of the Trainer's model files."""
    args, run, edits = trainer._own_options, trainer.run, trainer.edits
    processing_class = trainer.processing_class
    if processing_class is None:  # the tokenizer that pads the batches
        processing_class = getattr(trainer.data_collator, "tokenizer", None)
    return ModelFiles(
        model=trainer.model,
        strategy=trainer.strategy,
        world=trainer.world,
        saves=run.saves if run is not None else Saves(),
        should_save=args.should_save,
        processing_class=processing_class,
        describe_arguments=args.to_sanitized_dict,
        as_given=edits.as_given if edits is not None else nullcontext,
    )


def remote_sync_of(trainer: Trainer) -> RemoteSync | None:
    """Starts mirroring the output folder if there is an `output_store` and this is the main process; else None."""
    args = trainer._own_options
    if args.output_store is None or not trainer.is_world_process_zero():
        return None
    reference = weakref.ref(trainer)

    def policy() -> Policy | None:
        owner = reference()
        if owner is None:
            return None
        retention = retention_of(owner._own_options) if owner.run_mark is not None else Retention()
        return retention, list(owner.state.log_history), owner.state.best_model_checkpoint, owner.run_mark

    return output_store.begin(args.output_store, output_folder(args), policy)


def copy_of(trainer: Trainer, options: dict[str, Any], callbacks: list[Any]) -> Trainer:
    """Returns a Trainer with the same model, data and methods but separate parts, for a run without lasting effects.

    Args:
        options: the options to change, including a temporary `output_dir`.
        callbacks: all callbacks of the copy.
    """
    made = copy.copy(trainer)
    made.args = replace(trainer.args, **options)
    vars(made.args).update({name: value for name, value in vars(trainer.args).items() if name not in vars(made.args)})
    made.memory_stages = MemoryStages(False, trainer.world.device.type)
    made.remote_sync = None
    made.lr_scheduler = None
    made.strategy = made._make_session().make_strategy(made._plan())
    made._read_model()
    made.state, made.control = made._first_state(), TrainerControl()
    made.callback_handler = CallbackHandler(callbacks, made.model, made.processing_class, made.optimizer)
    return made


def try_run(trainer: Trainer, options: dict[str, Any], callback: TrainerCallback) -> None:
    """Trains a copy of a Trainer with other options and only the given callback, and undoes the effects.

    Args:
        options: the options that differ from those of trial runs; `max_steps` at least.
        callback: observes the run.
    """
    if trainer.world.is_distributed:  # a run would shard the model in place: shards are what is restored afterwards
        trainer._make_session().make_strategy(trainer._plan()).shard(trainer.model)
    with TemporaryDirectory() as folder, trial_run.unchanged(trainer.model, trainer.optimizer, trainer.train_dataset):
        changed = {**trial_run.OPTIONS, "output_dir": folder, **options}
        copy_of(trainer, changed, [DefaultFlowCallback(), callback]).train()


def search_batch_size(trainer: Trainer, lowest: int, highest: int, num_steps: int) -> batch_search.BatchSearch:
    """Searches for a micro-batch size; the arguments are those of `Trainer.find_batch_size`."""
    plan, count = trainer._plan(), length_of(trainer.train_dataset)
    run = batch_search.trial_runs(lambda options, clock: try_run(trainer, options, clock), num_steps, plan)
    most = highest if count is None else max(min(highest, count // plan.mesh.data_size), 1)
    is_leader = plan.mesh.is_data_leader(trainer.world.process_index)
    return batch_search.search(run, trainer.world, min(lowest, most), most, is_leader)
