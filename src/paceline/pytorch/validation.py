"""Checks the constructor arguments of a Trainer, and reads facts from the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.args.sections import DistillationSection
from paceline.core.methods import is_ours
from paceline.core.optional import LateModule
from paceline.pytorch.data.columns import find_labels
from paceline.pytorch.data.loading import is_stream
from paceline.pytorch.data.stream import with_own_position
from paceline.pytorch.model.factory import check_trainable
from paceline.pytorch.model.loss import LabelSmoother, LossNormalizer, LossReduction
from paceline.pytorch.model.objective import Objective, accepts
from paceline.pytorch.model.signature import (
    ForwardSignature,
    coupling,
    innermost,
    known_reduction,
    read_signature,
    shifts_labels,
)

if TYPE_CHECKING:
    from paceline.args.sections import Options
    from paceline.pytorch.distillation import loss as distillation
    from paceline.pytorch.distillation.loss import Distillation
    from paceline.pytorch.model import linear_loss
else:
    distillation = LateModule("paceline.pytorch.distillation.loss")
    linear_loss = LateModule("paceline.pytorch.model.linear_loss")

logger = logging.getLogger(__name__)


def check_model_given(model: object, model_init: object) -> None:
    """Checks that exactly one of `model` and `model_init` is given.

    Raises:
        RuntimeError: neither is given.
        ValueError: both are given.
    """
    if model is None and model_init is None:
        raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument; give one of the two.")
    if model is not None and model_init is not None:
        raise ValueError("`Trainer` requires either a `model` or `model_init` argument, but not both: give one.")


def check_arguments(
    *,
    model: nn.Module,
    model_init: object,
    train_dataset: object,
    eval_dataset: object,
    data_collator: object,
    optimizers: tuple[Any, Any],
    optimizer_cls_and_kwargs: object,
    compute_metrics: object,
    options: Options,
) -> None:
    """Checks that the arguments of the constructor do not contradict each other.

    Args:
        model: the module to train.
        model_init, train_dataset, eval_dataset, data_collator, optimizers, optimizer_cls_and_kwargs, compute_metrics:
            the arguments of the constructor.
        options: the options.

    Raises:
        ValueError, RuntimeError, TypeError: the message says what to change.
    """
    if data_collator is not None and not callable(data_collator):
        raise TypeError(
            "The `data_collator` should be a simple callable (a function, or an object with `__call__`); it is "
            f"{type(data_collator).__name__}."
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise RuntimeError(
            "Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible: pass one, not both."
        )
    if model_init is not None and (optimizers[0] is not None or optimizers[1] is not None):
        raise RuntimeError(
            "Passing a `model_init` is incompatible with providing the `optimizers` argument: they hold the parameters "
            "of one model, and `model_init` makes a new one at each train: pass "
            "`optimizer_cls_and_kwargs`, or override `create_optimizer`."
        )
    if train_dataset is not None:
        check_trainable(model)
    if options.eval_strategy != "no" and not options.dataloader_num_workers:
        check_streams(train_dataset, eval_dataset)
    if options.max_steps > 0:
        logger.info("max_steps is given, it will override any value given in num_train_epochs")
    if options.batch_eval_metrics and callable(compute_metrics) and not accepts(compute_metrics, "compute_result"):
        raise ValueError(
            "When using `batch_eval_metrics`, your `compute_metrics` function must take a `compute_result` boolean "
            "argument: batch_eval_metrics=True calls `compute_metrics(prediction, compute_result=...)` for each batch."
        )


def check_streams(train_dataset: object, eval_dataset: object) -> None:
    """Checks that evaluations during training do not read the stream that the training reads.

    A stream that saves its position has one position: an evaluation would begin at that of the training, and move it.
    Workers read copies, and each loader of a stream of `datasets` has a position of its own.

    Raises:
        ValueError: it is the same stream.
    """
    sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if not any(each is train_dataset for each in sets) or not is_stream(train_dataset):
        return
    if callable(getattr(train_dataset, "load_state_dict", None)) and with_own_position(train_dataset) is train_dataset:
        raise ValueError(
            f"eval_dataset and train_dataset are the same {type(train_dataset).__name__}, which holds one position: "
            "evaluations during training would move that of the training. Pass a second stream, made in the same way, "
            "or set dataloader_num_workers=1."
        )


def choose_processor(processing_class: object, tokenizer: object) -> Any:
    """Returns the Trainer's `processing_class`, given under this name or the older one.

    Raises:
        ValueError: both names are given, with different values.
    """
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise ValueError("`tokenizer` is the older name of `processing_class`: pass one of the two.")
    return tokenizer if processing_class is None else processing_class


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's forward and config, and the parts that depend on them.

    Attributes:
        signature: the parameters of `forward`.
        label_names: names under which a batch carries its labels; empty if the model takes none.
        loss_normalizer: knows or infers the reduction of the loss.
        label_smoother: smooths the targets; None: `label_smoothing_factor` is 0.
        objective: computes the default loss.
        distillation: the losses of a teacher; None without one.
    """

    signature: ForwardSignature
    label_names: list[str]
    loss_normalizer: LossNormalizer
    label_smoother: LabelSmoother | None
    objective: Objective
    distillation: Distillation | None = None


def read_model(
    model: nn.Module,
    *,
    options: Options | None = None,
    teacher: object = None,
    processor: object = None,
    compute_loss: Callable[..., Any],
    compute_loss_func: Callable[..., Any] | None,
    label_names: Sequence[str] | None,
    loss_weight: Any,
    smoothing: float,
    loss_is_scaled: bool | None,
    linear_cross_entropy: str | bool,
) -> ModelFacts:
    """Reads the model's forward and config once, and makes the parts that depend on them.

    Args:
        model: as the user gave it.
        options: the arguments; None: those of a teacher are not set.
        teacher: the argument of the Trainer, or None.
        processor: `processing_class`, or None.
        compute_loss: the Trainer's, bound; an override may not compute the loss of the model's class.
        compute_loss_func: the user's loss, or None.
        label_names, loss_weight: the options of these names.
        smoothing: `label_smoothing_factor`.
        loss_is_scaled: `loss_is_scaled_for_ga` of the Trainer.
        linear_cross_entropy: the option of this name.

    Raises:
        ValueError: label smoothing is not defined for this loss.
    """
    signature = read_signature(model)
    names = list(label_names) if label_names is not None else find_labels(innermost(model))
    config = getattr(innermost(model), "config", None)
    # a user's loss may have another reduction than the loss of the model's class
    makes_own_loss = compute_loss_func is None and is_ours(compute_loss)
    normalizer = LossNormalizer(
        names or ["labels"],
        declared=loss_weight,
        known=known_reduction(model) if makes_own_loss and not smoothing else None,
        shifts=shifts_labels(model),
        pad_token_id=getattr(config, "pad_token_id", None),
        coupled=coupling(model, signature) if makes_own_loss else None,
    )
    declare_loss(normalizer, loss_weight, loss_is_scaled)
    check_smoothing(smoothing, compute_loss_func, getattr(config, "problem_type", None))
    smoother = LabelSmoother(smoothing) if smoothing > 0 else None
    if smoothing and is_ours(compute_loss):
        normalizer.know(LossReduction("tokens", shifted=normalizer.shifts))
    by_chunks = linear_loss_of(model, linear_cross_entropy, normalizer)
    if by_chunks is not None and by_chunks.is_required and not is_ours(compute_loss):
        logger.warning(
            "linear_cross_entropy=%r: compute_loss is overridden, and its loss is computed in chunks only if it calls "
            "super().compute_loss().",
            linear_cross_entropy,
        )
    objective = Objective(signature, names or ["labels"], normalizer, compute_loss_func, smoother, by_chunks)
    taught = distillation_of(teacher, options, student=model, normalizer=normalizer, tokenizer=processor)
    if taught is not None:
        objective = distillation.DistilledObjective(objective, taught)
    return ModelFacts(signature, names, normalizer, smoother, objective, taught)


def distillation_of(teacher: object, options: Options | None, **facts: Any) -> Distillation | None:
    """Returns the losses of a teacher; None without one. Loads nothing if no option of distillation is set."""
    fields = DistillationSection.__dataclass_fields__
    if options is None or (teacher is None and all(getattr(options, n) == each.default for n, each in fields.items())):
        return None
    return distillation.make_distillation(teacher, options, **facts)


def linear_loss_of(model: nn.Module, option: str | bool, normalizer: LossNormalizer) -> linear_loss.LinearLoss | None:
    """Returns the chunked loss of a model; None if the option is off, or "auto" and the model names no head."""
    if option is False or (option == "auto" and not hasattr(innermost(model), "get_output_embeddings")):
        return None
    return linear_loss.LinearLoss(option, normalizer)


def check_smoothing(smoothing: float, compute_loss_func: object, problem_type: str | None) -> None:
    """Raises ValueError if label smoothing is not defined for the loss."""
    if smoothing > 0 and problem_type == "multi_label_classification":
        raise ValueError(
            f"label_smoothing_factor={smoothing}: the model is a multi-label classifier (binary cross-entropy), "
            "which label smoothing is not defined for; set label_smoothing_factor=0."
        )
    if smoothing > 0 and compute_loss_func is not None:
        raise ValueError(
            f"label_smoothing_factor={smoothing}: with compute_loss_func the loss is that function's; smooth the "
            "targets there, and set label_smoothing_factor=0."
        )


def declare_loss(normalizer: LossNormalizer, loss_weight: object, loss_is_scaled: bool | None) -> None:
    """Applies a subclass's declaration `loss_is_scaled_for_ga`, unless `loss_weight` is set."""
    if loss_weight is None and loss_is_scaled is not None:
        is_scaled = bool(loss_is_scaled)
        normalizer.declare("scaled" if is_scaled else "samples", is_averaged_by_author=is_scaled)


def check_evaluation(
    eval_dataset: object,
    get_eval_dataloader: Callable[..., Any],
    *,
    strategy: str,
    metric: str | None,
) -> None:
    """Checks before training that the evaluations of a run have data.

    Args:
        eval_dataset: a dataset, a dict of several by name, or None.
        get_eval_dataloader: the Trainer's, bound; an override may have its own data.
        strategy: `eval_strategy`; "no" disables evaluation.
        metric: the metric that decides which model is best, or None.

    Raises:
        ValueError: there is no evaluation data.
    """
    if strategy != "no" and eval_dataset is None:
        try:
            get_eval_dataloader()
        except ValueError as error:
            raise ValueError(
                f"You have set `args.eval_strategy` to {strategy} but you didn't pass an `eval_dataset` to "
                f"`Trainer`: {error}"
            ) from error
    if isinstance(eval_dataset, dict) and metric in ("loss", "eval_loss"):
        logger.warning(
            "metric_for_best_model=%r: evaluating %s gives a loss for each and no eval_loss. Name the one that "
            "decides, for instance metric_for_best_model='%s_loss'.",
            metric,
            ", ".join(map(str, eval_dataset)),
            next(iter(eval_dataset), "name"),
        )


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Checks that the optimizer trains this model.

    Raises:
        ValueError: the optimizer holds none of the model's parameters.
    """
    groups = getattr(optimizer, "param_groups", None)
    own = set(map(id, model.parameters()))
    if any(id(parameter) in own for parameter in getattr(optimizer, "model_parameters", ())):
        return  # this optimizer splits the parameters into parts
    if groups is not None and not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise ValueError(
            "The optimizer holds none of the model's parameters, so training would change nothing: make it from the "
            "model that the Trainer has, or pass optimizer_cls_and_kwargs=(class, kwargs)."
        )
