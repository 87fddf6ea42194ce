"""PEFT adapters of a checkpoint, which are loaded into the adapters that the model already has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.optional import require
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.checkpoint.weights import read_file

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_ADAPTER_WEIGHTS_NAME = "adapter_model.bin"

_PEFT_PREFIX = "base_model.model."


def has_adapters(model: nn.Module) -> bool:
    """True if `model` is a PeftModel, a transformers model with adapters, or has the same interface."""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "load_adapter", None))


def has_adapter_files(folder: Path) -> bool:
    """True if `folder` or one of its direct subfolders holds the weights of an adapter."""
    if not folder.is_dir():
        return False
    return any(_weights_in(place) is not None for place in (folder, *folder.iterdir()) if place.is_dir())


def load_adapters(model: Any, folder: Path) -> list[str]:
    """Loads every adapter of `model` from `folder`.

    An adapter is read from the subfolder of its name; the adapter `default`, or the only one, may also be in `folder`
    itself. The active adapters and the trained parameters are unchanged.

    Returns: one sentence for each adapter of the model that is missing in `folder` and so keeps its values.
    Raises: CheckpointError, naming the file, if an adapter does not fit.
    """
    names = list(model.peft_config)
    places = {name: _place_of(folder, name, is_only=len(names) == 1) for name in names}
    for name, place in places.items():
        if place is not None:
            _load_one(model, place, name)
    return [
        f"{folder} lacks the adapter {name!r} of the model, which keeps its values"
        for name, place in places.items()
        if place is None
    ]


def _weights_in(folder: Path) -> Path | None:
    found = (folder / name for name in (ADAPTER_WEIGHTS_NAME, PICKLED_ADAPTER_WEIGHTS_NAME))
    return next((path for path in found if path.is_file()), None)


def _place_of(folder: Path, name: str, *, is_only: bool) -> Path | None:
    if _weights_in(folder / name) is not None:
        return folder / name
    is_here = (name == "default" or is_only) and _weights_in(folder) is not None
    return folder if is_here else None


def _load_one(model: Any, place: Path, name: str) -> None:
    path = _weights_in(place)
    assert path is not None
    # Read before PEFT does: this detects a damaged file, and refuses a pickle that holds more than tensors.
    state, _ = read_file(path)
    try:
        if getattr(model, "_hf_peft_config_loaded", False):
            # transformers refuses to load an adapter whose name already exists; PEFT loads weights into it.
            peft = require("peft", "peft")
            plain = {key.removeprefix(_PEFT_PREFIX): value for key, value in state.items()}
            peft.set_peft_model_state_dict(model, plain, adapter_name=name)
        else:
            # is_trainable=True, because otherwise PEFT switches the whole model to evaluation mode.
            model.load_adapter(os.fspath(place), name, is_trainable=True)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} does not fit the adapter {name!r}: {error}") from error
