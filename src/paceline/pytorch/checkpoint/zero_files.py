"""Reads checkpoints that DeepSpeed wrote for transformers: whole model and optimizer state, by name.

The file `latest` names a folder. In it each process wrote one file of float32 partitions, and the first process (with
stage 3 each process) one that describes the model. `latest_universal` names a folder that DeepSpeed's `ds_to_universal`
converted. Reading requires no DeepSpeed, and runs no code in the files: DeepSpeed's few classes in them are replaced by
stand-ins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.pickles import Buildable
from paceline.pytorch.checkpoint.tensors import CheckpointError, open_file
from paceline.pytorch.checkpoint.torch_files import read_torch_file
from paceline.pytorch.checkpoint.validate_state import wrap_load_error

Named = dict[str, Any]
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
WEIGHTS = "fp32"  # key of the master weights, next to the keys of the optimizer's state
_PARTS = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODELS = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_WHOLE_MODEL = "mp_rank_00_model_states.pt"


class StandIn(Buildable):
    """Replaces an object of one of DeepSpeed's classes; it only holds the object's fields."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.fields: Named = {}

    def built(self, state: object) -> StandIn:
        """Returns itself, with the fields that the object had."""
        self.fields = state if isinstance(state, dict) else {}
        return self


_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class EngineFiles:
    """The files of a DeepSpeed engine, with optimizer state in any format.

    Values stay in the files until they are read.

    Args:
        folder: contains the files.
        models: the contents of each process's model file; only one if each process holds the whole model.
        stage: ZeRO's stage.

    Attributes:
        shapes: for each parameter group of the optimizer, the shapes of the trained parameters by name.
        trained: the shapes of all trained parameters by name.
        tied: name -> name that holds the same tensor.
    """

    def __init__(self, folder: Path, models: list[Named], stage: int) -> None:
        self.folder = folder
        self.models = models
        self.stage = stage
        self.shapes: list[dict[str, torch.Size]] = [dict(group) for group in models[0]["param_shapes"]]
        self.trained = {name: shape for group in self.shapes for name, shape in group.items()}
        self._frozen: dict[str, torch.Size] = dict(models[0].get("frozen_param_shapes") or {}) if stage == 3 else {}
        self._module: Named = models[0]["module"]
        held = [name for name, value in self._module.items() if stage < 3 or not is_emptied(value)]
        self._names = dict.fromkeys([*held, *self._frozen, *self.trained])
        shared = models[0].get("shared_params") or {}
        self.tied: dict[str, str] = {name: kept for name, kept in shared.items() if kept in self._names}

    # ---- implemented for each format

    def read_trained(self, name: str, key: str) -> Tensor | None:
        """Returns one parameter, or its optimizer state under `key`, whole; None if absent."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Returns the dtype of the weights that `read_trained` returns for a parameter; None if it returns None."""
        raise NotImplementedError

    def kept(self, name: str) -> Named:
        """Returns all optimizer state of one parameter."""
        raise NotImplementedError

    def groups(self) -> list[Named]:
        """Returns the optimizer's parameter groups; their `params` are indices into `shapes`."""
        raise NotImplementedError

    # ---- common to all formats

    def names(self) -> list[str]:
        """Returns the names of all values of the model's state, except names tied to another."""
        return [name for name in self._names if name not in self.tied]

    def read(self, name: str) -> Any:
        """Returns one whole value of the model's state, in float32 if it is trained. Raises CheckpointError."""
        with wrap_load_error(self.folder):
            if name in self.trained:
                found = self.read_trained(name, WEIGHTS)
                if found is not None or self.stage == 3:
                    return found
            elif name in self._frozen:
                pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
                shape = self._frozen[name]
                return torch.cat(pieces)[: shape.numel()].view(shape)
            return self._module[name]

    def form_of(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """Returns the shape and dtype of one value without gathering it; None if it is not a tensor.

        Raises: CheckpointError.
        """
        with wrap_load_error(self.folder):
            dtype = self.dtype_of(name) if name in self.trained else None
            if dtype is not None:
                return self.trained[name], dtype
            if name in self._frozen:
                return self._frozen[name], self.models[0]["frozen_param_fragments"][name].dtype
            value = self._module[name]
            return (value.shape, value.dtype) if isinstance(value, Tensor) else None

    def weights(self) -> Named:
        """Returns the model's state, with trained parameters in float32. Raises CheckpointError."""
        state = {name: self.read(name) for name in self.names()}
        return {**state, **{name: state[kept] for name, kept in self.tied.items()}}

    def optimizer(self) -> Named:
        """Returns the optimizer's state by parameter name. Raises CheckpointError."""
        with wrap_load_error(self.folder):
            state = {name: self.kept(name) for name in self.trained}
            groups = [
                {**group, "params": [name for place in group["params"] for name in self.shapes[place]]}
                for group in self.groups()
            ]
        return {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": groups}


class ZeroFiles(EngineFiles):
    """The partitions that each process wrote: one flat tensor for each parameter group.

    Args:
        folder, models, stage: see `EngineFiles`.
        parts: the contents of each process's optimizer file, by rank.
    """

    def __init__(self, folder: Path, models: list[Named], parts: list[Named], stage: int) -> None:
        super().__init__(folder, models, stage)
        self._parts = parts
        self._bases = [self._base(part) for part in parts]
        self._places: dict[str, tuple[int, int]] = {}  # name -> (group, offset of a process's part with stage 3)
        start = 0
        for number, group in enumerate(self.shapes):
            for name, shape in group.items():
                self._places[name] = number, start
                start += self._size(shape)

    def _base(self, part: Named) -> Named:
        base = part["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{self.folder} holds an elastic form of the optimizer's state, which is not read: put the weights "
                "together with zero_to_fp32.py, and begin from those"
            )
        return dict(base)

    def _size(self, shape: torch.Size) -> int:
        """Returns the number of elements in each process's part of a parameter that is split among all (stage 3)."""
        return -(-shape.numel() // len(self._parts))

    def _flats(self, rank: int, key: str) -> list[Tensor]:
        """Returns the flat tensors of one process, by group."""
        if key == WEIGHTS:
            name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            return list(self._parts[rank][name])
        state = self._bases[rank]["state"]
        return [state[index][key] for index in range(len(state))]

    def read_trained(self, name: str, key: str) -> Tensor | None:
        """See `EngineFiles`. With stage 3 each parameter is split among all processes; otherwise each group is."""
        number, start = self._places[name]
        shape, pieces = self.trained[name], []
        for rank, part in enumerate(self._parts):
            if self.stage == 3:
                pieces += list(cut(self._flats(rank, key), start, self._size(shape)))
                continue
            found = part["param_slice_mappings"][number].get(name)
            if found is not None:
                pieces.append(self._flats(rank, key)[number][_range(found)])
        return torch.cat(pieces)[: shape.numel()].view(shape) if pieces else None

    def dtype_of(self, name: str) -> torch.dtype | None:
        """See `EngineFiles`."""
        number, _ = self._places[name]
        if self.stage == 3:
            return self._flats(0, WEIGHTS)[0].dtype
        is_there = any(name in part["param_slice_mappings"][number] for part in self._parts)
        return self._flats(0, WEIGHTS)[number].dtype if is_there else None

    def kept(self, name: str) -> Named:
        """See `EngineFiles`. State as long as the weights is per element; other state is common to all parameters."""
        first, entry = self._bases[0]["state"].get(0, {}), {}
        flats = self._flats(0, WEIGHTS)
        for key, value in first.items():
            if isinstance(value, Tensor) and flats and value.dim() and value.numel() >= flats[0].numel():
                found = self.read_trained(name, key)
                if found is None:
                    return {}
                entry[key] = found
            else:
                entry[key] = value.clone() if isinstance(value, Tensor) else value
        return entry

    def groups(self) -> list[Named]:
        """See `EngineFiles`."""
        return list(self._bases[0]["param_groups"])


class UniversalFiles(EngineFiles):
    """The universal format of DeepSpeed's `ds_to_universal`: a folder of whole tensors for each parameter.

    Args:
        folder, models, stage: see `EngineFiles`.
        common: values that are the same for all parameters.
    """

    def __init__(self, folder: Path, models: list[Named], common: Named, stage: int) -> None:
        super().__init__(folder, models, stage)
        self._common = common

    def _place(self, name: str) -> Path:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{self.folder} names a parameter {name!r}, which is not inside the folder")
        return self.folder / "zero" / path

    def read_trained(self, name: str, key: str) -> Tensor | None:
        """See `EngineFiles`. The files of stage 3 hold flat tensors, which are reshaped here."""
        path = self._place(name) / f"{key}.pt"
        if self.stage < 3 and not path.is_file():
            return None
        value = read_plainly(path)
        tensor: Tensor = value["param"] if isinstance(value, Mapping) else value
        return tensor.view(self.trained[name])

    def dtype_of(self, name: str) -> torch.dtype | None:
        """See `EngineFiles`."""
        found = self.read_trained(name, WEIGHTS)
        return found.dtype if found is not None else None

    def kept(self, name: str) -> Named:
        """See `EngineFiles`. Stage 3 stores the number of steps with the common values."""
        place = self._place(name)
        entry: Named = {}
        state = (self._common.get("optimizer_state_dict") or {}).get("state") or {}
        for path in sorted(place.glob("*.pt")):
            if path.stem == "step":
                entry["step"] = read_plainly(path)
            elif path.stem != WEIGHTS:
                entry[path.stem] = self.read_trained(name, path.stem)
        if entry:
            for key, value in state.get(0, {}).items():
                if key not in entry:
                    entry[key] = value.clone() if isinstance(value, Tensor) else value
        return entry

    def groups(self) -> list[Named]:
        """See `EngineFiles`."""
        return list(self._common["param_groups"])


def _range(address: StandIn) -> slice:
    """Returns the range of a piece of a parameter in the flat tensor of its group."""
    start, length = int(address.fields["start"]), int(address.fields["numel"])
    return slice(start, start + length)


def is_emptied(value: object) -> bool:
    """True for the empty tensor that stage 3 leaves in place of a parameter in the model file."""
    return isinstance(value, Tensor) and not value.numel()


def cut(tensors: list[Tensor], start: int, size: int) -> Iterator[Tensor]:
    """Yields `size` elements, starting at `start`, of the concatenation of tensors, in pieces."""
    for tensor in tensors:
        flat = tensor.reshape(-1)
        taken = flat[max(start, 0) : max(start + size, 0)]
        if taken.numel():
            yield taken
        start -= flat.numel()


def has_zero_files(checkpoint: Path) -> bool:
    """True if DeepSpeed wrote this checkpoint."""
    return any((checkpoint / name).is_file() for name in (LATEST, LATEST_UNIVERSAL))


def read_zero_files(checkpoint: Path) -> EngineFiles:
    """Returns the files of a DeepSpeed checkpoint: those that `latest` names, else those of `latest_universal`.

    Raises:
        CheckpointError: a file is missing or damaged, could run code, or has an unsupported format.
    """
    paths = [checkpoint / name for name in (LATEST, LATEST_UNIVERSAL) if (checkpoint / name).is_file()]
    named = [path.read_text(encoding="utf-8").strip() for path in paths]
    folders = [checkpoint / name for name in named if Path(name).name == name and (checkpoint / name).is_dir()]
    if not folders:
        raise CheckpointError(f"{paths[0]} names {named[0]!r}, which is not a folder of the checkpoint")
    return read_universal(folders[0]) if (folders[0] / "zero").is_dir() else read_parts(folders[0])


def read_parts(folder: Path) -> ZeroFiles:
    """Returns ZeRO's partitions in a folder. Raises as `read_zero_files`."""
    found = {(int(match[1]), int(match[2])): path for path in folder.iterdir()
             if (match := _PARTS.fullmatch(path.name))}  # fmt: skip
    if not found or any(matrix for _, matrix in found):
        raise CheckpointError(
            f"{folder} holds no parts of ZeRO alone (zero_pp_rank_N_mp_rank_00_optim_states.pt): put the weights "
            "together with zero_to_fp32.py, and load those"
        )
    paths = [found[key] for key in sorted(found)]
    with wrap_load_error(folder):
        parts = [read_mapping(path)["optimizer_state_dict"] for path in paths]
        stage = read_stage(parts[0])
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(paths))]
        models = [read_mapping(folder / name) for name in (names if stage == 3 else [_WHOLE_MODEL])]
        count = parts[0]["partition_count"]
        expected = {count} if isinstance(count, int) else set(count)
        if expected != {len(parts)}:
            raise ValueError(f"{len(parts)} files of parts, of {sorted(expected)}")
        return ZeroFiles(folder, models, parts, stage)


def read_universal(folder: Path) -> UniversalFiles:
    """Returns the universal format in a folder. Raises as `read_zero_files`."""
    found = {(int(match[1] or 0), int(match[2])): path for path in folder.iterdir()
             if (match := _MODELS.fullmatch(path.name))}  # fmt: skip
    if not found or any(matrix for _, matrix in found):
        raise CheckpointError(
            f"{folder} holds no universal form of ZeRO alone (mp_rank_00_model_states.pt, or "
            "zero_pp_rank_N_mp_rank_00_model_states.pt): parts of tensors other than ZeRO's are not read"
        )
    with wrap_load_error(folder):
        common = read_mapping(folder / "zero" / "optimizer_state.pt")
        models = [read_mapping(found[key]) for key in sorted(found)]
        return UniversalFiles(folder, models, common, read_stage(common))


def read_stage(part: Named) -> int:
    """Returns the ZeRO stage that wrote a file of partitions."""
    stage = part["zero_stage"]
    return int(stage.values[0]) if isinstance(stage, StandIn) else int(stage)


def read_plainly(path: Path) -> Any:
    """Reads a torch.save file without running any code in it; values stay in the file until they are used.

    Raises:
        CheckpointError: the file is missing or damaged, or needs an unknown class.
    """
    try:
        open_file(path).close()
        return read_torch_file(path, is_mapped=True, extra=dict.fromkeys(_CLASSES, StandIn))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # damaged bytes can raise nearly any exception
        told = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} is damaged, or holds objects that are not read for safety: put the weights together with "
            f"zero_to_fp32.py where you trust it, and load those ({told})"
        ) from error


def read_mapping(path: Path) -> Named:
    """Reads a file that holds a mapping, like `read_plainly`. Raises CheckpointError if it holds no mapping."""
    value = read_plainly(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no mapping")
    return value
