"""Optional packages: one way to ask for them, one error that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def is_installed(module: str) -> bool:
    """Whether `module` could be imported. Nothing is imported but the parents of a dotted name."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ImportError: the package is missing; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is needed here: pip install "paceline[{extra}]" ({error})') from error
