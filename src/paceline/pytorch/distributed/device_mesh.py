"""Device meshes of a run: the mesh of the parameters, and the groups that share sequences."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.args.mesh import Mesh


def build_device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Returns the device mesh of the parameters, with the axes that have more than one process, outermost first.

    Parameters are sharded over `dp_shard`, `cp` and `sp` alike: here these are merged into the axis `dp_shard`, which
    always exists.
    """
    sizes = {**vars(mesh), "dp_shard": mesh.dp_shard * mesh.num_parts, "cp": 1, "sp": 1}
    axes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
    whole = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if axes["dp_shard"] > 1 and mesh.tp > 1:
        whole["dp_shard", "tp"]._flatten("dp_shard_tp")  # so that norms are summed in one collective
    return whole


def sharding_mesh(whole: DeviceMesh) -> DeviceMesh:
    """Returns the mesh over which parameters are sharded, preceded by the axis of the replicas, if any."""
    names = whole.mesh_dim_names or ()
    return whole["dp_replicate", "dp_shard"] if "dp_replicate" in names else whole["dp_shard"]


def sequence_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Returns the 1-D mesh of the processes that share sequences with this process."""
    sizes = (mesh.size // mesh.num_parts // mesh.tp, mesh.num_parts, mesh.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("data", "parts", "tp"))["parts"]
