"""Random state: seeding, full determinism, and snapshots with which a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.world import World
from paceline.pytorch.distributed.xla_runtime import random_state, seed_devices


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seeds the generators of Python, numpy and torch, including those of every accelerator.

    Args:
        seed: any integer in [0, 2**32).
        deterministic: also request torch's deterministic algorithms.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    seed_devices(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seeds everything and makes every operation deterministic, at some cost in speed.

    This is the only function of the package that writes environment variables. cuBLAS and the HIP libraries read them
    when they start, so call it before the first operation on a GPU.

    Args:
        seed: as in `set_seed`.
        warn_only: warn about an operation that has no deterministic form, instead of raising an error.
    """
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    os.environ["HCCL_DETERMINISTIC"] = "1"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    set_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def capture_rng() -> dict[str, Any]:
    """Returns the state of every generator of this process, as tensors, numbers, tuples and strings only.

    Returns:
        `python` (version, tuple of integers, gauss), `numpy` (name, uint32 keys as an int64 tensor, position, ...),
        `cpu` (uint8 tensor) and, with an accelerator, `<type>` (a list of uint8 tensors, one per device; an integer
        for XLA devices).
    """
    legacy: Any = np.random.get_state(legacy=True)
    name, numpy_keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy_keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "cpu": torch.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "get_rng_state_all"):
            state[accelerator.type] = module.get_rng_state_all()
        else:
            state[accelerator.type] = [module.get_rng_state()]
    recorded = random_state()
    if recorded is not None:
        state["xla"] = recorded
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restores a result of `capture_rng`, or a snapshot of the Hugging Face Trainer (tuples and arrays).

    States of devices that this machine lacks are ignored.
    """
    if "python" in state:
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
    if "numpy" in state:
        name, numpy_keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.asarray(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    if "cpu" in state:
        torch.set_rng_state(state["cpu"].cpu())
    if isinstance(state.get("xla"), int):
        seed_devices(state["xla"])
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type not in state:
        return
    module, saved = torch.get_device_module(accelerator), state[accelerator.type]
    if isinstance(saved, torch.Tensor):
        module.set_rng_state(saved)
    elif hasattr(module, "set_rng_state_all") and len(saved) == module.device_count():
        module.set_rng_state_all(saved)
    else:
        module.set_rng_state(saved[0])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores every generator after the block, so that draws and seeding inside have no effect outside."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


def separate_streams(world: World, stream: int) -> None:
    """Gives ranks of different random streams different states, if they were restored to the same one.

    The ranks of a tensor-parallel group save one state for all, and may read different data on another mesh. A
    collective; states that differ are unchanged.

    Args:
        world: the processes.
        stream: the index of this rank's random stream.
    """
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=4).digest()
    owners = [owner for owner, other in gather_objects(world, (stream, digest)) if other == digest]
    if min(owners) != stream:
        set_seed((int.from_bytes(digest, "big") + stream) % 2**32)


def seed_everything(seed: int, *, is_deterministic: bool, tf32: bool | None) -> None:
    """Seeds all generators, and sets the determinism and the matrix precision that a run requests.

    Args:
        seed: for Python, numpy and torch.
        is_deterministic: use deterministic operations only.
        tf32: multiply float32 matrices in TF32; None leaves the setting unchanged.
    """
    if is_deterministic:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
    if tf32 is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
