"""The variables of a model and its optimizer in a checkpoint, in the format of `tf.train.Checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.tensorflow.framework import keras, plain, tf
from paceline.tensorflow.randomness import (
    capture_random,
    keras_state,
    layer_states,
    random_variables,
    restore_random,
)

VARIABLES = "variables"
INDEX_FILE = f"{VARIABLES}.index"
KERAS_RANDOM, RECURRENT = "keras_random", "recurrent"  # lists of variables that older checkpoints lack


class CheckpointError(ValueError):
    """Raised if a checkpoint is damaged or does not fit this run; the message names its folder."""


def trackable(model: Any, optimizer: object = None, is_held: Callable[[str], bool] = lambda name: True) -> Any:
    """Returns a `tf.train.Checkpoint` of the model and, if given, the optimizer with the random generators.

    Args:
        model: its variables are saved.
        optimizer: None: the model alone.
        is_held: False for the name of a list of variables that is left out.
    """
    if optimizer is None:
        return tf.train.Checkpoint(model=model)
    everything = [plain(variable) for variable in model.variables]  # including variables that no layer tracks
    lists = {KERAS_RANDOM: [keras_state()], RECURRENT: recurrent_states(model)}
    more = {name: variables for name, variables in lists.items() if variables and is_held(name)}
    random = random_variables(model)
    return tf.train.Checkpoint(model=model, optimizer=optimizer, weights=everything, random=random, **more)


def recurrent_states(model: Any) -> list[Any]:
    """Returns the states that recurrent layers keep between batches (`stateful=True`), which Keras does not track."""
    layers = model._flatten_layers() if isinstance(model, keras.Model) else ()
    kept = [getattr(layer, "states", None) for layer in layers if getattr(layer, "stateful", False)]
    return [plain(state) for state in tf.nest.flatten(kept) if state is not None]


def optimizer_variables(optimizer: object) -> list[Any]:
    """Returns the variables of a Keras 3 or tf_keras optimizer; an empty list for None."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def changing_variables(model: Any, optimizer: Any = None) -> list[Any]:
    """Returns the variables that training changes, each once: those of the model, its recurrent layers and random
    generators.

    With an optimizer, its variables and the global generators are included.
    """
    states = layer_states(model) if optimizer is None else [*random_variables(model), keras_state()]
    found = [*model.variables, *recurrent_states(model), *optimizer_variables(optimizer), *states]
    return list({id(variable): variable for variable in map(plain, found)}.values())


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Copies the values of variables to host memory."""
    return [variable.numpy().copy() for variable in variables]


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assigns the values that `values_of` returned to the variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class CallEffects:
    """The state that calls of a model change, as an item: random generators, recurrent layers, statistics.

    The generators include the global ones of Keras, TensorFlow, Python and numpy. The state is copied to host memory;
    weights, which a call leaves alone, are not part of it.
    """

    def __init__(self, model: Any) -> None:
        found = [variable for variable in changing_variables(model) if not is_weight(variable)]
        self.variables = list({id(each): each for each in (*found, *random_variables(model), keras_state())}.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state."""
        return {"values": values_of(self.variables), "generators": capture_random()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the state."""
        assign(self.variables, state["values"])
        restore_random(state["generators"])


@contextmanager
def undone(model: Any) -> Iterator[None]:
    """Returns a context in which the model may be called without an effect on the run: see `CallEffects`."""
    effects = CallEffects(model)
    state = effects.state_dict()
    try:
        yield
    finally:
        effects.load_state_dict(state)


def is_weight(variable: Any) -> bool:
    """True if a variable was created as trainable, also if its layer is frozen now."""
    return bool(variable.trainable) and variable.dtype.is_floating


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
    path = checkpoint / VARIABLES
    read_variables(trackable(model, optimizer, partial(holds, path)), path, changing_variables(model, optimizer))


def holds(path: Path, name: str) -> bool:
    """False if the variables under `path` lack this list. True also if they cannot be read, as reading them tells."""
    try:
        return bool(tf.train.load_checkpoint(str(path)).has_tensor(f"{name}/0/.ATTRIBUTES/VARIABLE_VALUE"))
    except Exception:  # undocumented exceptions of many types for damaged bytes
        return True


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
