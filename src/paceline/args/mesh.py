"""The device mesh: sizes of data, sharded-data, context, sequence, tensor and pipeline parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, did_you_mean, parse_object, wrong_value
from paceline.args.registry import STRATEGIES
from paceline.args.sharding import is_asked, read_sharding

# outermost first: ranks that differ in the last axis only are adjacent, and on one machine where possible
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# names of accelerate's ParallelismConfig -> ours
ACCELERATE_SIZES = {f"{axis}_size": axis for axis in AXES if axis != "pp"}
ACCELERATE_OTHERS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
NAMES = tuple(name for name, entry in STRATEGIES.items() if entry.is_option)


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run as a grid with named axes.

    Attributes:
        pp: pipeline parallelism: stages, each with some of the layers.
        dp_replicate: data parallelism: replicas of the full model that read different data.
        dp_shard: sharded data parallelism: ranks that hold a shard of every parameter and read different data.
        cp: context parallelism: ranks that hold a shard of every sequence and gather keys and values.
        sp: sequence parallelism (Ulysses): as cp, with an all-to-all of tokens and heads; excludes cp.
        tp: tensor parallelism: ranks that hold a shard of the matrices and compute on the same data.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def num_parts(self) -> int:
        """The number of shards of every sequence."""
        return self.cp * self.sp

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks, which read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_data_only(self) -> bool:
        """True if every rank reads different data."""
        return self.data_size == self.size

    @property
    def axes(self) -> dict[str, int]:
        """The axes with more than one rank, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_coordinates(self, rank: int) -> tuple[int, int]:
        """Returns (shard, num_shards) of the data that a rank reads."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"], self.data_size

    def is_data_leader(self, rank: int) -> bool:
        """True for the first of the ranks that read the same data. Samples, weights and rows are taken from it."""
        place = self.coordinates(rank)
        has_outputs = place["pp"] == self.pp - 1
        return has_outputs and place["tp"] == place["cp"] == place["sp"] == 0

    def rng_rank(self, rank: int) -> int:
        """Returns the index of a rank's random stream. Ranks that compute the same on the same tokens share one."""
        place = self.coordinates(rank)
        part = place["cp"] * self.sp + place["sp"]
        return (place["pp"] * self.data_size + self.data_coordinates(rank)[0]) * self.num_parts + part

    def first_of_stream(self, rank: int) -> int:
        """Returns the first of the ranks that share the random stream of a rank."""
        return rank - self.coordinates(rank)["tp"]

    def describe(self) -> str:
        """Describes the axes with more than one rank."""
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items()) or "one process"


def read_parallel(name: str, value: object) -> str | dict[str, int] | None:
    """Reads the value of `parallel`: a name, or sizes by axis.

    Args:
        name: the option's name, for errors.
        value: a name, a mapping, JSON, or text such as "dp_shard=2,tp=2".

    Raises:
        ValueError: it is none of these.
    """
    if value is None:
        return None
    value = parse_object(name, value)
    if isinstance(value, str) and "=" in value:
        pairs = [pair.partition("=") for pair in value.replace(" ", ",").split(",") if pair]
        value = {key: number for key, _, number in pairs}
    if isinstance(value, Mapping):
        return {str(key): read_size(name, str(key), number) for key, number in value.items()}
    text = str(getattr(value, "value", value)).strip().lower()
    if text == "pipeline":
        return {"pp": -1}
    if text not in NAMES:
        remedy = f"expected one of {', '.join(NAMES)}, or sizes of {', '.join(AXES)}, as in 'dp_shard=2,tp=2'"
        raise wrong_value(name, value, remedy, did_you_mean(text, list(NAMES)))
    return text


def read_size(name: str, axis: str, value: Any) -> int:
    """Reads the size of one axis: at least 1, or -1 for all remaining processes.

    Raises:
        ValueError: an unknown axis or an invalid size.
    """
    if axis not in AXES:
        remedy = f"{axis!r} is no axis of the mesh; the axes are {', '.join(AXES)}"
        raise wrong_value(name, {axis: value}, remedy, did_you_mean(axis, list(AXES)))
    try:
        size = int(value)
    except (TypeError, ValueError):
        size = 0
    if isinstance(value, bool) or size != float(value if size else 0) or (size < 1 and size != -1):
        remedy = "expected a whole number of at least 1, or -1 for all remaining processes"
        raise wrong_value(name, {axis: value}, remedy)
    return size


def read_parallelism(name: str, config: object) -> dict[str, Any] | None:
    """Reads `parallelism_config` (accelerate's object, a mapping or JSON) as a plain dict of the settings in use.

    Raises:
        ValueError: it is none of these.
    """
    config = parse_object(name, config)
    if config is None or isinstance(config, Mapping):
        return None if config is None else {str(key): plain_setting(value) for key, value in config.items()}
    if isinstance(config, type) or not hasattr(config, "tp_size"):
        raise wrong_value(name, config, "expected accelerate's ParallelismConfig, or a dict with sizes such as tp_size")
    values = {key: getattr(config, key, None) for key in (*ACCELERATE_SIZES, *ACCELERATE_OTHERS)}
    return {key: plain_setting(value) for key, value in values.items() if value is not None}


def plain_setting(value: object) -> Any:
    """Converts one of accelerate's handlers to a dict of its settings; keeps a plain value."""
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


def asked_sizes(options: Any) -> tuple[str, dict[str, int]] | None:
    """Returns the option with the mesh sizes, as text for errors, and the sizes; None if there is none.

    Raises:
        ValueError: two options give sizes, or a setting is unknown.
        UnsupportedOption: a setting that is not supported.
    """
    named, config = options.parallel, options.parallelism_config
    if not config:
        return (f"parallel={named!r}", dict(named)) if isinstance(named, Mapping) and named else None
    shown = f"parallelism_config={config!r}"
    unknown = sorted(set(config) - set(ACCELERATE_SIZES) - set(ACCELERATE_OTHERS))
    if unknown:
        known = ", ".join((*ACCELERATE_SIZES, *ACCELERATE_OTHERS))
        raise ValueError(f"{shown}: there is no setting {unknown[0]!r}; there are {known}.")
    gathers = "keys and values are gathered; sp_size uses an all-to-all of heads"
    check_handler(config, "cp_handler", "cp_comm_strategy", "allgather", gathers)
    check_handler(config, "sp_handler", "sp_attn_implementation", "sdpa", "torch chooses the kernel")
    asked = {}
    for key, axis in ACCELERATE_SIZES.items():
        size = read_size("parallelism_config", axis, config.get(key) or 1)
        if size != 1:
            asked[axis] = size
    if asked and named is not None:
        raise ValueError(f"parallel={named!r} and {shown} both set the parallelism: keep one.")
    return (shown, asked) if asked else None


def check_handler(config: Mapping[str, Any], name: str, setting: str, possible: str, reason: str) -> None:
    """Refuses all values but `possible` of a setting in one of accelerate's handlers.

    Raises:
        UnsupportedOption: the setting has another value.
    """
    handler = config.get(name)
    value = handler.get(setting) if isinstance(handler, Mapping) else None
    if value not in (None, possible):
        raise UnsupportedOption(
            f"parallelism_config={{{setting!r}: {value!r}}} is not supported: {reason}; give {possible!r}, or leave it "
            "out."
        )


def fill_mesh(shown: str, sizes: Mapping[str, int], world_size: int) -> Mesh:
    """Returns the mesh of `world_size` processes.

    Raises:
        ValueError: the product of the sizes is not `world_size`.
    """
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{shown}: {' and '.join(free)} are both -1; only one axis can take the remaining processes.")
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
        raise ValueError(f"{shown}: cp and sp both shard the sequences: keep one.")
    if mesh.size != world_size:
        raise ValueError(
            f"{shown} is a mesh of {mesh.size} processes, and there {'is' if world_size == 1 else 'are'} {world_size}: "
            f"start {mesh.size} (--nproc-per-node), or change the sizes; dp_shard=-1 takes all remaining processes."
        )
    return mesh


def resolve_mesh(options: Any, world_size: int, local_size: int | None = None) -> Mesh:
    """Resolves the mesh of a run.

    Args:
        options: the arguments.
        world_size: the number of processes.
        local_size: processes per machine, for `hybrid_shard`; None for all.

    Raises:
        ValueError: the processes cannot form such a mesh.
        UnsupportedOption: one of accelerate's settings that is not supported.
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
            f"fsdp_config['replicate']={replicas} is invalid with {world_size} processes: each replica "
            "needs the same number of them, and more than one (parallel='ddp' is one process for each)."
        )
    return Mesh(dp_replicate=replicas, dp_shard=world_size // replicas)


def engine_of(mesh: Mesh, options: Any) -> str:
    """Returns the name of the strategy for a mesh of several processes."""
    if mesh.pp > 1:
        return "pipeline"
    if not mesh.is_data_only:
        return "mesh"
    if mesh.dp_shard > 1:
        return "fsdp"
    return options.parallel if isinstance(options.parallel, str) else "ddp"


def check_mesh(options: Any) -> bool:
    """Checks that the mesh sizes are consistent with `fsdp`. Returns: True if sizes are given.

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
            f"fsdp={options.fsdp!r} with fsdp_config={options.fsdp_config!r} asks for replicas, which {shown} does not "
            "have: give their number as dp_replicate, and leave the other out."
        )
    return True
