"""The mesh of processes: how many share the data, the parameters, a sequence, the matrices or the layers of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, did_you_mean, wrong_value
from paceline.args.sharding import is_asked, read_sharding

# outermost first: processes that differ in the last axis only are neighbours, on one machine where possible
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# names of accelerate's ParallelismConfig -> ours
ACCELERATE_SIZES = {f"{axis}_size": axis for axis in AXES if axis != "pp"}
ACCELERATE_OTHERS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
NAMES = ("ddp", "fsdp", "xla")


@dataclass(frozen=True)
class Mesh:
    """How the processes of a run are laid out, as a grid with named axes.

    Attributes:
        pp: stages of a pipeline, each with a part of the layers.
        dp_replicate: groups that each hold the whole model, and read different data.
        dp_shard: processes that hold a shard of every parameter each, and read different data.
        cp: processes that hold a part of every sequence of the same data, and gather keys and values.
        sp: the same, but processes exchange their tokens for heads (Ulysses); not with cp.
        tp: processes that hold a part of the matrices, and compute on the same data.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Processes in all."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def num_parts(self) -> int:
        """Parts that every sequence is cut into."""
        return self.cp * self.sp

    @property
    def data_size(self) -> int:
        """Parts that the data is read in."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_data_only(self) -> bool:
        """Whether every process reads other data."""
        return self.data_size == self.size

    @property
    def axes(self) -> dict[str, int]:
        """The axes with more than one process, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a process stands on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_coordinates(self, rank: int) -> tuple[int, int]:
        """(part, parts): which part of the data a process reads, and into how many it is cut."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"], self.data_size

    def speaks(self, rank: int) -> bool:
        """Whether a process stands for all that read the same data: samples, weights and rows are taken from these."""
        place = self.coordinates(rank)
        has_outputs = place["pp"] == self.pp - 1
        return has_outputs and place["tp"] == place["cp"] == place["sp"] == 0

    def noise_rank(self, rank: int) -> int:
        """Which random numbers a process draws: those that compute the same on the same tokens draw the same."""
        place = self.coordinates(rank)
        part = place["cp"] * self.sp + place["sp"]
        return (place["pp"] * self.data_size + self.data_coordinates(rank)[0]) * self.num_parts + part

    def describe(self) -> str:
        """The axes with more than one process, in words."""
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items()) or "one process"


def read_parallel(name: str, value: Any) -> str | dict[str, int] | None:
    """The value of `parallel`: a name, or sizes by axis.

    Args:
        name: of the option, for errors.
        value: a name, a mapping, JSON, or text such as "dp_shard=2,tp=2".

    Raises:
        ValueError: neither.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise wrong_value(name, value, f"it is not valid JSON ({error})") from None
    if isinstance(value, str) and "=" in value:
        pairs = [pair.partition("=") for pair in value.replace(" ", ",").split(",") if pair]
        value = {key: number for key, _, number in pairs}
    if isinstance(value, Mapping):
        return {str(key): read_size(name, str(key), number) for key, number in value.items()}
    text = str(getattr(value, "value", value)).strip().lower()
    if text == "pipeline":
        return {"pp": -1}
    if text not in NAMES:
        remedy = f"choose one of {', '.join(NAMES)}, or give sizes of {', '.join(AXES)}, as in 'dp_shard=2,tp=2'"
        raise wrong_value(name, value, remedy, did_you_mean(text, list(NAMES)))
    return text


def read_size(name: str, axis: str, value: Any) -> int:
    """The size of one axis: at least 1, or -1 for all processes that the other axes leave.

    Raises:
        ValueError: no such axis, or no such size.
    """
    if axis not in AXES:
        remedy = f"{axis!r} is no axis of the mesh; the axes are {', '.join(AXES)}"
        raise wrong_value(name, {axis: value}, remedy, did_you_mean(axis, list(AXES)))
    try:
        size = int(value)
    except (TypeError, ValueError):
        size = 0
    if isinstance(value, bool) or size != float(value if size else 0) or (size < 1 and size != -1):
        remedy = "a size is a whole number of at least 1, or -1 for all processes that the other axes leave"
        raise wrong_value(name, {axis: value}, remedy)
    return size


def read_parallelism(name: str, config: Any) -> dict[str, Any] | None:
    """The value of `parallelism_config`: accelerate's object, a mapping or JSON, as a plain dict of what it asks for.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise wrong_value(name, config, f"it is not valid JSON ({error})") from None
    if config is None or isinstance(config, Mapping):
        return None if config is None else {str(key): plain_setting(value) for key, value in config.items()}
    if isinstance(config, type) or not hasattr(config, "tp_size"):
        raise wrong_value(name, config, "give accelerate's ParallelismConfig, or a dict with sizes such as tp_size")
    values = {key: getattr(config, key, None) for key in (*ACCELERATE_SIZES, *ACCELERATE_OTHERS)}
    return {key: plain_setting(value) for key, value in values.items() if value is not None}


def plain_setting(value: Any) -> Any:
    """A handler of accelerate's as the dict of its settings; a plain value as it is."""
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


def asked_sizes(options: Any) -> tuple[str, dict[str, int]] | None:
    """The option that gives sizes of the mesh, as it is told in errors, and the sizes; None: there is none.

    Raises:
        ValueError: two options that give them, or an unknown setting.
        UnsupportedOption: a setting that cannot be had.
    """
    named, config = options.parallel, options.parallelism_config
    if not config:
        return (f"parallel={named!r}", dict(named)) if isinstance(named, Mapping) and named else None
    shown = f"parallelism_config={config!r}"
    unknown = sorted(set(config) - set(ACCELERATE_SIZES) - set(ACCELERATE_OTHERS))
    if unknown:
        known = ", ".join((*ACCELERATE_SIZES, *ACCELERATE_OTHERS))
        raise ValueError(f"{shown}: there is no setting {unknown[0]!r}; there are {known}.")
    gathers = "keys and values are gathered, and sp_size exchanges heads"
    check_handler(config, "cp_handler", "cp_comm_strategy", "allgather", gathers)
    check_handler(config, "sp_handler", "sp_attn_implementation", "sdpa", "torch chooses the kernel")
    asked = {}
    for key, axis in ACCELERATE_SIZES.items():
        size = read_size("parallelism_config", axis, config.get(key) or 1)
        if size != 1:
            asked[axis] = size
    if asked and named is not None:
        raise ValueError(f"parallel={named!r} and {shown} both say how the processes share the work: keep one.")
    return (shown, asked) if asked else None


def check_handler(config: Mapping[str, Any], name: str, setting: str, possible: str, reason: str) -> None:
    """Refuse all but one value of a setting in a handler of accelerate's.

    Raises:
        UnsupportedOption: another.
    """
    handler = config.get(name)
    value = handler.get(setting) if isinstance(handler, Mapping) else None
    if value not in (None, possible):
        raise UnsupportedOption(
            f"parallelism_config={{{setting!r}: {value!r}}} is not supported: {reason}; give {possible!r}, or leave it "
            "out."
        )


def fill_mesh(shown: str, sizes: Mapping[str, int], world_size: int) -> Mesh:
    """The mesh of so many processes.

    Raises:
        ValueError: the sizes do not multiply to their number.
    """
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{shown}: {' and '.join(free)} are both -1, and one only can be all that is left.")
    given = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if world_size % given:
            raise ValueError(
                f"{shown}: {world_size} processes cannot be divided by {given}: start a multiple of {given}, or change "
                "the sizes."
            )
        sizes = {**sizes, free[0]: world_size // given}
    mesh = Mesh(**dict(sizes))
    if mesh.cp > 1 and mesh.sp > 1:
        raise ValueError(f"{shown}: cp and sp both cut the sequences, in two ways: keep one.")
    if mesh.size != world_size:
        raise ValueError(
            f"{shown} is a mesh of {mesh.size} processes, and there {'is' if world_size == 1 else 'are'} {world_size}: "
            f"start {mesh.size} (--nproc-per-node), or change the sizes; dp_shard=-1 takes all that the others leave."
        )
    return mesh


def resolve_mesh(options: Any, world_size: int, local_size: int | None = None) -> Mesh:
    """How the processes of a run are laid out.

    Args:
        options: the arguments.
        world_size: processes in all.
        local_size: processes on each machine, for `hybrid_shard`; None: all.

    Raises:
        ValueError: there cannot be such a mesh of these processes.
        UnsupportedOption: a setting of accelerate's that cannot be had.
    """
    asked = asked_sizes(options)
    if asked is not None:
        return fill_mesh(*asked, world_size)
    if options.parallel != "fsdp" and (options.parallel is not None or not is_asked(options.fsdp)):
        return Mesh(dp_replicate=world_size)
    replicas = read_sharding(options.fsdp or True, options.fsdp_config).replicas
    replicas = max(replicas or world_size // (local_size or world_size), 1)
    if world_size > 1 and (world_size % replicas or replicas == world_size):
        raise ValueError(
            f"fsdp_config['replicate']={replicas} is not possible with {world_size} processes: each replica "
            "needs the same number of them, and more than one (parallel='ddp' is one process for each)."
        )
    return Mesh(dp_replicate=replicas, dp_shard=world_size // replicas)


def engine_of(mesh: Mesh, options: Any) -> str:
    """The strategy that a mesh of several processes needs, by its name."""
    if mesh.pp > 1:
        return "pipeline"
    if not mesh.is_data_only:
        return "mesh"
    return "fsdp" if mesh.dp_shard > 1 or options.parallel == "fsdp" else "ddp"


def check_mesh(options: Any) -> bool:
    """Check that sizes of the mesh fit what `fsdp` asks for. Returns whether there are any.

    Raises:
        ValueError: they contradict each other.
    """
    asked = asked_sizes(options)
    if asked is None:
        return False
    shown, sizes = asked
    shards = any(sizes.get(axis, 1) != 1 for axis in ("dp_shard", "cp", "sp"))
    for name in ("fsdp", "fsdp_config"):
        value = getattr(options, name)
        if (is_asked(value) if name == "fsdp" else value) and not shards:
            raise ValueError(f"{name}={value!r} shards parameters, and {shown} does not: give dp_shard a size too.")
    sharding = read_sharding(options.fsdp or True, options.fsdp_config)
    replicas = sizes.get("dp_replicate", 1)
    if sharding.replicas not in (1, replicas) and not (sharding.replicas == 0 and replicas != 1):
        raise ValueError(
            f"fsdp={options.fsdp!r} with fsdp_config={options.fsdp_config!r} asks for replicas that {shown} has not: "
            "give their number as dp_replicate, and leave the other out."
        )
    return True
