"""The variables of a model and its optimizer in a checkpoint, as `tf.train.Checkpoint` writes and reads them."""

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
    """Returns the checkpointed objects: the model, and with an optimizer also that and the generators."""
    if optimizer is None:
        return tf.train.Checkpoint(model=model)
    everything = [plain(variable) for variable in model.variables]  # those too that a layer does not track
    return tf.train.Checkpoint(model=model, optimizer=optimizer, weights=everything, random=random_variables(model))


def optimizer_variables(optimizer: object) -> list[Any]:
    """Returns the variables of an optimizer of Keras 3 or tf_keras; none for None."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def changing_variables(model: Any, optimizer: Any = None) -> list[Any]:
    """Returns the variables that training changes, each once: of the model with the generators of its layers, and with
    an optimizer also those of that and the global generator.
    """
    states = layer_states(model) if optimizer is None else random_variables(model)
    found = [*model.variables, *optimizer_variables(optimizer), *states]
    return list({id(variable): variable for variable in map(plain, found)}.values())


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Copies the values of variables to host memory."""
    return [variable.numpy().copy() for variable in variables]


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Gives variables the values that `values_of` returned."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def num_bytes(variables: Iterable[Any]) -> int:
    """Returns the bytes that the values of variables take."""
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)


def write_variables(folder: Path, model: object, optimizer: object = None) -> None:
    """Writes the variables of the model, and with an optimizer all that `trackable` returns."""
    trackable(model, optimizer).write(str(folder / VARIABLES))
    (folder / "checkpoint").unlink(missing_ok=True)


def restore_variables(checkpoint: Path, model: object, optimizer: object = None) -> None:
    """Reads the variables of a checkpoint into the model, and into the optimizer if one is given.

    Raises:
        CheckpointError: there are none, they are damaged, or they are those of another model or optimizer; nothing
            is changed then.
    """
    if not (checkpoint / INDEX_FILE).is_file():
        raise CheckpointError(f"{checkpoint} holds no {INDEX_FILE}: it is no checkpoint of TensorFlow.")
    read_variables(trackable(model, optimizer), checkpoint / VARIABLES, changing_variables(model, optimizer))


def read_variables(target: Any, path: Path, variables: Sequence[Any]) -> None:
    """Reads the variables under `path` into a `tf.train.Checkpoint` of the objects that own them.

    TensorFlow notices the first that does not fit when those before it are assigned, and missing ones at the end:
    until then a copy of all values is held in host memory.

    Args:
        target: the `tf.train.Checkpoint`.
        path: as it was written under.
        variables: those of the objects; restored if the read fails.

    Raises:
        CheckpointError: they are damaged, or those of another model or optimizer; nothing is changed then.
    """
    before = values_of(variables)
    try:
        status = target.read(str(path))
        status.assert_existing_objects_matched()
        status.expect_partial()
    except Exception as error:  # what damaged bytes make TensorFlow raise is not documented: many kinds are seen
        assign(variables, before)
        told = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(f"{path.parent} does not fit this model and optimizer: {told[0][:300]}") from error
