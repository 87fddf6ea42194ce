"""What the hub is told of a model of TensorFlow: facts for its card, and what of a checkpoint is the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.folders import MANIFEST_NAME
from paceline.core.resuming import PROGRESS_FILE, STATE_FILE
from paceline.hub.card_text import settings_of
from paceline.hub.described import CardFacts, CheckpointForm
from paceline.tf.framework import tf
from paceline.tf.saving import INDEX_FILE, VARIABLES, save_model
from paceline.tf.sources import is_columns, make_source

if TYPE_CHECKING:
    from paceline.tf.trainer import TFTrainer

RESUME_FILES = (INDEX_FILE, f"{VARIABLES}.data-*", STATE_FILE, PROGRESS_FILE, MANIFEST_NAME)
# the package that a model's class comes from -> the library that the hub says loads it; the first that fits
_LIBRARIES = {"transformers": "transformers", "tf_keras": "tf-keras", "keras": "keras"}


def checkpoint_form(trainer: TFTrainer) -> CheckpointForm:
    """How the checkpoints of this Trainer are pushed: what loads the model without this package, and is not in them."""
    return CheckpointForm(RESUME_FILES, partial(write_model, trainer.model))


def write_model(model: Any, checkpoint: Path, folder: Path) -> Callable[[], dict[str, Path]]:
    """Write the model now, before training changes it, where the checkpoint does not hold it in its own format."""
    if not callable(getattr(model, "save_pretrained", None)):
        save_model(model, folder)
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return lambda: found


def card_facts(trainer: TFTrainer) -> CardFacts:
    """What a card says of this Trainer's model."""
    args, model, given = trainer.args, trainer.model, trainer.eval_dataset
    is_several = isinstance(given, dict) and not is_columns(given)
    return CardFacts(
        model=model,
        kind=type(model).__name__,
        origins=(getattr(getattr(model, "config", None), "_name_or_path", None),),
        library=library_of(model),
        num_parameters=count_numbers(model.variables),
        num_trained=count_numbers(model.trainable_variables),
        shares=trainer.n_replicas,
        share_name="replica",
        micro_batch_size=args.per_device_train_batch_size,
        samples_per_update=args.train_batch_size * args.gradient_accumulation_steps,
        precision="float32" if args.mixed_precision == "no" else f"mixed, {args.mixed_precision}",
        optimizer=optimizer_of(trainer),
        num_samples=num_samples,
        evaluation_sets=given if is_several else {} if given is None else {"": given},
    )


def count_numbers(variables: Iterable[Any]) -> int:
    """Numbers in variables; states of random generators, which are whole numbers, are no parameters."""
    return sum(math.prod(one.shape) for one in variables if tf.as_dtype(one.dtype).is_floating)


def library_of(model: Any) -> str | None:
    """The library that loads the model again; None for a plain module."""
    tops = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((name for top, name in _LIBRARIES.items() if top in tops), None)


def num_samples(dataset: Any) -> int | None:
    """Samples of whatever holds data; None where there is no telling."""
    try:
        return make_source(dataset, batch_size=1, seed=None).num_samples
    except (TypeError, ValueError):
        return None


def optimizer_of(trainer: TFTrainer) -> str:
    """The optimizer and its settings, in words."""
    made = trainer.optimizer
    made = getattr(made, "inner_optimizer", made)  # of a scaled loss
    if made is None:
        return settings_of(trainer.args, None, None)
    config = made.get_config()
    settings = {name: config[own] for name, own in (("momentum", "momentum"), ("eps", "epsilon")) if own in config}
    if "beta_1" in config:
        settings = {"betas": (config["beta_1"], config.get("beta_2")), **settings}
    return settings_of(trainer.args, type(made).__name__, settings)
