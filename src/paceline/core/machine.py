"""The packages and the hardware of a run. Reads what is imported already, and imports no framework."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def installed_packages() -> list[str]:
    """Returns `name==version` of every installed distribution, sorted.

    Names are in their normal form: lower case, with hyphens. Of two with one name, the first on the path counts.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = _name_and_version(distribution)
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return [f"{name}=={found[name]}" for name in sorted(found)]


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Returns (name, version), from the name `NAME-VERSION.dist-info` of the folder or else from its metadata.

    Reading the metadata of 230 distributions takes 120 ms; their folders have been listed already.
    """
    folder = str(getattr(getattr(distribution, "_path", None), "name", ""))
    name, _, version = folder.removesuffix(".dist-info").partition("-")
    if folder.endswith(".dist-info") and name and version and "-" not in version:
        return name, version
    try:
        return distribution.metadata["Name"] or "", distribution.version
    except Exception:  # damaged metadata of a package that this run may not use
        return "", ""


def describe_hardware() -> dict[str, Any]:
    """Returns the processor, its cores, the memory in GiB, the threads of torch, and the accelerators."""
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "memory_gib": _memory_gib()}
    torch: Any = sys.modules.get("torch")
    tensorflow: Any = sys.modules.get("tensorflow")
    if hasattr(torch, "get_num_threads"):
        found["threads"] = torch.get_num_threads()
        found["devices"] = _devices_of_torch(torch)
        found["cuda"] = getattr(torch.version, "cuda", None)
    elif hasattr(tensorflow, "config"):
        found["devices"] = [device.name for device in tensorflow.config.list_physical_devices("GPU")]
    return found


def _devices_of_torch(torch: Any) -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return []
    name_of = getattr(torch.get_device_module(accelerator), "get_device_name", lambda index: accelerator.type)
    return [str(name_of(index)) for index in range(torch.accelerator.device_count())]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
