"""Memory use of this process, measured cheaply enough to display it during training."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from paceline.core.optional import LateModule, is_installed, require

if TYPE_CHECKING:
    from paceline.core import byte_sizes
else:
    byte_sizes = LateModule("paceline.core.byte_sizes")

_STATM = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def process_bytes() -> int | None:
    """Returns the resident memory of this process in bytes; None without Linux's /proc and psutil. Takes 10 us."""
    try:
        with open(_STATM, encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        pass
    if not is_installed("psutil"):
        return None
    return int(require("psutil", "memory").Process().memory_info().rss)


def accelerator_bytes() -> int | None:
    """Returns torch's allocated memory on the current accelerator in bytes; None without one.

    Does not synchronize. Does not import torch: if torch is not loaded, it has allocated no memory.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = getattr(torch, device.type, None) if device is not None else None
    is_started = getattr(module, "is_initialized", None)
    if is_started is not None and not is_started():
        return None  # the query would initialize the device
    read = getattr(module, "memory_allocated", None) or getattr(module, "current_allocated_memory", None)
    return int(read()) if read is not None else None


def describe_memory() -> str:
    """Returns text such as `"RAM 1.2 GiB, GPU 3.4 GiB"` with the known parts."""
    parts = [("RAM", process_bytes()), ("GPU", accelerator_bytes())]
    return ", ".join(f"{label} {byte_sizes.format_memory(count)}" for label, count in parts if count is not None)
