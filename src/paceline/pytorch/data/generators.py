"""Seeds the random generators of worker processes, and saves generator states with which epochs are replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_generators(*key: int) -> None:
    """Seeds Python's, numpy's and torch's global generators of a worker process from a key.

    A worker does so before each batch. `torch.manual_seed` formats the stack for each kind of device that is not in use
    yet, which takes longer than the rest together; the kinds that torch was built without are left out here.

    Args:
        key: integers, for instance (seed, epoch, position). Different keys give unrelated random numbers.
    """
    words = np.random.SeedSequence([len(key), *(part % 2**64 for part in key)]).generate_state(10, np.uint32)
    random.seed(words[:4].tobytes())
    np.random.seed(words[4:8])
    seed = int(words[8]) << 32 | int(words[9])
    if has_devices():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def has_devices() -> bool:
    """Returns True if torch was built for an accelerator. Does not look for one, which may take a second."""
    version = torch.version
    is_built = any((version.cuda, version.hip, version.xpu)) or torch.backends.mps.is_built()
    return is_built or torch._C._get_privateuse1_backend_name() != "privateuseone"  # one that another package brought


def capture_generators(own: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Returns the JSON-serializable states of this process's global CPU generators and of the generators in `own`."""
    version, keys, gauss = random.getstate()
    name, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(keys), gauss],
        "numpy": [name, np.asarray(numpy_keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "own": capture_own(own or {}),
    }


def restore_generators(state: Mapping[str, Any], own: Mapping[str, torch.Generator] | None = None) -> None:
    """Restores the result of `capture_generators`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensor_of(state["torch"]))
    restore_own(state["own"], own or {})


def capture_own(own: Mapping[str, torch.Generator]) -> dict[str, str]:
    """Returns the JSON-serializable states of generators by name."""
    return {key: generator.get_state().numpy().tobytes().hex() for key, generator in own.items()}


def restore_own(states: Mapping[str, str], own: Mapping[str, torch.Generator]) -> None:
    """Restores the result of `capture_own`, for the generators that still exist."""
    for key, generator in own.items():
        if key in states:
            generator.set_state(tensor_of(states[key]))


def tensor_of(text: str) -> torch.Tensor:
    """Returns a uint8 tensor from its hexadecimal form."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@contextmanager
def generators_at(state: Mapping[str, Any] | None, own: Mapping[str, torch.Generator] | None = None) -> Iterator[None]:
    """Runs a block with the global generators at `state` (None: unchanged), and restores them afterwards.

    Generators in `own` are set as well, but not restored after the block.
    """
    present = capture_generators()
    try:
        if state is not None:
            restore_generators(state, own)
        yield
    finally:
        restore_generators(present)


def own_generators(loader: object) -> dict[str, torch.Generator]:
    """Returns the generators that the loader and its samplers hold."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    holders = {
        "loader": loader,
        "sampler": sampler,
        "batch_sampler": batch_sampler,
        "inner_sampler": getattr(batch_sampler, "sampler", None),
    }
    found = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}
