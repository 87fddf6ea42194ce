"""The processes that train together, and the device of this one."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from paceline.args.sections import Options
from paceline.core.optional import is_installed, require
from paceline.pytorch.distributed.launchers import Launch, num_restarts, read_launch
from paceline.pytorch.distributed.xla_runtime import start_device, wants_xla

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """The rank, world size and device of this process.

    Attributes:
        device: the accelerator of this process, found through `torch.accelerator`, or the CPU.
        world_size: number of processes that train together.
        process_index: rank in the world.
        local_process_index: rank on this machine.
        n_gpu: number of devices this process drives, 0 or 1; `nn.DataParallel` is never used.
    """

    device: torch.device
    world_size: int = 1
    process_index: int = 0
    local_process_index: int = 0

    @property
    def n_gpu(self) -> int:
        return 0 if self.device.type == "cpu" else 1

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the files that are written once."""
        return self.process_index == 0

    @property
    def local_size(self) -> int:
        """Returns the launcher's number of processes on this machine; without it, the world size."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def is_distributed(self) -> bool:
        """True if there are several processes."""
        return self.world_size > 1


def choose_device(use_cpu: bool, local_rank: int | None = None) -> torch.device:
    """Returns the accelerator (CUDA, ROCm, XPU, MPS, NPU, HPU alike), or the CPU without one or with `use_cpu`.

    Args:
        use_cpu: True always returns the CPU.
        local_rank: selects this process's device if several processes run on this machine.

    Raises:
        ValueError: there are more processes on this machine than devices.
    """
    if use_cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return accelerator
    if local_rank is None:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"Process {local_rank} of this machine has no device: there are {count}. Start at most {count} processes a "
            "machine (--nproc-per-node), or set use_cpu=True."
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def device_text(device: torch.device) -> str:
    """Returns a readable device name such as `cuda:0 (NVIDIA H200)` or `cpu`."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)  # neither the CPU nor XLA has one
    return str(device) if name is None else f"{device} ({name(device)})"


def has_group() -> bool:
    """True if a process group is initialized."""
    return distributed.is_available() and distributed.is_initialized()


def current_world(args: Options) -> World:
    """Returns the world that `args` and the environment describe. The first call creates the process group.

    Raises:
        ValueError: the environment or the options are contradictory.
    """
    launch = read_launch(os.environ)
    if wants_xla(args):
        return World(start_device(args, launch.world_size if launch is not None else 1))
    if not has_group():
        if launch is None:
            return World(device=choose_device(bool(args.use_cpu)))
        return start_group(args, launch)
    size, rank = distributed.get_world_size(), distributed.get_rank()
    local_rank = launch.local_rank if launch is not None else int(os.environ.get("LOCAL_RANK", rank))
    return World(choose_device(bool(args.use_cpu), local_rank if size > 1 else None), size, rank, local_rank)


def start_group(args: Any, launch: Launch) -> World:
    """Creates the process group of the processes that a launcher started."""
    device = choose_device(bool(args.use_cpu), launch.local_rank)
    backend = choose_backend(args.ddp_backend, device)
    options: dict[str, Any] = {}
    if launch.address is not None:
        options = {
            "init_method": f"tcp://{launch.address}:{launch.port}",
            "rank": launch.rank,
            "world_size": launch.world_size,
        }
    elif num_restarts(os.environ) > 0 and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun's store may outlive earlier processes, whose addresses gloo would read there. On several machines
        # the restart counts may differ, so they cannot distinguish the launches.
        store, rank, size = next(distributed.rendezvous("env://", timeout=args.ddp_timeout_delta))  # type: ignore[attr-defined]
        store = distributed.PrefixStore(f"restart {num_restarts(os.environ)}", store)  # type: ignore[attr-defined]
        options = {"store": store, "rank": rank, "world_size": size}
    logger.info("Process %d of %d on %s, connected by %s.", launch.rank, launch.world_size, device, backend)
    distributed.init_process_group(backend, timeout=args.ddp_timeout_delta, **options)
    atexit.register(leave_group)
    return World(device, launch.world_size, launch.rank, launch.local_rank)


def host_device(world: World) -> torch.device:
    """Returns the device for sending host values: a group that the user created may have no CPU backend."""
    has_cpu = "cpu" in distributed.get_backend_config()
    return torch.device("cpu") if has_cpu else world.device


def wait_for_all(world: World) -> None:
    """Waits until all processes have reached this call (a barrier)."""
    if world.is_distributed:
        distributed.all_reduce(torch.ones((), device=host_device(world)))


@contextmanager
def first_before_others(world: World, is_first: bool) -> Iterator[None]:
    """Runs the block on the first process before the others, which wait until it is done or has failed.

    Args:
        world: the processes.
        is_first: True on the first process, or on the first process of each machine.
    """
    if not is_first:
        wait_for_all(world)
    try:
        yield
    finally:
        if is_first:
            wait_for_all(world)


def leave_group() -> None:
    """Destroys the process group, if it still exists.

    Unreferenced wrapped models are freed first: they keep the group alive, whose threads must end before the
    interpreter does.
    """
    if has_group():
        gc.collect()
        distributed.destroy_process_group()


def choose_backend(asked: str | None, device: torch.device) -> str:
    """Returns the backend of the group: gloo for tensors on the host, the device's own backend for tensors on it.

    Raises:
        ValueError: `ddp_backend` cannot serve this device.
    """
    if device.type == "cpu":
        if asked in ("nccl", "xccl", "hccl", "cncl", "mccl"):
            raise ValueError(
                f"ddp_backend={asked!r} connects accelerators, and this process trains on the CPU: leave it out (gloo)."
            )
        return asked or "gloo"
    if asked in ("gloo", "mpi"):
        return asked
    return f"cpu:gloo,{device.type}:{asked or distributed.get_default_backend_for_device(device)}"


def process_state(use_cpu: bool = False) -> Any:
    """Returns accelerate's PartialState of this process, which libraries log and gather through; creates it if missing.

    With several processes it is created only after the process group, so that there is only one group. Returns None
    until then, and if accelerate is not installed.
    """
    if not is_installed("accelerate"):
        return None
    kind: Any = require("accelerate.state", "libraries").PartialState
    if kind._shared_state:
        return kind()
    if read_launch(os.environ) is not None and not has_group():
        return None
    return kind(cpu=use_cpu)
