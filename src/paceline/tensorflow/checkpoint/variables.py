"""The variables of a model and its optimizer in a checkpoint, in the format of `tf.train.Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.tensorflow.framework import plain, tf
from paceline.tensorflow.randomness import layer_states, random_variables

VARIABLES = "variables"
INDEX_FILE = f"{VARIABLES}.index"


class CheckpointError(ValueError):
    """Raised if a checkpoint is damaged or does not fit this run; the message names its folder."""


def trackable(model: Any, optimizer: object = None) -> Any:
    """Returns a `tf.train.Checkpoint` of the model and, if given, the optimizer with the random generators."""
    if optimizer is None:
        return tf.train.Checkpoint(model=model)
    everything = [plain(variable) for variable in model.variables]  # including variables that no layer tracks
    return tf.train.Checkpoint(model=model, optimizer=optimizer, weights=everything, random=random_variables(model))


def optimizer_variables(optimizer: object) -> list[Any]:
    """Returns the variables of a Keras 3 or tf_keras optimizer; an empty list for None."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def changing_variables(model: Any, optimizer: Any = None) -> list[Any]:
    """Returns the variables that training changes, each once: those of the model and its layers' random generators.

    With an optimizer, its variables and the global generator are included.
    """
    states = layer_states(model) if optimizer is None else random_variables(model)
    found = [*model.variables, *optimizer_variables(optimizer), *states]
    return list({id(variable): variable for variable in map(plain, found)}.values())


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Copies the values of variables to host memory."""
    return [variable.numpy().copy() for variable in variables]


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assigns the values that `values_of` returned to the variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def num_bytes(variables: Iterable[Any]) -> int:
    """Returns the total size of the variables in bytes."""
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)


def write_variables(folder: Path, model: object, optimizer: object = None) -> None:
    """Writes the variables of `trackable(model, optimizer)`."""
    trackable(model, optimizer).write(str(folder / VARIABLES))
    (folder / "checkpoint").unlink(missing_ok=True)


def restore_variables(checkpoint: Path, model: object, optimizer: object = None) -> None:
    """Reads the variables of a checkpoint into the model, and into the optimizer if given.

    Raises:
        CheckpointError: the variables are missing, damaged, or belong to another model or optimizer; nothing is
            changed then.
    """
    if not (checkpoint / INDEX_FILE).is_file():
        raise CheckpointError(f"{checkpoint} holds no {INDEX_FILE}: it is no checkpoint of TensorFlow.")
    read_variables(trackable(model, optimizer), checkpoint / VARIABLES, changing_variables(model, optimizer))


def read_variables(target: Any, path: Path, variables: Sequence[Any]) -> None:
    """Reads the variables under `path` into a `tf.train.Checkpoint` of the objects that own them.

    TensorFlow detects a variable that does not fit only after it has assigned earlier ones, and missing variables only
    at the end. Until then a copy of all values is held in host memory.

    Args:
        target: the `tf.train.Checkpoint`.
        path: the prefix under which it was written.
        variables: the variables of the objects; restored if the read fails.

    Raises:
        CheckpointError: the variables are damaged, or belong to another model or optimizer; nothing is changed then.
    """
    before = values_of(variables)
    try:
        status = target.read(str(path))
        status.assert_existing_objects_matched()
        status.expect_partial()
    except Exception as error:  # TensorFlow raises undocumented exceptions of many types for damaged bytes
        assign(variables, before)
        told = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(f"{path.parent} does not fit this model and optimizer: {told[0][:300]}") from error
