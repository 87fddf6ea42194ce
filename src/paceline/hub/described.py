"""Input types of the hub modules: the run and the model that a card describes, and the structure of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.state import TrainerState


@dataclass(frozen=True)
class Hyperparameters:
    """The options of a run that its card shows, under their names in the arguments."""

    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | str | None
    warmup_steps: float
    gradient_accumulation_steps: int
    per_device_eval_batch_size: int
    optim: str
    optim_args: str | None
    optim_target_modules: str | list[str] | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    label_smoothing_factor: float
    neftune_noise_alpha: float | None
    train_sampling_strategy: str
    seed: int
    data_seed: int | None


@dataclass(frozen=True)
class CardRun:
    """The run that a card describes.

    Attributes:
        options: its hyperparameters.
        state: its progress and log history.
        train_dataset: the training data; None without training.
        is_training: True while it trains.
        is_best_loaded: True if the run has ended with the best model (`load_best_model_at_end=True`).
    """

    options: Hyperparameters
    state: TrainerState
    train_dataset: Any
    is_training: bool
    is_best_loaded: bool


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer in a model card.

    Attributes:
        name: the optimizer's class name; None before it is created.
        settings: its settings, such as "betas", "momentum", "eps" or "alpha"; None takes those of the options.
    """

    name: str | None
    settings: Mapping[str, Any] | None


@dataclass(frozen=True)
class CardFacts:
    """Framework-specific facts of a model card.

    Attributes:
        model: the model without wrappers.
        kind: the class name from which the task is inferred.
        origins: candidate names of the base model on the hub.
        library: the hub's name of the library that loads the model; None for a plain module.
        num_parameters, num_trained: numbers of elements of all and of the trainable parameters.
        shares: the number of data-parallel ranks or replicas.
        share_name: the word for one of these ranks or replicas ("process", "replica").
        micro_batch_size: samples per rank and micro-batch.
        global_batch_size: the global batch size in samples.
        precision: description of the precision.
        optimizer: the optimizer and its settings.
        num_samples: returns the size of a dataset; None for a stream.
        evaluation_sets: evaluation sets by name; a single set has the name "".
    """

    model: Any
    kind: str
    origins: tuple[Any, ...]
    library: str | None
    num_parameters: int
    num_trained: int
    shares: int
    share_name: str
    micro_batch_size: int
    global_batch_size: int
    precision: str
    optimizer: OptimizerFacts
    num_samples: Callable[[Any], int | None]
    evaluation_sets: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointForm:
    """The structure of a framework's checkpoints for pushes.

    Attributes:
        resume_files: patterns of the files used only to resume; all other files belong to the model.
        model_files: `(staged checkpoint, empty folder) -> function`, called on the main thread at once. The function,
            called on the pushing thread, returns additional files of the model by their path in the repository.
    """

    resume_files: tuple[str, ...]
    model_files: Callable[[Path, Path], Callable[[], dict[str, Path]]]


def num_items(dataset: Any) -> int | None:
    """Returns the length of a dataset; None without one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
