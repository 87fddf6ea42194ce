"""The world of processes that train together, and the device of this one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.optional import is_installed, require


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        device: the accelerator of this process, found through `torch.accelerator`, or the CPU.
        world_size: number of processes; 1 here.
        process_index: rank in the world.
        local_process_index: rank on this machine.
        n_gpu: devices this process drives: 0 or 1. Several are never driven through `nn.DataParallel`.
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
        """Whether this is the process that writes what is written once."""
        return self.process_index == 0


def choose_device(use_cpu: bool) -> torch.device:
    """The accelerator in use (CUDA, ROCm, XPU, MPS, NPU, HPU alike), or the CPU where there is none or `use_cpu`."""
    if use_cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return accelerator
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def current_world(args: Any) -> World:
    """The world that `args` and the environment describe.

    Raises:
        ValueError: a launcher announced several processes, which this version does not train on.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ValueError(
            f"WORLD_SIZE={world_size}: this version of paceline trains on one process. "
            "Start the script without a launcher (plain `python`), or unset WORLD_SIZE."
        )
    return World(device=choose_device(bool(args.use_cpu)))


def process_state(use_cpu: bool = False) -> Any:
    """accelerate's PartialState of this process, which libraries log and gather through; made where there is none yet.

    Of several processes it is made only once their group is there, so that there is one group. None until then, and
    without accelerate.
    """
    if not is_installed("accelerate"):
        return None
    kind: Any = require("accelerate.state", "libraries").PartialState
    if kind._shared_state:
        return kind()
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not has_group:
        return None
    return kind(cpu=use_cpu)
