"""Converts weights to safetensors one tensor at a time, so that only one is in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.checkpoint.layout import FULL_MODEL_NAME, MODEL_FOLDER, is_sharded
from paceline.core.optional import LateModule
from paceline.pytorch.checkpoint.fqn_state import notes_of
from paceline.pytorch.checkpoint.safetensors_file import DTYPES, Form, Progress, aligned, bytes_of, write_file
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_tensors
from paceline.pytorch.checkpoint.weights import (
    EXTRA_STATE_NAME,
    PICKLED_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    alias_groups,
    complete,
    cut,
    file_names,
    named,
    notes_of_ties,
    read_index,
    tied_names,
)
from paceline.pytorch.checkpoint.zero_files import LATEST, has_zero_files, read_zero_files

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import shards as sharded
else:
    sharded = LateModule("paceline.pytorch.checkpoint.shards")


@dataclass
class Source:
    """Weights that can be read one at a time.

    Attributes:
        what: the location of the weights, for messages.
        forms: name -> (shape, dtype).
        read: name -> the whole tensor, on the host.
        tied: omitted name -> name that holds the same tensor.
        extra: values that safetensors cannot hold.
    """

    what: str
    forms: dict[str, Form]
    read: Callable[[str], Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def num_bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return sum(bytes_of(form) for form in self.forms.values())


# ---- sources


def open_weights(folder: str | os.PathLike[str]) -> Source:
    """Opens the weights of a checkpoint: shards (paceline's or accelerate's), safetensors, a pickle, or DeepSpeed's.

    Raises:
        CheckpointError: there are no weights, or a file is damaged.
    """
    folder = Path(folder)
    for place in (folder / MODEL_FOLDER, folder):
        if is_sharded(place):
            return _open_shards(place, folder)
    if (folder / WEIGHTS_NAME).is_file() or (folder / WEIGHTS_INDEX_NAME).is_file():
        return _open_safetensors(folder)
    for name in (FULL_MODEL_NAME, PICKLED_WEIGHTS_NAME):
        if (folder / name).is_file():
            return _open_pickled(folder / name)
    if has_zero_files(folder):
        return _open_zero(folder)
    raise CheckpointError(
        f"{folder} holds no weights that can be exported: expected {MODEL_FOLDER}/, {WEIGHTS_NAME} or its index, "
        f"{FULL_MODEL_NAME}, {PICKLED_WEIGHTS_NAME}, or {LATEST} and the folder that DeepSpeed wrote"
    )


def _open_shards(place: Path, folder: Path) -> Source:
    shards = sharded.Shards(place)
    has_prefix = all(name.startswith("model.") for name in shards.tensors) and place != folder
    prefix = "model." if has_prefix else ""
    extra: dict[str, Any] = {}
    if shards.plain:
        plain = sharded.nested({name: shards.read(name) for name in shards.plain}, shards.paths)
        extra = plain.get("model", {}) if has_prefix else plain
    if (folder / EXTRA_STATE_NAME).is_file():
        extra.update(load_tensors(folder / EXTRA_STATE_NAME))
    forms = {name.removeprefix(prefix): form for name, form in shards.tensors.items()}
    for name in [name for name, (_, dtype) in forms.items() if dtype not in DTYPES]:
        extra[name] = shards.read(prefix + name)
        del forms[name]
    return Source(
        str(place),
        forms,
        lambda name: shards.read(prefix + name),
        dict(notes_of(folder).get("tied", {})),
        extra,
    )


def _open_safetensors(folder: Path) -> Source:
    notes: dict[str, Any] = {}
    names = [WEIGHTS_NAME]
    if not (folder / WEIGHTS_NAME).is_file():
        weight_map, notes = read_index(folder / WEIGHTS_INDEX_NAME)
        names = sorted(set(weight_map.values()))
    forms: dict[str, Form] = {}
    places: dict[str, Any] = {}
    for name in names:
        try:
            file: Any = safe_open(str(folder / name), framework="pt", device="cpu")
            notes = {**(file.metadata() or {}), **notes}
            for key in file.keys():  # noqa: SIM118, it is no mapping
                part = file.get_slice(key)
                forms[key] = torch.Size(part.get_shape()), NAMED[part.get_dtype()]
                places[key] = file
        except Exception as error:  # damaged files raise several types of exceptions
            raise CheckpointError(f"{folder / name} cannot be read: {type(error).__name__}: {error}") from error
    extra = load_tensors(folder / EXTRA_STATE_NAME) if (folder / EXTRA_STATE_NAME).is_file() else {}
    return Source(str(folder), forms, lambda key: places[key].get_tensor(key), tied_names(notes), extra)


def _open_zero(folder: Path) -> Source:
    found = read_zero_files(folder)
    forms: dict[str, Form] = {}
    extra: dict[str, Any] = {}
    for name in found.names():
        form = found.form_of(name)
        if form is not None and form[1] in DTYPES:
            forms[name] = form
        else:
            extra[name] = found.read(name)
    return Source(str(found.folder), forms, found.read, dict(found.tied), extra)


def _open_pickled(path: Path) -> Source:
    state = named(load_tensors(path, is_mapped=True), path)
    tied = alias_groups(state)
    kept = {name: value for name, value in state.items() if name not in tied}
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor) and value.dtype in DTYPES}
    extra = {name: value for name, value in kept.items() if name not in tensors}
    return Source(str(path), {n: (t.shape, t.dtype) for n, t in tensors.items()}, tensors.__getitem__, tied, extra)


# ---- targets


def write_stream(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> list[str]:
    """Writes safetensors into `folder`, in shards of at most `max_shard_bytes`; a larger tensor gets its own shard.

    Takes the memory of the largest tensor; of shards twice, since a part is read before it is copied to its place.

    Args:
        progress: called with the bytes of each written tensor.

    Returns: the names of the files.
    Raises: OSError if the disk refuses; CheckpointError for a damaged source.
    """
    folder = Path(folder)
    os.makedirs(folder, exist_ok=True)
    files = files_of(source.forms, max_shard_bytes)
    notes = notes_of_ties(source.tied)
    for name, keys in files.items():
        forms = {key: source.forms[key] for key in keys}
        write_file(folder / name, forms, source.read, {"format": "pt", **notes}, progress)
    return complete(folder, files, source.num_bytes(), notes, source.extra)


def reading_order(forms: Mapping[str, Form], max_shard_bytes: int) -> list[str]:
    """Returns the names in the order in which `write_stream` reads them."""
    files = files_of(forms, max_shard_bytes).values()
    return [key for keys in files for key in aligned({key: forms[key] for key in keys})]


def files_of(forms: Mapping[str, Form], max_shard_bytes: int) -> dict[str, list[str]]:
    """Returns a map from file name to the names of its tensors, in order; at least one file."""
    shards = cut({name: bytes_of(form) for name, form in forms.items()}, max_shard_bytes)
    return dict(zip(file_names(len(shards)), shards, strict=True))


NAMED = {name: dtype for dtype, name in DTYPES.items()}
