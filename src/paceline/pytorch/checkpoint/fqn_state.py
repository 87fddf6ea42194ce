"""Model and optimizer state by fully qualified parameter names, independent of the number of processes and the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.layout import (
    FULL_MODEL_NAME,
    FULL_OPTIMIZER_NAME,
    MODEL_FOLDER,
    NOTES_NAME,
    OPTIMIZER_FOLDER,
    is_sharded,
)
from paceline.core.optional import LateModule
from paceline.pytorch.checkpoint.files import has_weights, take_state
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_json, load_tensors, save_json
from paceline.pytorch.checkpoint.weights import EXTRA_STATE_NAME, read_weights
from paceline.pytorch.model.tensor_parts import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import tensor as dtensor

    from paceline.pytorch.checkpoint import shards as sharded
    from paceline.pytorch.checkpoint import zero_files
else:
    dtensor = LateModule("torch.distributed.tensor")
    sharded = LateModule("paceline.pytorch.checkpoint.shards")
    zero_files = LateModule("paceline.pytorch.checkpoint.zero_files")

Named = dict[str, Any]
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


# ---- the model


@dataclass
class ModelState:
    """A model's state, split by destination.

    Attributes:
        tensors: each tensor under the first of its names.
        tied: maps the other names of a tensor to its first name.
        extra: values other than plain tensors (`get_extra_state`, quantized weights), equal on all processes.
    """

    tensors: Named
    tied: dict[str, str]
    extra: Named


def model_state(model: nn.Module) -> ModelState:
    """Returns the model's state on this process, with sharded tensors as DTensors."""
    first: dict[int, str] = {}
    found = ModelState({}, {}, {})
    for name, value in model.state_dict(keep_vars=True).items():
        if not is_dtensor(value) and (type(value) not in _PLAIN or value.layout is not torch.strided):
            found.extra[name] = value
        elif (kept := first.setdefault(id(value), name)) == name:
            found.tensors[name] = value.detach()
        else:
            found.tied[name] = kept
    return found


def load_model_in_place(model: nn.Module, folder: Path) -> bool:
    """Loads the shards of a checkpoint directly into the model's own tensors, which may be sharded over any mesh.

    Returns: False, with nothing changed, if names differ, tensors have no values here, or loading does more than copy.
    Raises: CheckpointError, if shapes differ (nothing is changed then) or a file is damaged.
    """
    shards, state = sharded.Shards(folder / MODEL_FOLDER), model_state(model)
    stored = {key.removeprefix("model.") for key in shards.tensors}
    names: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for name, kept in state.tied.items():
        names[kept].append(name)
    source = {name: next((each for each in own if each in stored), None) for name, own in names.items()}
    known = {*state.tensors, *state.tied, *notes_of(folder).get("tied", {})}
    has_gaps = any(value.is_meta for value in state.tensors.values())  # other processes hold their values
    is_other = state.extra or shards.plain or None in source.values() or stored - known
    if has_gaps or is_other or not _loads_plainly(model):
        return False
    shards.load({f"model.{source[name]}": value for name, value in state.tensors.items()})
    return True


def _loads_plainly(model: nn.Module) -> bool:
    """True if loading merely copies tensors, in all modules of the model."""
    return not any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        for module in model.modules()
    )


def read_whole_model(folder: Path) -> Named | None:
    """Returns the whole model state on the host, from shards or accelerate's single file; None if there is neither."""
    if is_sharded(folder / MODEL_FOLDER):
        shards = sharded.Shards(folder / MODEL_FOLDER)
        values = {key: shards.read(key) for key in shards.metadata.state_dict_metadata}
        state: Named = sharded.nested(values, shards.paths).get("model", {})
        if (folder / EXTRA_STATE_NAME).is_file():
            state.update(load_tensors(folder / EXTRA_STATE_NAME))
        for name, kept in notes_of(folder).get("tied", {}).items():
            if kept in state:
                state.setdefault(name, state[kept])
        return state
    if (folder / FULL_MODEL_NAME).is_file():
        found = load_tensors(folder / FULL_MODEL_NAME)
        if not isinstance(found, dict):
            raise CheckpointError(f"{folder / FULL_MODEL_NAME} holds no state dict")
        return found
    return None


def read_any_weights(folder: Path, has_part: bool) -> Named | None:
    """Returns the whole model state of a checkpoint in any format; None if `files.load_model` can read it itself.

    Args:
        has_part: this process holds a shard of the model, so that the state is needed in any case.
    """
    if zero_files.has_zero_files(folder):
        return zero_files.read_zero_files(folder).weights()
    weights = read_weights(folder) if has_part else None
    return read_whole_model(folder) if weights is None and not has_weights(folder) else weights


# ---- the optimizer


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the parameter names of each group; a parameter that is not the model's is named by its position."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # an optimizer over shards lists the model's own parameters in `groups`
    groups = getattr(optimizer, "groups", None) or [group["params"] for group in optimizer.param_groups]
    return [
        [names.get(id(parameter), f"group {number}, {place}") for place, parameter in enumerate(group)]
        for number, group in enumerate(groups)
    ]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Named:
    """Returns `state_dict()` keyed by parameter names instead of numbers, with sharded tensors unchanged. Collective.

    Raises: TypeError, if the state is not stored per parameter.
    """
    saved = optimizer.state_dict()
    groups = names_of(model, optimizer)
    if not {"state", "param_groups"} <= saved.keys():
        raise TypeError(
            f"The state of {type(optimizer).__name__} is not kept by parameter, so it cannot be written in shards: "
            "set checkpoint_format='full'."
        )
    name_of = dict(enumerate(name for names in groups for name in names))
    saved["state"] = {name_of[index]: entry for index, entry in saved["state"].items()}
    saved["param_groups"] = [
        {**group, "params": names} for group, names in zip(saved["param_groups"], groups, strict=True)
    ]
    _require_names(saved, "the optimizer's state")
    return dict(_listed(sharded.settled(saved)))


def _require_names(nest: object, where: str) -> None:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, which is no text: set checkpoint_format='full'.")
            _require_names(value, f"{where}[{key!r}]")


def _listed(nest: object) -> Any:
    """Returns the nest with tuples that hold tensors turned into lists, which are stored tensor by tensor."""
    if isinstance(nest, Mapping):
        return {key: _listed(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple) and any(isinstance(value, Tensor) for value in nest):
        return [_listed(value) for value in nest]
    return nest


def load_optimizer_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Restores an optimizer's state, with each tensor sharded as its parameter is now.

    Raises: CheckpointError, if the parameters differ or the folder is damaged.
    """
    shards = sharded.Shards(folder / OPTIMIZER_FOLDER)
    parameters = dict(model.named_parameters())
    notes = notes_of(folder).get("placements", {})
    targets: Named = {}
    for key in shards.metadata.state_dict_metadata:
        path = shards.paths.get(key, ())
        parameter = parameters.get(str(path[2])) if len(path) > 3 and path[1] == "state" else None
        targets[key] = _target(shards, key, parameter, notes.get(key)) if key in shards.tensors else None
    for name, kept in notes_of(folder).get("aliases", {}).items():
        if name in targets and kept in targets:
            targets[name] = targets[kept]
    saved = sharded.nested(shards.load(targets), shards.paths).get("optimizer", {})
    take_named(model, optimizer, saved, folder / OPTIMIZER_FOLDER)


def load_foreign_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path) -> bool:
    """Restores an optimizer's state from ZeRO's partitions or accelerate's single file.

    Returns: False if neither exists.
    Raises: CheckpointError, if the state does not fit.
    """
    path = folder / FULL_OPTIMIZER_NAME
    if zero_files.has_zero_files(folder):
        take_named(model, optimizer, zero_files.read_zero_files(folder).optimizer(), folder)
    elif path.is_file():
        take_named(model, optimizer, load_tensors(path), path)
    else:
        return False
    return True


def take_named(model: nn.Module, optimizer: Optimizer, saved: Any, path: Path) -> None:
    """Restores an optimizer's state that is keyed by name. Raises CheckpointError if it does not fit."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{path} does not fit: it has no param_groups")
    own = names_of(model, optimizer)
    found = [group.get("params", []) for group in groups]
    if [sorted(names) for names in own] != [sorted(names) for names in found]:
        differing = sorted({*chain.from_iterable(own)} ^ {*chain.from_iterable(found)})
        what = f"{', '.join(differing[:5])} are on one side only" if differing else "they are grouped otherwise"
        raise CheckpointError(f"{path} does not fit the parameters of this {type(optimizer).__name__}: {what}")
    numbers = {name: number for number, name in enumerate(name for names in own for name in names)}
    state = {numbers[name]: entry for name, entry in (saved.get("state") or {}).items() if name in numbers}
    numbered = [
        {**group, "params": [numbers[name] for name in names]} for group, names in zip(groups, own, strict=True)
    ]
    take_state(optimizer, {**saved, "state": state, "param_groups": numbered}, path)


def _target(shards: sharded.Shards, key: str, parameter: Tensor | None, noted: list[str] | None) -> Tensor:
    """Returns an empty tensor to read into: sharded like its parameter, else as it was saved, else whole."""
    size, dtype = shards.tensors[key]
    if is_dtensor(parameter):
        if size == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if noted is not None:
            mesh = parameter.device_mesh
            placed = [_placement(text) for text in noted]
            fits = len(placed) == mesh.ndim and _divides(size, placed, tuple(mesh.shape))
            chosen = placed if fits else [dtensor.Replicate()] * mesh.ndim
            return dtensor.empty(*size, dtype=dtype, device_mesh=mesh, placements=chosen)
    return shards.empty(key)


def _placement(text: str) -> dtensor.Replicate | dtensor.Shard:
    return dtensor.Shard(int(text)) if text.isdigit() else dtensor.Replicate()


def _divides(size: torch.Size, placements: list[Any], mesh: tuple[int, ...]) -> bool:
    return all(
        not isinstance(placement, dtensor.Shard) or size[placement.dim] >= number
        for placement, number in zip(placements, mesh, strict=True)
    )


# ---- metadata that the tensors do not hold


def make_notes(model: nn.Module, tied: Mapping[str, str], optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the names that share a tensor, and the placements of optimizer state not shaped like its parameter."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    first: dict[int, str] = {}
    placements: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for path, value in _leaves((optimizer or {}).get("state", {}), ("optimizer", "state")):
        name = ".".join(map(str, path))
        if is_dtensor(value) and shapes.get(str(path[2])) != value.shape:
            placements[name] = [str(p.dim) if isinstance(p, dtensor.Shard) else "whole" for p in value.placements]
        if isinstance(value, Tensor) and (kept := first.setdefault(id(value), name)) != name:
            aliases[name] = kept
    return {"format": 1, "tied": dict(tied), "placements": placements, "aliases": aliases}


def _leaves(nest: object, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(nest, list):
        for index, value in enumerate(nest):
            yield from _leaves(value, (*path, index))
    else:
        yield path, nest


def write_notes(notes: Mapping[str, Any], folder: Path) -> None:
    """Writes the result of `make_notes` into a checkpoint."""
    save_json(dict(notes), folder / NOTES_NAME)


def notes_of(folder: Path) -> dict[str, Any]:
    """Reads what `write_notes` wrote; empty for other libraries' checkpoints. Raises CheckpointError if damaged."""
    if not (folder / NOTES_NAME).is_file():
        return {}
    notes = load_json(folder / NOTES_NAME)
    fields = (notes.get("tied"), notes.get("placements")) if isinstance(notes, dict) else (None, None)
    if not all(isinstance(value, dict) for value in fields):
        raise CheckpointError(f"{folder / NOTES_NAME} is damaged: it has no names")
    return dict(notes)
