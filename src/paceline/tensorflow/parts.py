"""Functions that create the parts of a TFTrainer from its attributes and arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.args.places import as_given, output_folder
from paceline.checkpoint.retention import retention_of
from paceline.hub.described import CardFacts
from paceline.predictions.augmentation import AugmentedSteps, TestTimeAugmentation
from paceline.tensorflow.augmentation import ArraySteps
from paceline.tensorflow.checkpoint.resume_state import RunInProgress
from paceline.tensorflow.checkpoint.saving import Checkpointer
from paceline.tensorflow.data.sources import check_batching, is_columns
from paceline.tensorflow.evaluation import EvaluationSettings, Evaluator
from paceline.tensorflow.model_card import card_facts, num_samples
from paceline.tensorflow.model_card import optimizer_of as describe_optimizer
from paceline.tensorflow.optim.choose import SETTINGS, choose_optimizer, described_schedule
from paceline.tensorflow.optim.following import FollowingSchedule
from paceline.tensorflow.optim.optimizers import OptimizerSettings, make_optimizer
from paceline.tensorflow.optim.schedules import StepSchedule
from paceline.tensorflow.overrides import check_methods, check_step
from paceline.tensorflow.precision import evaluation_precision, in_precision
from paceline.tensorflow.token_counter import token_counter

if TYPE_CHECKING:
    from paceline.tensorflow.trainer import TFTrainer

logger = logging.getLogger(__name__)


def check_overrides(trainer: TFTrainer, step: str) -> None:
    """Refuses methods of the Trainer, or a step of its Keras model, that would never be called.

    Raises:
        UnsupportedOption: there is such a method; the message names the replacement.
    """
    check_methods(type(trainer).__name__, dir(trainer))
    check_step(trainer.model, step, partial(getattr, trainer))


# ---- evaluation data


def evaluation_samples(data: Any) -> int | None:
    """Returns the samples of one evaluation of a dataset, or of a dict of several; None if one has no known length."""
    lengths = [num_samples(each) for each in evaluation_sets(data)]
    return None if None in lengths else sum(filter(None, lengths))


def evaluation_sets(data: Any) -> list[Any]:
    """Returns the datasets of one evaluation: a dataset, or those in a dict of several."""
    return list(data.values()) if isinstance(data, dict) and not is_columns(data) else [data]


def check_evaluation(args: Any, model: object, eval_dataset: object, collator: Callable[..., Any] | None) -> None:
    """Checks before training that evaluations will work.

    Args:
        args: the arguments.
        model: the model.
        eval_dataset: the evaluation data.
        collator: the collator of evaluations; None if they make their own batches.

    Raises:
        ValueError: there is no evaluation data, or the model cannot compute in the precision of evaluations.
        UnsupportedOption: there is a collator, and an evaluation set makes its own batches.
    """
    if str(args.eval_strategy) == "no":
        return
    if eval_dataset is None:
        raise ValueError(f"eval_strategy='{args.eval_strategy}' needs an eval_dataset: pass one to TFTrainer.")
    precision = evaluation_precision(args.mixed_precision, bf16=args.bf16_full_eval, fp16=args.fp16_full_eval)
    with in_precision(model, *precision):
        pass
    for data in evaluation_sets(eval_dataset):
        check_batching(data, collator)


# ---- optimizer and schedule


def compiled_optimizer_of(trainer: TFTrainer) -> Any:
    """Returns the optimizer that the model was compiled with; None to use the one that the arguments describe."""
    args = trainer._own_options
    defaults = {field.name: field.default for field in fields(args) if field.name in SETTINGS}
    return choose_optimizer(
        trainer.model,
        optim=args.optim,
        max_grad_norm=args.max_grad_norm,
        given={
            name: getattr(args, name)
            for name, default in defaults.items()
            if getattr(args, name) not in (default, str(default))
        },
    )


def schedule_of(trainer: TFTrainer, num_training_steps: int) -> FollowingSchedule | StepSchedule:
    """Returns the schedule that the arguments describe, for a run of `num_training_steps` optimizer steps."""
    args = trainer._own_options
    return described_schedule(
        str(args.lr_scheduler_type),
        args.learning_rate,
        dict(args.lr_scheduler_kwargs or {}),  # type: ignore[arg-type]  # read from text by now
        num_training_steps=num_training_steps,
        warmup_steps=args.get_warmup_steps,
        power=args.poly_power,
    )


def optimizer_of(trainer: TFTrainer, learning_rate: object) -> Any:
    """Returns the optimizer that the arguments describe; `learning_rate` is a number or a schedule."""
    args = trainer._own_options
    described = OptimizerSettings(
        name=str(args.optim),
        options=args.optim_args,
        betas=(args.adam_beta1, args.adam_beta2),
        epsilon=args.adam_epsilon,
        weight_decay=args.weight_decay,
    )
    return make_optimizer(described, trainer.model, learning_rate)


# ---- a run


def token_counter_of(trainer: TFTrainer) -> Callable[[Sequence[Any]], int] | None:
    """Returns a function that counts the input tokens in the batches of an optimizer step; None if not requested."""
    return token_counter(
        str(trainer.args.include_num_input_tokens_seen),
        getattr(trainer.model, "main_input_name", "input_ids"),
        getattr(trainer.processing_class, "pad_token_id", None),
    )


# ---- evaluation


def evaluation_precision_of(trainer: TFTrainer) -> tuple[str, str | None]:
    """Returns the precision of evaluations, and the option that set it if it differs from that of the training."""
    args = trainer._own_options
    return evaluation_precision(args.mixed_precision, bf16=args.bf16_full_eval, fp16=args.fp16_full_eval)


def evaluator_of(trainer: TFTrainer, on_step: Callable[[], None]) -> Evaluator:
    """Returns the evaluator; it calls `on_step` after each batch."""
    args, run = trainer._own_options, trainer.run
    precision, option = evaluation_precision_of(trainer)
    return Evaluator(
        model=trainer.model,
        predictor=trainer.predictor,
        settings=EvaluationSettings(
            label_names=trainer.label_names,
            precision=precision,
            precision_option=option,
            calls_each=args.batch_eval_metrics,
            accumulation_steps=args.eval_accumulation_steps or 1,
            concatenates=args.eval_do_concat_batches,
            include=tuple(args.include_for_metrics or ()),
            spill_gb=args.eval_spill_gb,
            spill_folder=str(output_folder(args)),
        ),
        compute_metrics=trainer.compute_metrics,
        preprocess=trainer.preprocess_logits_for_metrics,
        compiled=trainer.objective.compiled if trainer.n_replicas == 1 and trainer.augmented is None else None,
        is_interrupted=lambda: run is not None and run.signals.requested is not None and run.signals.stops_evaluation,
        on_step=on_step,
        augmented=trainer.augmented,
    )


def augmented_steps_of(trainer: TFTrainer, augmentation: TestTimeAugmentation) -> AugmentedSteps:
    """Returns the steps of an evaluation with augmentation; warns of metrics that it leaves out."""
    steps = ArraySteps(augmentation)
    if trainer.objective.compiled is not None and trainer.objective.compiled.metrics is not None:
        logger.warning(
            "Metrics of compile() are left out with augmentation, as they would be those of the batches as they are: "
            "pass compute_metrics."
        )
    return steps


# ---- checkpoints


def checkpointer_of(trainer: TFTrainer) -> Checkpointer:
    """Returns the checkpointer of the current model and optimizer."""
    args = trainer._own_options
    return Checkpointer(
        folder=output_folder(args),
        name_checkpoint=partial(as_given, trainer.args),
        model=trainer.model,
        optimizer=trainer.optimizer,
        schedule=trainer.lr_scheduler,
        processing_class=trainer.processing_class,
        callback_handler=trainer.callback_handler,
        arguments=args.to_sanitized_dict(),
        retention=retention_of(args),
        all_rows=args.save_full_log_history,
        is_model_only=args.save_only_model,
        with_arguments=args.restore_callback_states_from_checkpoint,
        is_writer=trainer.is_world_process_zero(),
        process_index=trainer.world.process_index,
        averages=trainer.averages,
    )


def run_in_progress_of(trainer: TFTrainer) -> RunInProgress | None:
    """Returns the parts of the run whose states a checkpoint holds; None outside of `train`."""
    run = trainer.run
    return None if run is None else RunInProgress(run.mark_now(), run.feed, run.engine, run.loop, run.log_text)


# ---- the hub


def card_facts_of(trainer: TFTrainer) -> CardFacts:
    """Returns the facts for the model card."""
    args = trainer._own_options
    return card_facts(
        trainer.model,
        eval_dataset=trainer.eval_dataset,
        num_replicas=trainer.n_replicas,
        micro_batch_size=args.per_device_train_batch_size,
        global_batch_size=args.train_batch_size * args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        optimizer=describe_optimizer(trainer.optimizer),
    )
