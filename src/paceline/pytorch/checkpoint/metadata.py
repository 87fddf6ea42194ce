"""The index of a sharded checkpoint, `.metadata`, is a pickle, which this module reads without running code in it.

torch.distributed.checkpoint pickles the location of each tensor. The pickle is first read into inert records; this
module validates their values and builds torch's own objects from them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from paceline.checkpoint.layout import METADATA_NAME
from paceline.checkpoint.pickles import Buildable, DataUnpickler, Name, Refused
from paceline.pytorch.checkpoint.tensors import CheckpointError, open_file

_RECORDS = "torch.distributed.checkpoint.metadata"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"  # module of some records in torch before 2.3
# pickled name -> name of the record here; of tensor properties only the dtype is read
_KINDS = {
    f"{_RECORDS}.Metadata": "Metadata",
    f"{_RECORDS}.MetadataIndex": "MetadataIndex",
    f"{_RECORDS}.StorageMeta": "StorageMeta",
    f"{_RECORDS}.TensorProperties": "TensorProperties",
    f"{_SHARDS}.TensorProperties": "TensorProperties",
    f"{_RECORDS}.TensorStorageMetadata": "TensorStorageMetadata",
    f"{_RECORDS}.BytesStorageMetadata": "BytesStorageMetadata",
    f"{_RECORDS}.ChunkStorageMetadata": "ChunkStorageMetadata",
    f"{_RECORDS}._MEM_FORMAT_ENCODING": "MemoryFormat",
    f"{_SHARDS}.MEM_FORMAT_ENCODING": "MemoryFormat",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "StorageInfo",
    "torch.serialization._get_layout": "Layout",
    "torch.Size": "Size",
    **{
        f"{module}.{name}": "Path"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Record(Buildable):
    """A call that the pickle requests: the function's name here, its arguments, and the state that is set."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: dict[str, Any] | None = None

    def built(self, state: object) -> _Record:
        """Returns the record itself. Raises Refused if the state is set twice, or is not keyed by names."""
        if self.kind == "TensorProperties" and isinstance(state, tuple) and state:
            state = {"dtype": state[0]}  # the other fields describe the placement when it was saved
        if self.state is not None or not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise Refused(f"it sets a state that no {self.kind} has")
        self.state = state
        return self


def _find(path: str) -> Any:
    if path in _KINDS:
        return Name(path, partial(_Record, _KINDS[path]))
    if path == "collections.OrderedDict":
        return Name(path, OrderedDict)
    module, _, name = path.rpartition(".")
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise Refused(f"it names {path}, which no index needs")


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Returns the index of a folder that torch.distributed.checkpoint wrote.

    Raises:
        FileNotFoundError: there is no index.
        CheckpointError: the index is damaged, or holds other objects; the message names the file.
    """
    path = Path(folder, METADATA_NAME)
    with open_file(path) as file:
        try:
            return _metadata(DataUnpickler(file, _find).load())
        except Refused as error:
            raise CheckpointError(f"{path} cannot be read safely: {error}") from error
        except _Damaged as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        except Exception as error:  # damaged bytes can raise nearly any exception
            raise CheckpointError(f"{path} cannot be read safely: {type(error).__name__}: {error}") from error


# ---- from inert records to torch's own


class _Damaged(ValueError):
    """Raised if the records are not those of an index."""


def _fields(value: object, kind: str, what: str) -> dict[str, Any]:
    """Returns the state of a record of this type."""
    if not isinstance(value, _Record) or value.kind != kind or value.arguments or value.state is None:
        raise _Damaged(what)
    return value.state


def _metadata(value: object) -> Metadata:
    held = value.kind if isinstance(value, _Record) else type(value).__name__
    fields = _fields(value, "Metadata", f"it holds a {held}")
    entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise _Damaged("it lists no tensors or no files")
    paths = fields.get("planner_data")
    metadata = Metadata(
        {_text(name): _entry(name, entry) for name, entry in entries.items()},
        planner_data={_text(name): _path(path) for name, path in paths.items()} if isinstance(paths, dict) else None,
        storage_data={_index(index): _place(index, place) for index, place in places.items()},
    )
    if fields.get("storage_meta") is not None:
        metadata.storage_meta = _storage_meta(fields["storage_meta"])
    version = fields.get("version")
    if hasattr(metadata, "version") and isinstance(version, str):
        metadata.version = version
    return metadata


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise _Damaged(f"{name!r:.40} is no name of a tensor")
    return name


def _path(path: object) -> tuple[str | int, ...]:
    """Returns the path of a value in the saved nest."""
    if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
        raise _Damaged("it holds an invalid path in the state")
    return path


def _entry(name: object, entry: object) -> TensorStorageMetadata | BytesStorageMetadata:
    what = f"the entry {name!r:.200} is not that of a tensor"
    if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata", what)
    size, chunks, properties = fields.get("size"), fields.get("chunks"), fields.get("properties")
    dtype = _dtype(properties)
    if not isinstance(chunks, list) or dtype is None:
        raise _Damaged(what)
    whole = _size(size, what)
    return TensorStorageMetadata(TensorProperties(dtype), whole, [_chunk(chunk, whole, what) for chunk in chunks])


def _dtype(properties: object) -> torch.dtype | None:
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
        return None
    found = properties.state.get("dtype") if properties.state else None
    return found if isinstance(found, torch.dtype) else None


def _chunk(chunk: object, whole: torch.Size, what: str) -> ChunkStorageMetadata:
    fields = _fields(chunk, "ChunkStorageMetadata", what)
    offsets, sizes = _size(fields.get("offsets"), what), _size(fields.get("sizes"), what)
    if len(offsets) != len(whole) or len(sizes) != len(whole):
        raise _Damaged(what)
    if any(offset + own > all_ for offset, own, all_ in zip(offsets, sizes, whole, strict=True)):
        raise _Damaged(what)
    return ChunkStorageMetadata(offsets, sizes)


def _size(value: Any, what: str) -> torch.Size:
    is_made = isinstance(value, _Record) and value.kind == "Size" and len(value.arguments) == 1
    numbers = value.arguments[0] if is_made else None
    if not isinstance(numbers, tuple | list) or not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers):
        raise _Damaged(what)
    return torch.Size(numbers)


def _index(value: object) -> MetadataIndex:
    what = "it has a location of something that is no tensor"
    fields = _fields(value, "MetadataIndex", what)
    offset, number = fields.get("offset"), fields.get("index")
    if number is not None and type(number) is not int:
        raise _Damaged(what)
    return MetadataIndex(_text(fields.get("fqn")), None if offset is None else _size(offset, what), number)


def _place(index: object, place: object) -> _StorageInfo:
    """Returns the location of a tensor: a range of a file in the folder itself."""
    name = index.state.get("fqn") if isinstance(index, _Record) and index.state else index
    what = f"the place of {name!r:.200} is none in this folder"
    fields = _fields(place, "StorageInfo", what)
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if not isinstance(file, str) or file in ("", ".", "..") or set("/\\:\0") & set(file):
        raise _Damaged(what)
    if fields.get("transform_descriptors"):
        raise _Damaged(what)  # written through an extension (e.g. compression), which paceline does not support
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise _Damaged(what)
    return _StorageInfo(file, offset, length)


def _storage_meta(value: object) -> StorageMeta | None:
    """Returns the ids of the save; the stored folder path is ignored."""
    fields: Mapping[str, Any] = _fields(value, "StorageMeta", "it holds invalid storage metadata")
    save, load = (text if isinstance(text := fields.get(name), str) else None for name in ("save_id", "load_id"))
    return StorageMeta(save_id=save, load_id=load)
