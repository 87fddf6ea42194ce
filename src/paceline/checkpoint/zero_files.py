"""Checkpoints that DeepSpeed wrote for transformers: model and optimizer put together from the parts of ZeRO.

`latest` names a folder; each process left one file of float32 parts there, and the first (with stage 3 each) one of
what the parts are of. Nothing of DeepSpeed's is needed to read them, and no code in them is run: the few classes of its
that they hold are stood in for.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.plausible import blame
from paceline.checkpoint.tensors import CheckpointError

Named = dict[str, Any]
LATEST = "latest"
_PARTS = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class StandIn:
    """Takes the place of one of DeepSpeed's classes: holds what it is given, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass
class ZeroFiles:
    """The files of one checkpoint.

    Attributes:
        folder: that holds them.
        models: what the parts are of, by process; one where each process holds the whole model.
        parts: the parts, by process.
        stage: of ZeRO.
    """

    folder: Path
    models: list[Named]
    parts: list[Named]
    stage: int

    def weights(self) -> Named:
        """The model's state: what is trained in float32."""
        model = self.models[0]
        state = {name: value for name, value in model["module"].items() if self.stage < 3 or value.numel()}
        if self.stage == 3:
            state.update(self._frozen())
        state.update(self._join(self._flats()))
        for name, kept in model.get("shared_params", {}).items():
            if kept in state:
                state[name] = state[kept]
        return state

    def optimizer(self) -> Named:
        """The optimizer's state by the names of parameters."""
        bases = [self._base(part) for part in self.parts]
        first = bases[0]["state"].get(0, {})
        flat = self._flats()[0][0] if self._flats()[0] else None
        state: dict[str, Named] = {name: {} for group in self.models[0]["param_shapes"] for name in group}
        for key, value in first.items():
            if isinstance(value, Tensor) and flat is not None and value.dim() and value.numel() >= flat.numel():
                flats = [[base["state"][index][key] for index in range(len(base["state"]))] for base in bases]
                for name, whole in self._join(flats).items():
                    state[name][key] = whole
            else:
                for entry in state.values():
                    entry[key] = value.clone() if isinstance(value, Tensor) else value
        groups = [
            {**group, "params": list(shapes)}
            for group, shapes in zip(bases[0]["param_groups"], self.models[0]["param_shapes"], strict=True)
        ]
        return {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": groups}

    def _flats(self) -> list[list[Tensor]]:
        name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [part[name] for part in self.parts]

    def _base(self, part: Named) -> Named:
        base = part["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{self.folder} holds an elastic form of the optimizer's state, which is not read: put the weights "
                "together with zero_to_fp32.py, and begin from those"
            )
        return dict(base)

    def _join(self, flats: list[list[Tensor]]) -> dict[str, Tensor]:
        """Whole tensors of the parts that each process holds, by group."""
        return dict(self._join_spread(flats) if self.stage == 3 else self._join_sliced(flats))

    def _join_sliced(self, flats: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Stages 1 and 2: a group is one long tensor, cut among the processes wherever that falls."""
        for number, shapes in enumerate(self.models[0]["param_shapes"]):
            maps = [part["param_slice_mappings"][number] for part in self.parts]
            for name, shape in shapes.items():
                pieces = [
                    flats[rank][number][found.start : found.start + found.numel]
                    for rank, found in enumerate(each.get(name) for each in maps)
                    if found is not None
                ]
                yield name, torch.cat(pieces).view(shape)

    def _join_spread(self, flats: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Stage 3: each parameter is cut among all processes."""
        own = [torch.cat([tensor.reshape(-1) for tensor in each]) for each in flats]
        start = 0
        for shapes in self.models[0]["param_shapes"]:
            for name, shape in shapes.items():
                size = -(-shape.numel() // len(own))
                yield name, torch.cat([each[start : start + size] for each in own])[: shape.numel()].view(shape)
                start += size

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in (self.models[0].get("frozen_param_shapes") or {}).items():
            pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
            yield name, torch.cat(pieces)[: shape.numel()].view(shape)


def has_zero_files(checkpoint: Path) -> bool:
    """Whether DeepSpeed wrote this checkpoint."""
    return (checkpoint / LATEST).is_file()


def read_zero_weights(checkpoint: Path) -> Named | None:
    """The model's state of a checkpoint that DeepSpeed wrote; None where it did not. Raises as `read_zero_files`."""
    return read_zero_files(checkpoint).weights() if has_zero_files(checkpoint) else None


def read_zero_files(checkpoint: Path) -> ZeroFiles:
    """The files of a checkpoint that DeepSpeed wrote.

    Raises:
        CheckpointError: one is missing or damaged, holds what could run code, or has a form that is not read.
    """
    name = (checkpoint / LATEST).read_text(encoding="utf-8").strip()
    folder = checkpoint / name
    if Path(name).name != name or not folder.is_dir():
        raise CheckpointError(f"{checkpoint / LATEST} names {name!r}, which is not a folder of the checkpoint")
    found = {(int(match[1]), int(match[2])): path for path in folder.iterdir()
             if (match := _PARTS.fullmatch(path.name))}  # fmt: skip
    if not found or any(matrix for _, matrix in found):
        raise CheckpointError(
            f"{folder} holds no parts of ZeRO alone (zero_pp_rank_N_mp_rank_00_optim_states.pt): put the weights "
            "together with zero_to_fp32.py, and load those"
        )
    paths = [found[key] for key in sorted(found)]
    with blame(folder):
        parts = [read_plainly(path)["optimizer_state_dict"] for path in paths]
        stage = read_stage(parts[0])
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(paths))]
        models = [read_plainly(folder / name) for name in (names if stage == 3 else ["mp_rank_00_model_states.pt"])]
        count = parts[0]["partition_count"]
        expected = {count} if isinstance(count, int) else set(count)
        if expected != {len(parts)}:
            raise ValueError(f"{len(parts)} files of parts, of {sorted(expected)}")
        return ZeroFiles(folder, models, parts, stage)


def read_stage(part: Named) -> int:
    """The stage of ZeRO that wrote a file of parts."""
    stage = part["zero_stage"]
    return int(stage.values[0]) if isinstance(stage, StandIn) else int(stage)


def read_plainly(path: Path) -> Named:
    """A file of torch.save, without running any code in it.

    Raises:
        CheckpointError: it is missing or damaged, or needs a class that is not known.
    """
    known: list[Any] = [(stand_in(name), name) for name in _CLASSES]
    try:
        with torch.serialization.safe_globals(known):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or holds objects that are not read for safety: put the weights together with "
            f"zero_to_fp32.py where you trust it, and load those ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no mapping")
    return value


def stand_in(name: str) -> Callable[..., Any]:
    """A class of its own for each name: torch tells them apart by it."""
    return type(name.rpartition(".")[2], (StandIn,), {})
