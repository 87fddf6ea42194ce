"""Checks for user methods and data loaders that belong to other training loops, and that this loop never uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.tensorflow.engine import is_own
from paceline.tensorflow.framework import keras

RUN_MODEL = "override run_model(features, labels, training) -> (loss, predictions), or pass compute_loss_func"
DATASET = "override get_train_tfdataset, get_eval_tfdataset or get_test_tfdataset"
OPTIMIZER = "override create_optimizer_and_scheduler, or pass optimizers=(optimizer, schedule)"
# methods of the torch Trainer that TFTrainer never calls -> their replacements
UNCALLED = {
    "compute_loss": RUN_MODEL,
    "create_optimizer": OPTIMIZER,
    "create_scheduler": OPTIMIZER,
    "evaluation_loop": "override prediction_loop",
    "get_eval_dataloader": DATASET,
    "get_test_dataloader": DATASET,
    "get_train_dataloader": DATASET,
    "_prepare_inputs": "override run_model",
}
# Keras' step methods, which this loop never calls -> the corresponding methods of TFTrainer
STEPS = {
    "train_step": ("run_model", "training_step", "apply_gradients", "distributed_training_steps"),
    "test_step": ("run_model", "prediction_step", "distributed_prediction_steps"),
    "predict_step": ("run_model", "prediction_step", "distributed_prediction_steps"),
}


def check_methods(owner: str, names: Collection[str]) -> None:
    """Refuses a TFTrainer with methods that are never called.

    Args:
        owner: the name of the Trainer's class.
        names: the names of all its attributes.

    Raises:
        UnsupportedOption: there is such a method; the message names the replacement.
    """
    for name, remedy in UNCALLED.items():
        if name in names:
            raise UnsupportedOption(f"{owner}.{name} would never be called by TFTrainer: {remedy}.")


def check_step(model: object, name: str, method: Callable[[str], Any]) -> None:
    """Refuses a Keras model that overrides a step method, unless the Trainer overrides a corresponding method.

    Args:
        model: the Trainer's model.
        name: "train_step", "test_step" or "predict_step".
        method: name -> the Trainer's bound method.

    Raises:
        UnsupportedOption: the model overrides the step, and the Trainer does not.
    """
    if not isinstance(model, keras.Model) or not is_overridden(model, name):
        return
    if any(is_own(method(own), own) for own in STEPS[name]):
        return
    raise UnsupportedOption(
        f"{type(model).__name__}.{name} would never be called by TFTrainer, which runs the whole step itself: override "
        f"compute_loss or call of the model, or {' or '.join(STEPS[name][:2])} of TFTrainer."
    )


def is_overridden(model: object, name: str) -> bool:
    """True if a Keras model or its class overrides the method."""
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def check_data(data: object) -> None:
    """Refuses a torch DataLoader, whose batches would count as samples.

    Raises:
        TypeError: the data is a torch DataLoader.
    """
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(data).__mro__}
    if "torch.utils.data.dataloader.DataLoader" in kinds:
        raise TypeError(
            "A torch DataLoader holds batches, and TFTrainer makes its own: pass its dataset (loader.dataset), with "
            "per_device_train_batch_size and, for its collate_fn, data_collator."
        )
