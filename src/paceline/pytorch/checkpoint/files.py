"""The files of a checkpoint, under transformers' names, so that each library can load the other's checkpoints.

All functions take and return state on the host, so that a caller can copy first and write later. Reading never runs
code from a file. `checkpoint.folders` chooses and publishes the folder.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from paceline.args.secrets import masked
from paceline.checkpoint.manifest import KnownFile
from paceline.pytorch.checkpoint.adapters import has_adapter_files, has_adapters, load_adapters
from paceline.pytorch.checkpoint.background import HostCopy
from paceline.pytorch.checkpoint.frozen_cache import FrozenPart, fingerprint
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_tensors
from paceline.pytorch.checkpoint.validate_state import find_misfit
from paceline.pytorch.checkpoint.weights import (
    PICKLED_WEIGHTS_INDEX_NAME,
    PICKLED_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    Sorted,
    alias_groups,
    apart_name,
    few,
    read_weights,
    sort_out,
    write_sorted,
    write_weights,
)

logger = logging.getLogger(__name__)

OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
DEFAULT_SHARD_BYTES = 50 * 10**9  # as in transformers: only hosts that limit file sizes need smaller files

_REFUSALS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError)
_AS_IT_IS = "its files are loaded by name instead"


class HasState(Protocol):
    """Any object with `state_dict` and `load_state_dict`, such as an optimizer, a schedule or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, Any] | None = None,
    processing_class: object = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a model and its processing class into `folder`, in the form that the model's own library loads.

    A model with `save_pretrained` (transformers, PEFT, diffusers, ...) writes itself. Any other module is written as
    `model.safetensors` with tied tensors stored once, and is split into shards above `max_shard_bytes` (50 GB by
    default). `state_dict` replaces the model's own, for weights that were gathered or copied to the host before.

    Raises: OSError if the disk refuses; ValueError or TypeError for state that cannot be stored.
    """
    model = without_compile(model)
    os.makedirs(folder, exist_ok=True)
    save_pretrained = getattr(model, "save_pretrained", None)
    if callable(save_pretrained):
        accepted = _parameters(save_pretrained)
        options: dict[str, Any] = {}
        if state_dict is not None:
            if "state_dict" not in accepted and not (has_adapters(model) and "**" in accepted):
                raise TypeError(
                    f"{type(model).__name__}.save_pretrained takes no state_dict, so weights gathered elsewhere "
                    "cannot be given to it: override save_model, or add that parameter"
                )
            options["state_dict"] = dict(state_dict)
        if max_shard_bytes is not None and "max_shard_size" in accepted:
            options["max_shard_size"] = max_shard_bytes
        save_pretrained(os.fspath(folder), **options)
    else:
        weights = model.state_dict() if state_dict is None else state_dict
        write_weights(weights, folder, max_shard_bytes=max_shard_bytes or DEFAULT_SHARD_BYTES)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(os.fspath(folder))


def store_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    frozen: FrozenPart,
    copy: HostCopy | None = None,
) -> dict[str, KnownFile]:
    """Writes the weights of a plain module into a checkpoint, with frozen weights in a separate shard.

    Args:
        frozen: links that shard from the previous checkpoint, if possible.
        copy: receives a copy of the weights, to be written later; None writes them now.

    Returns: the files whose hash is already known.
    Raises: as `save_model`.
    """
    weights = sort_out(without_compile(model).state_dict())
    apart = frozen.names(without_compile(model), weights.tensors)
    known: dict[str, KnownFile] = {}
    if apart:
        name = apart_name(weights, apart, max_shard_bytes=DEFAULT_SHARD_BYTES)
        prints = {key: fingerprint(weights.tensors[key]) for key in apart}
        placed = frozen.place(prints, Path(folder, name), copy.add if copy is not None else lambda write: write())
        if placed is not None:
            known = placed
            weights.tensors = {key: tensor for key, tensor in weights.tensors.items() if key not in apart}
        frozen.written(prints, name)

    def write(state: Sorted) -> None:
        write_sorted(state, folder, max_shard_bytes=DEFAULT_SHARD_BYTES, apart=apart)

    if copy is None:
        write(weights)
    else:
        copy.add_weights(weights, write)
    return known


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """True if `folder` holds model or adapter weights under any of the names that `load_model` reads."""
    names = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, PICKLED_WEIGHTS_NAME, PICKLED_WEIGHTS_INDEX_NAME)
    return any(Path(folder, name).is_file() for name in names) or has_adapter_files(Path(folder))


def load_model(model: nn.Module, folder: str | os.PathLike[str], state: dict[str, Any] | None = None) -> list[str]:
    """Loads the weights in `folder` into `model`, which is unchanged if they do not fit.

    Reads safetensors, shards, `pytorch_model.bin` (tensors only) and PEFT adapters. A transformers checkpoint whose
    weights have another form than in the model (fused experts, renamed layers) is loaded by the model's own
    `from_pretrained`, at the cost of a second copy on the host.

    Args:
        state: the weights, if they were already read from files in another format.

    Returns: one sentence each about weights that are missing or unexpected.
    Raises: CheckpointError, naming the file, or the shapes that differ.
    """
    model = without_compile(model)
    folder = Path(folder)
    if has_adapters(model) and has_adapter_files(folder):
        return load_adapters(model, folder)
    is_own_form = state is None
    state = read_weights(folder) if state is None else state
    if state is None:
        found = sorted(os.listdir(folder)) if folder.is_dir() else []
        raise CheckpointError(
            f"{folder} holds no weights to load: expected model.safetensors, pytorch_model.bin or their indexes, "
            f"found {few(found) or 'nothing'}"
        )
    own = model.state_dict()
    missing, unexpected = _name_differences(own, state)
    if (missing or unexpected) and is_own_form and _is_pretrained(model, folder):
        try:
            return _load_through_class(model, folder)
        except _REFUSALS as error:  # usually a subclass with its own constructor
            logger.warning("%s.from_pretrained cannot read %s (%s): %s", type(model).__name__, folder, error, _AS_IT_IS)
    if not _renames_on_load(model):
        _check_fit(model, own, state, folder)
    return _put(model, state, folder, missing, unexpected)


def load_rng(folder: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> dict[str, Any] | None:
    """Returns this process's random number states, written by paceline or transformers.

    If the file is missing, logs a warning and returns None.

    Raises: CheckpointError, naming the file, if it is damaged.
    """
    path = Path(folder, rng_name(rank, world_size))
    if not path.is_file():
        logger.warning("%s is missing, so the random state is not restored", path)
        return None
    return _dict_of(path)


def showable_arguments(args_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of `training_args.bin`: arguments as plain values or text, with secrets masked."""
    return {name: _showable(value) for name, value in masked(args_dict).items()}


def rng_name(rank: int, world_size: int) -> str:
    """Returns the file name of a rank's random number states."""
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{rank}.pth"


def _showable(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _showable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_showable(item) for item in value]
    return str(value)


def _dict_of(path: Path) -> dict[str, Any]:
    value = load_tensors(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where a state dict is expected")
    return value


def load_state(target: HasState, path: Path) -> None:
    """Loads a state dict file into `target`. Raises FileNotFoundError, or CheckpointError if it does not fit."""
    take_state(target, _dict_of(path), path)


def take_state(target: HasState, state: dict[str, Any], path: Path) -> None:
    """Loads a state read from `path` into `target`. If it does not fit, restores the old state and raises
    CheckpointError.
    """
    misfit = find_misfit(target, state)
    if misfit is not None:
        raise CheckpointError(f"{path} does not fit this {type(target).__name__}: {misfit}")
    before = dict(target.state_dict())
    try:
        target.load_state_dict(state)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
        # torch's optimizers convert values after storing the new state, so a failure can leave half of it.
        with suppress(*_REFUSALS):
            target.load_state_dict(before)
        raise CheckpointError(
            f"{path} does not fit this {type(target).__name__}: {type(error).__name__}: {error}"
        ) from error


def without_compile(model: nn.Module) -> nn.Module:
    """Returns the module inside `torch.compile`'s wrapper, whose parameter names are stored."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _parameters(function: Any) -> set[str]:
    """Returns the names of a function's parameters; "**" stands for any further keyword."""
    kinds = inspect.signature(function).parameters.values()
    return {"**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in kinds}


def _name_differences(own: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns (missing names, except those tied to a name in `state`; names unknown to the model)."""
    first = alias_groups(own)
    given = {first.get(name, name) for name in state}
    missing = [name for name in own if name not in state and first.get(name, name) not in given]
    return missing, [name for name in state if name not in own]


def _renames_on_load(model: nn.Module) -> bool:
    """True if the model edits a state dict while loading it; then only loading shows if the state dict fits."""
    return any(module._load_state_dict_pre_hooks for module in model.modules())


def _check_fit(model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], folder: Path) -> None:
    shared = [name for name in own if name in state]
    if own and not shared:
        raise CheckpointError(
            f"no weight in {folder} has a name that the model knows: the checkpoint has {few(state)}; "
            f"the model has {few(own)}"
        )
    differing = [name for name in shared if _shape(own[name]) != _shape(state[name])]
    if any(not _loads_by_itself(model, name) for name in differing):
        shown = [f"{name} {_shape(state[name])} instead of {_shape(own[name])}" for name in differing]
        raise CheckpointError(f"{folder} does not fit the model, whose weights have other shapes: {few(shown)}")


def _loads_by_itself(model: nn.Module, name: str) -> bool:
    """True if the model, or the module that holds this tensor, overrides loading, and so may accept any shape."""
    owner = model.get_submodule(name.rpartition(".")[0])
    ways = (type(model).load_state_dict, type(owner)._load_from_state_dict)
    return any(not str(way.__module__).startswith("torch.nn.") for way in ways)


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _put(model: nn.Module, state: dict[str, Any], folder: Path, missing: list[str], unexpected: list[str]) -> list[str]:
    own = model.state_dict()
    is_risky = any(name in own and _shape(own[name]) != _shape(value) for name, value in state.items())
    # loading may fail after half of the state was loaded
    before = {name: deepcopy(value) for name, value in own.items()} if is_risky else None
    try:
        result = model.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        if before is not None:
            with suppress(*_REFUSALS):
                model.load_state_dict(before)
        raise CheckpointError(f"{folder} does not fit the model: {error}") from error
    if _renames_on_load(model) and result is not None:
        missing, unexpected = list(result.missing_keys), list(result.unexpected_keys)
    return _notes(folder, missing, unexpected)


def _notes(folder: Path, missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    notes = []
    missing, unexpected = list(missing), list(unexpected)
    if missing:
        notes.append(
            f"There were missing keys in the checkpoint model loaded: {folder} lacks weights of the model, which keep "
            f"their values: {few(missing)}"
        )
    if unexpected:
        notes.append(
            f"There were unexpected keys in the checkpoint model loaded: {folder} has weights that the model does not "
            f"know and that are left out: {few(unexpected)}"
        )
    return notes


def _is_pretrained(model: nn.Module, folder: Path) -> bool:
    is_loadable = callable(getattr(type(model), "from_pretrained", None)) and hasattr(model, "config")
    return is_loadable and (folder / "config.json").is_file()


def _load_through_class(model: Any, folder: Path) -> list[str]:
    """Loads the folder into a second model of the same class, and copies its weights into `model`."""
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    widest = max(floats, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    with torch.random.fork_rng(devices=[]):  # from_pretrained draws values for weights that the checkpoint lacks
        other, info = type(model).from_pretrained(
            os.fspath(folder), config=model.config, dtype=widest, output_loading_info=True, local_files_only=True
        )
    missing = list(info.get("missing_keys", ()))
    state = {name: value for name, value in other.state_dict().items() if name not in missing}
    _check_fit(model, model.state_dict(), state, folder)
    return _put(model, state, folder, missing, list(info.get("unexpected_keys", ())))
