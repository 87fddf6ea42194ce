"""What the Trainer's constructor refuses, and what it reads off the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.columns import find_labels
from paceline.model.factory import check_trainable
from paceline.model.loss import AVERAGED_BY_AUTHOR, LabelSmoother, LossRule, Meaning
from paceline.model.objective import Objective, accepts
from paceline.model.signature import innermost, read_signature, shifts_labels

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def check_arguments(trainer: Trainer, optimizers: tuple[Any, Any]) -> None:
    """Refuse arguments of the constructor that contradict each other.

    Raises:
        ValueError: they do; the message says what to change.
    """
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise ValueError("Pass `optimizers` or `optimizer_cls_and_kwargs`, not both.")
    if trainer.model_init is not None and (optimizers[0] is not None or optimizers[1] is not None):
        raise ValueError(
            "`optimizers` hold the parameters of one model, and `model_init` makes a new one at each train: pass "
            "`optimizer_cls_and_kwargs`, or override `create_optimizer`."
        )
    if trainer.train_dataset is not None:
        check_trainable(trainer.model)
    metrics = trainer.compute_metrics
    if trainer.args.batch_eval_metrics and callable(metrics) and not accepts(metrics, "compute_result"):
        raise ValueError(
            "batch_eval_metrics=True calls `compute_metrics(prediction, compute_result=...)` for each batch: give "
            "it a parameter `compute_result`, or set batch_eval_metrics=False."
        )


def choose_processor(processing_class: Any, tokenizer: Any) -> Any:
    """The Trainer's `processing_class`, given under this name or the older one.

    Raises:
        ValueError: under both, and they are two.
    """
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise ValueError("`tokenizer` is the older name of `processing_class`: pass one of the two.")
    return tokenizer if processing_class is None else processing_class


def read_model(trainer: Trainer) -> None:
    """What the model's forward and config tell, read once; and the parts that follow from it."""
    args, model = trainer.args, trainer.model
    trainer.model_wrapped = model
    trainer.signature = read_signature(model)
    trainer.label_names = list(args.label_names) if args.label_names is not None else find_labels(innermost(model))
    trainer.can_return_loss = trainer.signature.can_return_loss
    config = getattr(innermost(model), "config", None)
    trainer.loss_rule = LossRule(
        trainer.label_names or ["labels"],
        declared=args.loss_weight,
        shifts=shifts_labels(model),
        pad_token_id=getattr(config, "pad_token_id", None),
    )
    declare_loss(trainer)
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    smoothing = args.label_smoothing_factor
    if smoothing > 0 and multi_label:
        raise ValueError(
            f"label_smoothing_factor={smoothing}: the model is a multi-label classifier (binary cross-entropy), "
            "which label smoothing is not defined for; set label_smoothing_factor=0."
        )
    if smoothing > 0 and trainer.compute_loss_func is not None:
        raise ValueError(
            f"label_smoothing_factor={smoothing}: with compute_loss_func the loss is that function's; smooth the "
            "targets there, and set label_smoothing_factor=0."
        )
    trainer.label_smoother = LabelSmoother(smoothing) if smoothing > 0 else None
    trainer.objective = Objective(
        trainer.signature,
        trainer.label_names or ["labels"],
        trainer.loss_rule,
        trainer.compute_loss_func,
        trainer.label_smoother,
    )


def declare_loss(trainer: Trainer) -> None:
    """Take a subclass at its word: `loss_is_scaled_for_ga`, set on the class or on the object."""
    if trainer.args.loss_weight is None and trainer.loss_is_scaled_for_ga is not None:
        scaled = AVERAGED_BY_AUTHOR if trainer.loss_is_scaled_for_ga else Meaning("samples")
        trainer.loss_rule.declare(scaled)
