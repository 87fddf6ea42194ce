"""Sharded checkpoint files: every process writes the shards that it holds, and reads the shards that it needs.

The folders have the format of torch.distributed.checkpoint and the names that accelerate uses, so that each library
reads the other's: `pytorch_model_fsdp_0/` and `optimizer_0/`. Planning is collective and runs on the main thread.
Writing needs only host copies, so that it can be asynchronous.
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from paceline.pytorch.checkpoint.metadata import read_metadata
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_stream, open_file, plain_values
from paceline.pytorch.checkpoint.torch_files import FilePart
from paceline.pytorch.distributed.collectives import gather_objects, on_first, sum_ints
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.tensor_parts import local_part

Flat = dict[str, Any]
Paths = dict[str, tuple[str | int, ...]]


# ---- file access


def make_writer(folder: Path) -> StorageWriter:
    """Returns a writer of one process's shards; files are synced to disk later, when they are hashed."""
    return FileSystemWriter(folder, sync_files=False)


def make_reader(folder: Path) -> StorageReader:
    """Returns a reader of a folder's shards."""
    return _Reader(folder)


class _Reader(FileSystemReader):
    """Reads every shard as data, with lengths checked; torch's own reader trusts the lengths in the files."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the targets of a plan. Raises CheckpointError or OSError."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            with open_file(Path(self.path, name)) as file:
                for item in items:
                    place = self.storage_data[item.storage_index]
                    self._read_item(FilePart(file, place.offset, place.length), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, part: FilePart, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(part.read()))
            return
        stored = load_stream(part, f"{item.storage_index.fqn} in {self.path}")
        target = planner.resolve_tensor(item).detach()
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        if stored.shape != target.shape:
            raise CheckpointError(f"{item.storage_index.fqn} in {self.path} has another shape than its index says")
        target.copy_(stored)
        planner.commit_tensor(item, target)


# ---- writing


class Planner(DefaultSavePlanner):
    """Plans from the sharded tensors, and later writes the host copies in `values`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Mapping[str, Any] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.values[index.fqn]


@dataclass
class Part:
    """The shards that this process writes into one folder.

    Attributes:
        planner: provides the values by their key.
        plan: the values that this process writes.
        metadata: the index; only on the first process.
    """

    planner: Planner
    plan: SavePlan
    metadata: Metadata | None

    def num_bytes(self) -> int:
        """Returns the bytes of the tensors that this process writes."""
        items = [item.tensor_data for item in self.plan.items if item.tensor_data is not None]
        return sum(item.chunk.sizes.numel() * item.properties.dtype.itemsize for item in items)

    def copy(self, copy_tensor: Callable[[Tensor], Tensor]) -> None:
        """Copies the values that this process writes to the host, and drops the references to the tensors."""
        wanted = {item.index.fqn for item in self.plan.items}
        state: Flat = self.planner.state_dict
        self.planner.values = {
            key: copy_tensor(local_part(value)) if isinstance(value, Tensor) else plain_values(value, key)
            for key, value in state.items()
            if key in wanted
        }
        self.planner.state_dict = {}

    def write(self, folder: Path) -> list[WriteResult]:
        """Writes the copies. Raises OSError if the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.plan.items:
            return []
        try:
            return make_writer(folder).write_data(self.plan, self.planner).value()  # type: ignore[no-any-return]
        except RuntimeError as error:
            refused = error.__context__  # the file's error, which torch hides when it fails to close its archive
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(folder)) from refused
            raise

    def write_index(self, folder: Path, results: list[list[WriteResult]]) -> None:
        """Writes the index with the location of each tensor, on the first process, after all have written."""
        assert self.metadata is not None
        make_writer(folder).finish(self.metadata, results)


class Plans:
    """The save plans of all processes, agreed once and reused while the state keeps its structure."""

    def __init__(self) -> None:
        self._form: Any = None
        self._made: dict[str, tuple[SavePlan, Metadata | None]] = {}

    def make(self, world: World, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
        """Returns the shards of this process by folder. Collective.

        Args:
            states: folder -> nested state of the same structure on all processes. Sharded values are DTensors;
                replicated values are plain tensors and values, which one of the processes writes.
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
        world: World,
        planners: Mapping[str, Planner],
        local: dict[str, SavePlan],
    ) -> dict[str, tuple[SavePlan, Metadata | None]]:
        """Assigns each replicated value to one process; computed on the first process, whose error is raised on all."""
        gathered = gather_objects(world, local)
        indexes: dict[str, Metadata] = {}

        def make_global_plans() -> dict[str, list[SavePlan]]:
            global_plans = {}
            for folder, planner in planners.items():
                plans, indexes[folder] = planner.create_global_plan([each[folder] for each in gathered])
                global_plans[folder] = make_writer(Path(folder)).prepare_global_plan(plans)
            return global_plans

        global_plans = on_first(world, make_global_plans)
        return {folder: (plans[world.process_index], indexes.get(folder)) for folder, plans in global_plans.items()}


def settled(nest: object) -> Any:
    """Returns the nest with partial DTensors (pending reductions) reduced. Collective."""
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
    """Fills tensors in place; plain values are read without running code, into `values`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder = folder
        self.values: Flat = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.values[name] = load_stream(value, f"{name} in {self.folder}")


class Shards:
    """A folder of torch.distributed.checkpoint, for reading.

    Args:
        folder: contains `.metadata`.

    Attributes:
        tensors: name -> (shape, dtype) of each tensor.
        plain: names of all other values.
        paths: name -> path in the nested state.

    Raises:
        CheckpointError: the index is damaged.
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
        """Reads values by name, tensors into the given targets, which may be sharded. Not collective.

        Returns: the values by name.
        Raises: CheckpointError, naming the folder, for a missing name, another shape, or a damaged file.
        """
        for name, target in targets.items():
            if name in self.tensors and self.tensors[name][0] != getattr(target, "shape", None):
                shape = tuple(self.tensors[name][0])
                raise CheckpointError(f"{self.folder} does not fit: {name} is {shape} instead of {tuple(target.shape)}")
        planner, reader = _Loader(self.folder), make_reader(self.folder)
        try:
            with torch.no_grad():
                planner.set_up_planner(dict(targets), self.metadata, True)
                plan = planner.create_local_plan()
                reader.set_up_storage_reader(self.metadata, True)
                reader.read_data(plan, planner).wait()
        except CheckpointError:
            raise
        except Exception as error:  # damaged bytes raise undocumented exceptions
            raise CheckpointError(f"{self.folder} cannot be read: {type(error).__name__}: {error}") from error
        return {**targets, **planner.values}

    def empty(self, name: str) -> Tensor:
        """Returns a host tensor of the full size stored under this name."""
        size, dtype = self.tensors[name]
        return torch.empty(size, dtype=dtype)

    def read(self, name: str) -> Any:
        """Returns one whole value, on the host."""
        return self.load({name: self.empty(name) if name in self.tensors else None})[name]


def nested(values: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """Returns the nested state from flattened values; lists are restored as lists.

    Raises: CheckpointError, if the paths do not form a nest.
    """
    root: dict[str | int, Any] = {}
    lists: list[tuple[dict[str | int, Any], str | int]] = []
    try:
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
    except (TypeError, AttributeError, RuntimeError) as error:  # a path leads through a value or a tensor
        raise CheckpointError(f"the index holds paths that do not form a nest ({error})") from error
    return root  # type: ignore[return-value]
