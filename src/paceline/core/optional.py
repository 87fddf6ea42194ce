"""Import of optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any


def is_installed(module: str) -> bool:
    """True if `module` can be imported. Imports only the parents of a dotted name."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional package.

    Raises:
        ImportError: the package is missing; the message names the extra that installs it. Or one that it needs is
            missing or has another version; the message names that.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or package).partition(".")[0] != package and is_installed(package):
            raise ImportError(f"{module} is installed, but its import fails: {error}", name=error.name) from error
        raise ImportError(f'{module} is required: pip install "paceline[{extra}]" ({error})') from error


def load(location: str) -> Any:
    """Returns the object at a location `package.module:name`, which is imported now."""
    module, name = location.split(":")
    return getattr(importlib.import_module(module), name)


class LateModule:
    """A module that is imported on first use of one of its names, to keep start-up fast.

    Args:
        module: the full name of an installed module.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by copy, pickle and `hasattr`, which must not load the module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)

    def __reduce__(self) -> tuple[type[LateModule], tuple[str]]:
        return LateModule, (self._module,)
