"""Sharded checkpoints: every process writes the parts that it holds, and reads the parts that it needs.

The folders are those of torch.distributed.checkpoint, under the names that accelerate gives them, so that either side
reads the other's: `pytorch_model_fsdp_0/` and `optimizer_0/`. What is planned together is planned on the main thread;
writing needs nothing but host copies, so that it can go on behind the training.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate

from paceline.checkpoint.metadata import METADATA_NAME, read_metadata
from paceline.checkpoint.tensors import CheckpointError, load_stream, plain_values
from paceline.distributed.collectives import gather_objects, on_first, sum_ints
from paceline.distributed.tensor_parts import local_part
from paceline.distributed.world import World

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"

Flat = dict[str, Any]
Paths = dict[str, tuple[str | int, ...]]


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` is one that torch.distributed.checkpoint wrote."""
    return Path(folder, METADATA_NAME).is_file()


# ---- the one place that knows where the bytes lie


def make_writer(folder: Path) -> StorageWriter:
    """Writes the parts of one process into a folder; they are synced when they are hashed."""
    return FileSystemWriter(folder, sync_files=False)


def make_reader(folder: Path) -> StorageReader:
    """Reads a folder's parts."""
    return FileSystemReader(folder)


# ---- writing


class Planner(DefaultSavePlanner):
    """Plans from the tensors as they are shared out, and writes the host copies that `values` has by then."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Mapping[str, Any] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.values[index.fqn]


@dataclass
class Part:
    """What this process writes into one folder.

    Attributes:
        planner: knows the values by their key.
        plan: which of them this process writes.
        metadata: the index, on the first process.
    """

    planner: Planner
    plan: SavePlan
    metadata: Metadata | None

    def num_bytes(self) -> int:
        """Of the tensors that this process writes."""
        items = [item.tensor_data for item in self.plan.items if item.tensor_data is not None]
        return sum(item.chunk.sizes.numel() * item.properties.dtype.itemsize for item in items)

    def copy(self, copy_tensor: Callable[[Tensor], Tensor]) -> None:
        """Take host copies of the values that this process writes; the tensors themselves are let go of."""
        wanted = {item.index.fqn for item in self.plan.items}
        state: Flat = self.planner.state_dict
        self.planner.values = {
            key: copy_tensor(local_part(value)) if isinstance(value, Tensor) else plain_values(value, key)
            for key, value in state.items()
            if key in wanted
        }
        self.planner.state_dict = {}

    def write(self, folder: Path) -> list[WriteResult]:
        """Write the copies. Raises: OSError, where the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.plan.items:
            return []
        try:
            return make_writer(folder).write_data(self.plan, self.planner).value()  # type: ignore[no-any-return]
        except RuntimeError as error:
            refused = error.__context__  # what the file raised, hidden by torch's failing to end its archive
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(folder)) from refused
            raise

    def write_index(self, folder: Path, results: list[list[WriteResult]]) -> None:
        """Write which tensor lies where, on the first process, when all have written."""
        assert self.metadata is not None
        make_writer(folder).finish(self.metadata, results)


class Plans:
    """Who writes what, agreed between the processes once and used again while the state keeps its form."""

    def __init__(self) -> None:
        self._form: Any = None
        self._made: dict[str, tuple[SavePlan, Metadata | None]] = {}

    def make(self, world: World, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
        """The parts of this process by folder; all processes take part.

        Args:
            states: folder -> nested state, alike on all processes: shards as DTensors, what is the same everywhere as
                plain tensors and values, which one of the processes writes.
        """
        planners = {folder: Planner() for folder in states}
        for folder, planner in planners.items():
            planner.set_up_planner(dict(states[folder]), None, world.is_first)
        local = {folder: planner.create_local_plan() for folder, planner in planners.items()}
        form = {folder: (plan.items, plan.planner_data) for folder, plan in local.items()}
        if sum_ints(world, [int(form != self._form)])[0]:
            self._made = self._agree(world, planners, local)
            self._form = form
        return {
            folder: Part(planner, planner.finish_plan(self._made[folder][0]), self._made[folder][1])
            for folder, planner in planners.items()
        }

    @staticmethod
    def _agree(
        world: World, planners: Mapping[str, Planner], local: dict[str, SavePlan]
    ) -> dict[str, tuple[SavePlan, Metadata | None]]:
        """The first process deals out what several could write. Raises: on all of them, what it raised there."""
        gathered = gather_objects(world, local)
        indexes: dict[str, Metadata] = {}

        def deal() -> dict[str, list[SavePlan]]:
            dealt = {}
            for folder, planner in planners.items():
                plans, indexes[folder] = planner.create_global_plan([each[folder] for each in gathered])
                dealt[folder] = make_writer(Path(folder)).prepare_global_plan(plans)
            return dealt

        dealt = on_first(world, deal)
        return {folder: (plans[world.process_index], indexes.get(folder)) for folder, plans in dealt.items()}


def settled(nest: Any) -> Any:
    """The same nest with sums that are still to be made over processes made; all processes take part."""
    if isinstance(nest, DTensor):
        if any(placement.is_partial() for placement in nest.placements):
            nest = nest.redistribute(placements=[Replicate()] * nest.device_mesh.ndim)
        return nest
    if isinstance(nest, Mapping):
        return {key: settled(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map(settled, nest))
    return nest


# ---- reading


class _Loader(DefaultLoadPlanner):
    """Fills tensors in place; plain values are read as data only, and kept in `values`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder = folder
        self.values: Flat = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.values[name] = load_stream(value, f"{name} in {self.folder}")


class Shards:
    """A folder of torch.distributed.checkpoint, to be read.

    Args:
        folder: where `.metadata` is.

    Attributes:
        tensors: name -> (shape, type) of everything that is a tensor.
        plain: names of all else.
        paths: name -> where it stood in the nested state.

    Raises:
        CheckpointError: its index is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.metadata = read_metadata(folder)
        entries = self.metadata.state_dict_metadata
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.plain = [name for name in entries if name not in self.tensors]
        self.paths: Paths = dict(self.metadata.planner_data or {})

    def load(self, targets: Mapping[str, Any]) -> Flat:
        """Read the values of these names: tensors into the ones given, which may be shards; no process waits.

        Returns: all of them.
        Raises: CheckpointError, naming the folder, for a name that it lacks, another shape, or a damaged file.
        """
        for name, target in targets.items():
            if name in self.tensors and self.tensors[name][0] != getattr(target, "shape", None):
                shape = tuple(self.tensors[name][0])
                raise CheckpointError(
                    f"{self.folder} does not fit: {name} is {shape} instead of {tuple(target.shape)}"
                )
        planner, reader = _Loader(self.folder), make_reader(self.folder)
        try:
            with torch.no_grad():
                planner.set_up_planner(dict(targets), self.metadata, True)
                plan = planner.create_local_plan()
                reader.set_up_storage_reader(self.metadata, True)
                reader.read_data(plan, planner).wait()
        except CheckpointError:
            raise
        except Exception as error:  # what damaged bytes make the reader raise is not documented
            raise CheckpointError(f"{self.folder} cannot be read: {type(error).__name__}: {error}") from error
        return {**targets, **planner.values}

    def empty(self, name: str) -> Tensor:
        """A tensor on the host, as large as the whole of what is stored under this name."""
        size, dtype = self.tensors[name]
        return torch.empty(size, dtype=dtype)

    def read(self, name: str) -> Any:
        """One value, whole, on the host."""
        return self.load({name: self.empty(name) if name in self.tensors else None})[name]


def nested(values: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """The state as it was before it was flattened; lists come back as lists."""
    root: dict[str | int, Any] = {}
    lists: list[tuple[dict[str | int, Any], str | int]] = []
    for name, value in values.items():
        place: dict[str | int, Any] = root
        path = paths.get(name, (name,))
        for depth, key in enumerate(path[:-1]):
            if key not in place and isinstance(path[depth + 1], int):
                lists.append((place, key))
            place = place.setdefault(key, {})
        place[path[-1]] = value
    for parent, key in reversed(lists):
        entries = parent[key]
        parent[key] = [entries[index] for index in sorted(entries)]
    return root  # type: ignore[return-value]
