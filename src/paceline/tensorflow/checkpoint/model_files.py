"""Model files that load without this package: those of `save_pretrained`, `model.keras`, or a SavedModel."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path
from typing import Any

from paceline.core.optional import require
from paceline.tensorflow.checkpoint.variables import (
    INDEX_FILE,
    CheckpointError,
    changing_variables,
    read_variables,
    restore_variables,
)
from paceline.tensorflow.framework import keras, tf

KERAS_FILE = "model.keras"
PRETRAINED_FILE = "tf_model.h5"  # of save_pretrained
SAVED_MODEL_FILE, SAVED_VARIABLES = "saved_model.pb", "variables/variables"


def save_model(model: Any, folder: Path) -> Path:
    """Writes a model with `save_pretrained`, as `.keras`, or as a SavedModel, so that it loads without this package.

    Returns: the folder or file to load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(str(folder))
        return folder
    if isinstance(model, keras.Model) or hasattr(model, "save"):
        path = folder / KERAS_FILE
        temporary = folder / f".model.incomplete-{random.getrandbits(32):08x}.keras"
        try:
            model.save(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path
    tf.saved_model.save(model, str(folder))
    return folder


def load_model(model: Any, folder: Path) -> None:
    """Loads the weights of a checkpoint, or of a model written by `save_model`, into a model.

    Raises:
        CheckpointError: `folder` holds neither, or it is damaged or of another model; the weights are unchanged then.
    """
    path = next((folder / name for name in (KERAS_FILE, PRETRAINED_FILE) if (folder / name).is_file()), None)
    if path is None and (folder / SAVED_MODEL_FILE).is_file():
        read_variables(tf.train.Checkpoint(root=model), folder / SAVED_VARIABLES, changing_variables(model))
        return
    if path is None or (folder / INDEX_FILE).is_file():
        restore_variables(folder, model)
        return
    before = model.get_weights()
    try:
        # only the weights are loaded: the rest of the file may name any class or function to call
        if isinstance(model, keras.Model) and path.name == KERAS_FILE and (surplus := surplus_of(model, path)) > 0:
            raise ValueError(f"it holds {surplus} weights more")
        model.load_weights(str(path))
    except Exception as error:  # Keras raises undocumented exceptions of many types for damaged bytes
        model.set_weights(before)
        raise CheckpointError(f"{path} does not fit this model: {error}") from error


def surplus_of(model: Any, path: Path) -> int:
    """Returns how many more weights a `.keras` file holds than the model, which Keras ignores.

    Weights of the optimizer are not counted.
    """
    names: list[str] = []
    h5py = require("h5py", "tf")
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file, h5py.File(file) as weights:
        weights.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sum(not name.startswith("optimizer/") for name in names) - len(model.weights)
