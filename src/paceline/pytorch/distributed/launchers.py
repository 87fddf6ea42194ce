"""Ranks and addresses from the environment of launchers: torchrun, accelerate launch, srun, mpirun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500  # torch's
SLURM_PORTS = (15000, 20000)  # first port and number of ports: chosen by job id, so that jobs on a node do not collide


@dataclass(frozen=True)
class Launch:
    """The rank of this process in one launch.

    Attributes:
        rank, world_size: among all processes.
        local_rank: rank on this machine.
        address, port: where the first process listens; None reads torch's own environment variables.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str | None = None
    port: int | None = None


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Returns the rank that a launcher gave this process; None without a launcher, or with a single process.

    Raises:
        ValueError: the environment variables contradict each other, or a required one is missing.
    """
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        return _read_torchrun(environment)
    for size, rank, local in (
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),  # set by srun; salloc alone sets no step
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ):
        if int(environment.get(size, "1")) > 1 and rank in environment:
            address, port = _find_first(environment)
            return Launch(
                int(environment[rank]), int(environment[size]), int(environment.get(local, "0")), address, port
            )
    return None


def run_identity(environment: Mapping[str, str]) -> str | None:
    """Returns a name for this launch that a restart by the same launcher keeps; None without torchrun."""
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    return f"launcher {os.getppid()}" if run_id in ("", "none") else run_id


def num_restarts(environment: Mapping[str, str]) -> int:
    """Returns how often torchrun has restarted these processes after one of them died."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _read_torchrun(environment: Mapping[str, str]) -> Launch:
    world_size = int(environment["WORLD_SIZE"])
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={world_size} announces several processes, but {', '.join(missing)} is not set. Start the "
            "script with `torchrun` or `paceline launch`, or unset WORLD_SIZE to train on one process."
        )
    rank = int(environment["RANK"])
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is invalid with WORLD_SIZE={world_size}: ranks are 0 to {world_size - 1}.")
    return Launch(rank, world_size, int(environment.get("LOCAL_RANK", rank)))


def _find_first(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns the address and port of the first process, from MASTER_ADDR or Slurm's first node.

    Raises:
        ValueError: neither is set.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_node(nodes) if nodes else None)
    if address is None:
        raise ValueError("Set MASTER_ADDR to the machine of the first process: this launcher does not name it.")
    first, count = SLURM_PORTS
    job = environment.get("SLURM_JOB_ID", "")
    port = first + int(job) % count if job.isdigit() else DEFAULT_PORT
    return address, int(environment.get("MASTER_PORT", port))


def first_node(nodes: str) -> str:
    """Returns the first node of a Slurm node list: `gpu[03-05,9],login1` -> `gpu03`."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if match is None or match[2] is None:
        return nodes.split(",")[0]
    return f"{match[1]}{re.split('[-,]', match[2])[0]}{match[3]}"
