"""Weight files of a plain module: safetensors, split into shards if large, with tied tensors stored once.

File names and index are those that transformers and most tools read. Values that safetensors cannot hold (a module's
`get_extra_state`, sparse, quantized or complex tensors) are saved to `model_extra_state.pt`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.parameter import is_lazy

from paceline.pytorch.checkpoint.safetensors_file import DTYPES, write_file
from paceline.pytorch.checkpoint.tensors import (
    CheckpointError,
    load_json,
    load_tensors,
    save_json,
    save_tensors,
)

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
PICKLED_WEIGHTS_NAME = "pytorch_model.bin"
PICKLED_WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
EXTRA_STATE_NAME = "model_extra_state.pt"

TIED_KEY = "tied"  # in a file's metadata: JSON, omitted name -> name that holds the same tensor
_OWN_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|model_extra_state\.pt")


@dataclass
class Sorted:
    """A state dict, split by file.

    Attributes:
        tensors: tensors that safetensors can hold, each with its own memory.
        tied: omitted name -> name that holds the same tensor.
        extra: values that safetensors cannot hold.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    extra: dict[str, Any]


def write_weights(state_dict: Mapping[str, Any], folder: str | os.PathLike[str], *, max_shard_bytes: int) -> list[str]:
    """Writes a state dict into `folder`, as one file or as shards of at most `max_shard_bytes`.

    A larger tensor gets its own shard. Weight files of an earlier call are removed once the new ones are complete.

    Returns: the names of the files.
    Raises: ValueError for a tensor without values (meta device); TypeError for extra state that could not be read back;
        OSError if the disk refuses.
    """
    return write_sorted(sort_out(state_dict), folder, max_shard_bytes=max_shard_bytes)


def write_sorted(
    weights: Sorted,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    apart: Mapping[str, int] | None = None,
) -> list[str]:
    """Writes the result of `sort_out`; raises as `write_weights`.

    Args:
        apart: the tensors of a separate last shard, name -> bytes. It is written only if `weights` has these tensors;
            otherwise the caller provides the file, under the name that `apart_name` returns.
    """
    folder, apart = Path(folder), apart or {}
    os.makedirs(folder, exist_ok=True)
    tensors = weights.tensors
    sizes = {key: num_bytes(tensor) for key, tensor in tensors.items() if key not in apart}
    shards = cut(sizes, max_shard_bytes)
    if apart:
        shards.append(list(apart))
    files = dict(zip(file_names(len(shards)), shards, strict=True))
    notes = notes_of_ties(weights.tied)
    for name, shard in files.items():
        if all(key in tensors for key in shard):
            forms = {key: (tensors[key].shape, tensors[key].dtype) for key in shard}
            write_file(folder / name, forms, tensors.__getitem__, {"format": "pt", **notes})
    return complete(folder, files, sum({**sizes, **apart}.values()), notes, weights.extra)


def notes_of_ties(tied: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata that records tied names in a file."""
    return {TIED_KEY: json.dumps(tied, sort_keys=True)} if tied else {}


def complete(
    folder: Path,
    files: Mapping[str, list[str]],
    total_size: int,
    notes: Mapping[str, str],
    extra: Mapping[str, Any],
) -> list[str]:
    """Writes the index and the extra state, and removes weight files of an earlier call.

    Args:
        files: file name -> names of its tensors.
        total_size: bytes of all tensors.
        notes: metadata of the index, which is written if there are several files.
        extra: values that safetensors cannot hold.

    Returns: the names of all files.
    """
    names = list(files)
    if len(files) > 1:
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total_size, **notes}, "weight_map": dict(sorted(weight_map.items()))}
        save_json(index, folder / WEIGHTS_INDEX_NAME)
        names.append(WEIGHTS_INDEX_NAME)
    if extra:
        save_tensors(extra, folder / EXTRA_STATE_NAME)
        names.append(EXTRA_STATE_NAME)
    remove_stale(folder, names)
    return names


def remove_stale(folder: Path, names: Iterable[str]) -> None:
    """Removes the weight files of an earlier call from `folder`, except `names`."""
    kept = set(names)
    for name in os.listdir(folder):
        if _OWN_NAMES.fullmatch(name) and name not in kept:
            os.unlink(folder / name)


def apart_name(weights: Sorted, apart: Mapping[str, int], *, max_shard_bytes: int) -> str:
    """Returns the name of the shard in which `write_sorted` stores the tensors `apart`."""
    sizes = {key: num_bytes(value) for key, value in weights.tensors.items() if key not in apart}
    return file_names(len(cut(sizes, max_shard_bytes)) + 1)[-1]


def read_weights(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the state dict in `folder`, on the CPU; None without weights. Safetensors take precedence over pickles.

    Omitted tied names are restored with the same tensor.

    Raises: CheckpointError, naming the file that is damaged or missing.
    """
    folder = Path(folder)
    for name, index_name in (
        (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
        (PICKLED_WEIGHTS_NAME, PICKLED_WEIGHTS_INDEX_NAME),
    ):
        if (folder / name).is_file():
            state, tied = read_file(folder / name)
        elif (folder / index_name).is_file():
            state, tied = _read_shards(folder / index_name)
        else:
            continue
        for dropped, kept in tied.items():
            if kept in state:
                state.setdefault(dropped, state[kept])
        if (folder / EXTRA_STATE_NAME).is_file():
            state.update(named(load_tensors(folder / EXTRA_STATE_NAME), folder / EXTRA_STATE_NAME))
        return state
    return None


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tensors of one file, on the CPU, and its tied names. Raises CheckpointError, naming the file."""
    if path.suffix != ".safetensors":
        return named(load_tensors(path), path), {}
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no mapping
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # SafetensorError, and torch's errors for an unknown dtype or shape
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return state, tied_names(metadata)


def alias_groups(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Returns a map from each further name of a tensor in `state_dict` to its first; partial views are excluded."""
    by_address: dict[Hashable, list[str]] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.layout is not torch.strided:
            continue
        if not tensor.is_meta and tensor.numel():
            by_address.setdefault(address_of(tensor), []).append(name)
    aliases = {}
    for names in by_address.values():
        if len(names) == 1:
            continue
        first: dict[tuple[Any, ...], str] = {}
        for name in names:
            tensor = state_dict[name]
            kept = first.setdefault((tensor.device, tensor.dtype, tensor.shape, tensor.stride()), name)
            if kept != name:
                aliases[name] = kept
    return aliases


def sort_out(state_dict: Mapping[str, Any]) -> Sorted:
    """Splits a state dict by file. Only overlapping and non-contiguous tensors are copied.

    Raises: ValueError for a tensor without values (lazy, or on the meta device).
    """
    tied = alias_groups(state_dict)
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    storages: set[tuple[Any, int]] = set()
    for name, value in state_dict.items():
        if name in tied:
            continue
        _require_values(name, value)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dtype not in DTYPES:
            extra[name] = value
            continue
        tensor = value.detach().contiguous()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        if tensor.numel() and storage in storages:
            tensor = tensor.clone()  # shares a storage with an earlier tensor, which safetensors does not allow
        storages.add(storage)
        tensors[name] = tensor
    # The extra file stores a tensor under each of its names.
    outside = {name: kept for name, kept in tied.items() if kept not in tensors}
    extra.update({name: state_dict[name] for name in outside})
    return Sorted(tensors, {name: kept for name, kept in tied.items() if name not in outside}, extra)


def _require_values(name: str, value: Any) -> None:
    if is_lazy(value):
        raise ValueError(f"{name} has no shape yet and no values to save: run one batch through the model first")
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and has no values to save: load or initialise the model")


def cut(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Splits the names, in order, into shards of at most `max_shard_bytes`; returns at least one shard.

    Args:
        sizes: the bytes of each tensor.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive: the number of bytes in one file")
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > max_shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


def file_names(count: int) -> list[str]:
    """Returns the file names of `count` shards."""
    if count == 1:
        return [WEIGHTS_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the values of a tensor."""
    return tensor.numel() * tensor.itemsize


def address_of(tensor: torch.Tensor) -> Hashable:
    """Returns where the values of a tensor start: the same for two tensors only if they share them.

    Devices whose memory has no addresses report 0 for every tensor: there it is the storage, and the offset in it.
    """
    return tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns (map from tensor name to file, metadata) of an index. Raises CheckpointError, naming the index."""
    index = load_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not is_map:
        raise CheckpointError(f"{path} is damaged: it has no weight_map of names to files")
    for name in weight_map.values():
        if Path(name).name != name or "\\" in name:
            raise CheckpointError(f"{path} names {name!r}, which is not a file of its folder")
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _read_shards(index_path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    weight_map, metadata = read_index(index_path)
    state: dict[str, Any] = {}
    for name in sorted(set(weight_map.values())):
        path = index_path.parent / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {index_path.name} lists it")
        state.update(read_file(path)[0])
    absent = [key for key in weight_map if key not in state]
    if absent:
        raise CheckpointError(f"{index_path} lists tensors that no shard holds: {few(absent, 5)}")
    return state, tied_names(metadata)


def tied_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the map of tied names; empty if another library wrote the file (the module's own ties then apply)."""
    try:
        tied = json.loads(metadata.get(TIED_KEY, "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(tied, dict):
        return {}
    return {name: kept for name, kept in tied.items() if isinstance(kept, str)}


def named(value: object, path: Path) -> dict[str, Any]:
    """Returns `value` if it is a state dict; otherwise raises CheckpointError, naming the file."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{path} holds no state dict")
    return value


def few(names: Iterable[str], most: int = 10) -> str:
    """Returns the first `most` names as text, with the number of the others."""
    names = list(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
