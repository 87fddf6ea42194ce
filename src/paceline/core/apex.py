"""NVIDIA's Apex, told from the unrelated package of that name that registries have."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def has_apex(part: str) -> bool:
    """Whether NVIDIA's Apex is installed with its module `part`. Nothing is imported: another package may be there."""
    if f"apex.{part}" in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        return False
    places = spec.submodule_search_locations if spec is not None else None
    return places is not None and PathFinder.find_spec(f"apex.{part}", list(places)) is not None


def require_apex(part: str) -> ModuleType:
    """Import `apex.PART` ("amp", "optimizers", "normalization").

    Raises:
        ImportError: it is not there, or is another package of the same name.
    """
    if not has_apex(part):
        raise ImportError(
            f"apex.{part} of NVIDIA's Apex is needed here and cannot be imported: build Apex from NVIDIA's source for "
            "this torch and CUDA (no package registry has it; the package named apex there is something else)"
        )
    return importlib.import_module(f"apex.{part}")
