"""The interface of a Trainer to its session: the members that the session reads and calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from paceline.core.session import Facade
from paceline.pytorch.checkpoint.checkpointer import Checkpointer
from paceline.pytorch.sync import Measure

if TYPE_CHECKING:
    from paceline.checkpoint.remote_sync import RemoteSync
    from paceline.pytorch.distillation.loss import Distillation
    from paceline.pytorch.model.objective import Objective
    from paceline.pytorch.packing import Packing


class TrainerProtocol(Facade, Protocol):
    """The members of a Trainer that a subclass may override and that its session uses; see `Trainer` for each.

    Attributes:
        objective: computes the loss of a batch, and knows the parameters of `forward`.
        distillation: the losses of a teacher; None without one.
        train_dataset: the training data.
        data_collator: makes its batches.
        eval_dataset: the evaluation data, or a dict of several.
        compute_loss_func: the user's loss; None: that of the model.
        teacher: the model or path that is distilled from, or None.
        model_init: makes a fresh model for each run; None: each run continues to train the same model.
        loss_is_scaled_for_ga: declared by a subclass; None: inferred.
        remote_sync: uploads the output folder; None without an `output_store`.
        _trial_name: the name of the current trial of a search, or None.
    """

    objective: Objective
    distillation: Distillation | None
    train_dataset: Any
    data_collator: Any
    eval_dataset: Any
    model_init: Callable[..., nn.Module] | None
    compute_loss_func: Callable[..., Tensor] | None
    teacher: Any
    loss_is_scaled_for_ga: bool | None
    place_model: Callable[[], None]
    call_model_init: Callable[..., nn.Module]
    get_train_dataloader: Callable[[], Any]
    get_eval_dataloader: Callable[..., Any]
    get_batch_samples: Callable[..., Any]
    create_optimizer_and_scheduler: Callable[..., None]
    create_scheduler: Callable[..., Any]
    get_decay_parameter_names: Callable[[nn.Module], list[str]]
    get_num_trainable_parameters: Callable[[], int]
    training_step: Callable[..., Tensor]
    compute_loss: Callable[..., Any]
    store_flos: Callable[[], None]
    floating_point_ops: Callable[[Any], int]
    remote_sync: RemoteSync | None
    log_table: Callable[..., None]
    log_figure: Callable[..., None]
    _trial_name: str | None
    _meet_trial: Callable[[object], None]
    _make_checkpointer: Callable[[], Checkpointer]
    _make_measurer: Callable[[], Measure | None]
    _find_packing: Callable[[], Packing | None]
    _prepare_inputs: Callable[[Any], Any]
    _wrap_model: Callable[..., nn.Module]
    _evaluate: Callable[..., dict[str, float]]
    _maybe_log_save_evaluate: Callable[..., None]
    _save_checkpoint: Callable[..., None]
    _load_from_checkpoint: Callable[..., None]
    _finished_pushes: Callable[[], AbstractContextManager[None]]
