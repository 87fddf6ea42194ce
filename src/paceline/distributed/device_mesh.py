"""torch's device mesh of a run, and the parts of it that parameters are sharded over."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.args.mesh import Mesh


def build_device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The processes as torch's mesh, with the axes that have more than one, outermost first.

    `dp_shard` is always there: parameters are sharded over it, and over `cp`, perhaps in one part.
    """
    axes = {axis: size for axis, size in vars(mesh).items() if size > 1 or axis == "dp_shard"}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def sharding_mesh(mesh: Mesh, whole: DeviceMesh) -> DeviceMesh:
    """What parameters are sharded over (`dp_shard` and `cp` as one axis), with the replicas as an axis before it."""
    shards = "dp_shard"
    if mesh.cp > 1:
        shards = "dp_shard_cp"
        whole["dp_shard", "cp"]._flatten(shards)
    return whole["dp_replicate", shards] if mesh.dp_replicate > 1 else whole[shards]
