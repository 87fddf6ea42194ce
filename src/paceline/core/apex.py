"""Finds and imports NVIDIA's Apex, and not the unrelated package of the same name on PyPI."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def has_apex(part: str) -> bool:
    """True if NVIDIA's Apex is installed with its module `part`. Imports nothing: it may be the unrelated package."""
    if f"apex.{part}" in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        return False
    places = spec.submodule_search_locations if spec is not None else None
    return places is not None and PathFinder.find_spec(f"apex.{part}", list(places)) is not None


def require_apex(part: str) -> ModuleType:
    """Imports `apex.PART` ("amp", "optimizers", "normalization").

    Raises:
        ImportError: Apex is not installed, or the installed package is the unrelated one.
    """
    if not has_apex(part):
        raise ImportError(
            f"apex.{part} of NVIDIA's Apex is required and cannot be imported: build Apex from NVIDIA's source for "
            "this torch and CUDA (it is not on PyPI; the package named apex there is unrelated)"
        )
    return importlib.import_module(f"apex.{part}")
