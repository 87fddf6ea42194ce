"""Model and optimizer by the names of parameters, so that what was saved fits any number of processes and any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_shards
from torch.optim import Optimizer

from paceline.checkpoint.files import has_weights, take_state
from paceline.checkpoint.shards import MODEL_FOLDER, OPTIMIZER_FOLDER, Shards, is_sharded, nested, settled
from paceline.checkpoint.tensors import CheckpointError, load_json, load_tensors, save_json
from paceline.checkpoint.weights import EXTRA_STATE_NAME, read_weights
from paceline.checkpoint.zero_files import has_zero_files, read_zero_files, read_zero_weights

NOTES_NAME = "sharded.json"  # what the folders of tensors cannot say
FULL_MODEL_NAME = "pytorch_model_fsdp.bin"  # of accelerate: the whole model, and the optimizer by name
FULL_OPTIMIZER_NAME = "optimizer.bin"

Named = dict[str, Any]
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


# ---- the model


@dataclass
class ModelState:
    """A model's state, sorted out for its folders.

    Attributes:
        tensors: each under the first of its names.
        tied: the other names -> that one.
        extra: what is no plain tensor (`get_extra_state`, quantised weights); alike on all processes.
    """

    tensors: Named
    tied: dict[str, str]
    extra: Named


def model_state(model: nn.Module) -> ModelState:
    """Its state as it lies here: shards as DTensors."""
    first: dict[int, str] = {}
    found = ModelState({}, {}, {})
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, DTensor) and (type(value) not in _PLAIN or value.layout is not torch.strided):
            found.extra[name] = value
        elif (kept := first.setdefault(id(value), name)) == name:
            found.tensors[name] = value.detach()
        else:
            found.tied[name] = kept
    return found


def load_model_in_place(model: nn.Module, folder: Path) -> bool:
    """Read the shards in a checkpoint straight into the model's own tensors, which may be shards of any mesh.

    Returns: False, with nothing changed, where names differ or loading is more than copying.
    Raises: CheckpointError for other shapes (nothing is changed then), or a damaged file.
    """
    shards, state = Shards(folder / MODEL_FOLDER), model_state(model)
    stored = {key.removeprefix("model.") for key in shards.tensors}
    names: dict[str, list[str]] = {name: [name] for name in state.tensors}
    for name, kept in state.tied.items():
        names[kept].append(name)
    source = {name: next((each for each in own if each in stored), None) for name, own in names.items()}
    known = {*state.tensors, *state.tied, *notes_of(folder).get("tied", {})}
    has_gaps = any(value.is_meta for value in state.tensors.values())  # whose values are on other processes
    is_other = state.extra or shards.plain or None in source.values() or stored - known
    if has_gaps or is_other or not _loads_plainly(model):
        return False
    shards.load({f"model.{source[name]}": value for name, value in state.tensors.items()})
    return True


def _loads_plainly(model: nn.Module) -> bool:
    """Whether loading is copying, for all of its modules."""
    return not any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        for module in model.modules()
    )


def read_whole_model(folder: Path) -> Named | None:
    """The whole state from the shards, or from accelerate's one file; on the host. None: the folder has neither."""
    if is_sharded(folder / MODEL_FOLDER):
        shards = Shards(folder / MODEL_FOLDER)
        values = {key: shards.read(key) for key in shards.metadata.state_dict_metadata}
        state: Named = nested(values, shards.paths).get("model", {})
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
    """The whole state of a checkpoint, in whatever form; None where `files.load_model` reads it itself.

    Args:
        has_part: this process holds a part of the model, so that the state is needed in any case.
    """
    weights = read_zero_weights(folder) or (read_weights(folder) if has_part else None)
    return read_whole_model(folder) if weights is None and not has_weights(folder) else weights


# ---- the optimizer


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each group; one that the model does not have goes by its place."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # an optimizer that holds the model's parameters in parts says which they are
    groups = getattr(optimizer, "groups", None) or [group["params"] for group in optimizer.param_groups]
    return [
        [names.get(id(parameter), f"group {number}, {place}") for place, parameter in enumerate(group)]
        for number, group in enumerate(groups)
    ]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Named:
    """`state_dict()` with names for numbers, shards as shards; all processes take part.

    Raises: TypeError, for a state that is not kept by parameter.
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
    return dict(_listed(settled(saved)))


def _require_names(nest: Any, where: str) -> None:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, which is no text: set checkpoint_format='full'.")
            _require_names(value, f"{where}[{key!r}]")


def _listed(nest: Any) -> Any:
    """The same nest with tuples that hold tensors as lists, which are stored tensor by tensor."""
    if isinstance(nest, Mapping):
        return {key: _listed(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple) and any(isinstance(value, Tensor) for value in nest):
        return [_listed(value) for value in nest]
    return nest


def load_optimizer_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Give an optimizer its state back, each tensor shared out as its parameter is now.

    Raises: CheckpointError, where its parameters are others, or the folder is damaged.
    """
    shards = Shards(folder / OPTIMIZER_FOLDER)
    parameters = dict(model.named_parameters())
    notes = notes_of(folder).get("placements", {})
    targets: Named = {}
    for key in shards.metadata.state_dict_metadata:
        path = shards.paths.get(key, ())
        parameter = parameters.get(str(path[2])) if len(path) > 3 and path[1] == "state" else None
        targets[key] = _target(shards, key, parameter, notes.get(key)) if key in shards.tensors else None
    saved = nested(shards.load(targets), shards.paths).get("optimizer", {})
    take_named(model, optimizer, saved, folder / OPTIMIZER_FOLDER)


def load_foreign_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path) -> bool:
    """Give an optimizer its state back from ZeRO's parts, or from accelerate's one file; False: neither is there.

    Raises: CheckpointError, where it does not fit.
    """
    path = folder / FULL_OPTIMIZER_NAME
    if has_zero_files(folder):
        take_named(model, optimizer, read_zero_files(folder).optimizer(), folder)
    elif path.is_file():
        take_named(model, optimizer, load_tensors(path), path)
    else:
        return False
    return True


def take_named(model: nn.Module, optimizer: Optimizer, saved: Any, path: Path) -> None:
    """Give an optimizer a state that goes by names. Raises: CheckpointError, where it does not fit."""
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


def _target(shards: Shards, key: str, parameter: Tensor | None, noted: list[str] | None) -> Tensor:
    """A tensor to read into: shared out as its parameter, or as it was, or whole."""
    size, dtype = shards.tensors[key]
    if isinstance(parameter, DTensor):
        if size == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if noted is not None:
            mesh = parameter.device_mesh
            placed = [_placement(text) for text in noted]
            fits = len(placed) == mesh.ndim and _divides(size, placed, tuple(mesh.shape))
            chosen = placed if fits else [Replicate()] * mesh.ndim
            return empty_shards(*size, dtype=dtype, device_mesh=mesh, placements=chosen)
    return shards.empty(key)


def _placement(text: str) -> Replicate | Shard:
    return Shard(int(text)) if text.isdigit() else Replicate()


def _divides(size: torch.Size, placements: list[Any], mesh: tuple[int, ...]) -> bool:
    return all(
        not isinstance(placement, Shard) or size[placement.dim] >= number
        for placement, number in zip(placements, mesh, strict=True)
    )


# ---- what the tensors do not say


def make_notes(model: nn.Module, tied: Mapping[str, str], optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Names that share a tensor; and how parts of the optimizer's state lie that have not their parameter's shape."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    placements = {
        ".".join(map(str, path)): [str(p.dim) if isinstance(p, Shard) else "whole" for p in value.placements]
        for path, value in _leaves((optimizer or {}).get("state", {}), ("optimizer", "state"))
        if isinstance(value, DTensor) and shapes.get(str(path[2])) != value.shape
    }
    return {"format": 1, "tied": dict(tied), "placements": placements}


def _leaves(nest: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(nest, list):
        for index, value in enumerate(nest):
            yield from _leaves(value, (*path, index))
    else:
        yield path, nest


def write_notes(notes: Mapping[str, Any], folder: Path) -> None:
    """Write them beside the folders of tensors."""
    save_json(dict(notes), folder / NOTES_NAME)


def notes_of(folder: Path) -> dict[str, Any]:
    """What `make_notes` gave; empty in checkpoints of others. Raises: CheckpointError, when the file is damaged."""
    if not (folder / NOTES_NAME).is_file():
        return {}
    notes = load_json(folder / NOTES_NAME)
    fields = (notes.get("tied"), notes.get("placements")) if isinstance(notes, dict) else (None, None)
    if not all(isinstance(value, dict) for value in fields):
        raise CheckpointError(f"{folder / NOTES_NAME} is damaged: it has no names")
    return dict(notes)
