"""Facts about a TensorFlow model for its model card, and the checkpoint files that hold the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.folders import MANIFEST_NAME
from paceline.checkpoint.resuming import STATE_FILE
from paceline.core.lineage import PROGRESS_FILE
from paceline.core.log_text import BLOCK_FOLDER
from paceline.hub.described import CardFacts, CheckpointForm, OptimizerFacts
from paceline.tensorflow.checkpoint.model_files import save_model
from paceline.tensorflow.checkpoint.variables import INDEX_FILE, VARIABLES
from paceline.tensorflow.data.sources import is_columns, make_source
from paceline.tensorflow.framework import tf

RESUME_FILES = (
    INDEX_FILE, f"{VARIABLES}.data-*", STATE_FILE, f"{BLOCK_FOLDER}/*", PROGRESS_FILE, MANIFEST_NAME,
)  # fmt: skip
# package of a model's class -> library that the hub names for loading it; the first match
_LIBRARIES = {"transformers": "transformers", "tf_keras": "tf-keras", "keras": "keras"}


def checkpoint_form(model: object) -> CheckpointForm:
    """Returns the form in which a model's checkpoints are pushed, with files that load without this package."""
    return CheckpointForm(RESUME_FILES, partial(write_model, model))


def write_model(model: object, checkpoint: Path, folder: Path) -> Callable[[], dict[str, Path]]:
    """Writes the model now, before training changes it, unless the checkpoint holds files of `save_pretrained`.

    Returns: a function that returns the written files, name -> path.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        save_model(model, folder)
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return lambda: found


def card_facts(
    model: Any,
    *,
    eval_dataset: Any,
    num_replicas: int,
    micro_batch_size: int,
    global_batch_size: int,
    mixed_precision: str,
    optimizer: OptimizerFacts,
) -> CardFacts:
    """Returns the facts for the model card.

    Args:
        model: a Keras model or a tf.Module.
        eval_dataset: the evaluation data, a dict of several by name, or None.
        num_replicas: number of replicas that share an optimizer step.
        micro_batch_size, global_batch_size: in samples, per replica and per optimizer step.
        mixed_precision: "no", or the 16-bit type.
        optimizer: the optimizer's name and settings.
    """
    is_several = isinstance(eval_dataset, dict) and not is_columns(eval_dataset)
    single = {} if eval_dataset is None else {"": eval_dataset}
    return CardFacts(
        model=model,
        kind=type(model).__name__,
        origins=(getattr(getattr(model, "config", None), "_name_or_path", None),),
        library=library_of(model),
        num_parameters=count_numbers(model.variables),
        num_trained=count_numbers(model.trainable_variables),
        shares=num_replicas,
        share_name="replica",
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        precision="float32" if mixed_precision == "no" else f"mixed, {mixed_precision}",
        optimizer=optimizer,
        num_samples=num_samples,
        evaluation_sets=eval_dataset if is_several else single,
    )


def count_numbers(variables: Iterable[Any]) -> int:
    """Returns the number of parameters; integer states of random generators are not counted."""
    return sum(math.prod(one.shape) for one in variables if tf.as_dtype(one.dtype).is_floating)


def library_of(model: object) -> str | None:
    """Returns the library that loads the model; None for a plain module."""
    tops = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((name for top, name in _LIBRARIES.items() if top in tops), None)


def num_samples(dataset: object) -> int | None:
    """Returns the number of samples of a dataset; None if unknown."""
    try:
        return make_source(dataset, batch_size=1, seed=None).num_samples
    except (TypeError, ValueError):
        return None


def optimizer_of(optimizer: Any) -> OptimizerFacts:
    """Returns an optimizer's name and relevant settings; None for both before it is created."""
    made = getattr(optimizer, "inner_optimizer", optimizer)  # unwraps a LossScaleOptimizer
    if made is None:
        return OptimizerFacts(None, None)
    config = made.get_config()
    settings = {name: config[own] for name, own in (("momentum", "momentum"), ("eps", "epsilon")) if own in config}
    if "beta_1" in config:
        settings = {"betas": (config["beta_1"], config.get("beta_2")), **settings}
    return OptimizerFacts(type(made).__name__, settings)
