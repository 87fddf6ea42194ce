"""The index of a sharded checkpoint, `.metadata`: a pickle, read without running anything in it.

torch.distributed.checkpoint pickles which tensor lies in which file. Here only its own plain records, sizes, types and
paths are made from that file; any other name in it is refused before it is looked up.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from paceline.checkpoint.tensors import CheckpointError

METADATA_NAME = ".metadata"

_RECORDS = "torch.distributed.checkpoint.metadata"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"  # where versions before 2.3 had some of them
_ALLOWED = {
    *((_RECORDS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_RECORDS, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    (_SHARDS, "TensorProperties"),
    (_SHARDS, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
    ("torch", "Size"),
}
_PATHS = {"PosixPath": PurePosixPath, "PurePosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}


class _Records(pickle.Unpickler):
    """Makes nothing but the records of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return getattr(importlib.import_module(module), name)


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """The index of a folder that torch.distributed.checkpoint wrote.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged, or holds more than an index; the message names the file.
    """
    path = Path(folder, METADATA_NAME)
    raw = path.read_bytes()
    try:
        metadata = _Records(io.BytesIO(raw)).load()
    except Exception as error:  # damaged bytes make the reader raise nearly anything
        raise CheckpointError(f"{path} cannot be read safely: {type(error).__name__}: {error}") from error
    problem = _problem_of(metadata)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}")
    assert isinstance(metadata, Metadata)
    return metadata


def _problem_of(metadata: Any) -> str | None:
    """What keeps it from being an index, in words; None where nothing does."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "it lists no tensors or no files"
    for name, entry in entries.items():
        if not isinstance(name, str) or not _is_entry(entry):
            return f"the entry {name!r} is none of a tensor"
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or not _is_place(place):
            return f"the place of {getattr(index, 'fqn', index)!r} is none in this folder"
    return None


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.chunks, list):
        return False
    is_typed = isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
    return is_typed and _is_size(entry.size) and all(_is_chunk(chunk, entry.size) for chunk in entry.chunks)


def _is_chunk(chunk: Any, size: torch.Size) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not _is_size(chunk.offsets) or not _is_size(chunk.sizes):
        return False
    if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
        return False
    return all(offset + own <= whole for offset, own, whole in zip(chunk.offsets, chunk.sizes, size, strict=True))


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(isinstance(number, int) and number >= 0 for number in size)


def _is_place(place: Any) -> bool:
    """Whether it is a range of a file of the folder itself."""
    name = getattr(place, "relative_path", None)
    if not isinstance(name, str) or name in ("", ".", "..") or set("/\\\0") & set(name):
        return False
    if getattr(place, "transform_descriptors", None):
        return False  # compressed by an extension, of which paceline writes and reads none
    numbers = (getattr(place, "offset", None), getattr(place, "length", None))
    return all(isinstance(number, int) and number >= 0 for number in numbers)
