"""References to Python objects in a configuration: `package.module:name`, alone or with keyword arguments."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cli.errors import UsageError, suggest

REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
KEY = "factory"


@dataclass(frozen=True)
class Reference:
    """A reference to an object in a configuration.

    Attributes:
        where: the key of the configuration, for messages.
        name: `package.module:name`.
        options: keyword arguments given with the reference.
    """

    where: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Imports the object.

        Raises:
            UsageError: there is no such module or name. An error inside the module is not caught.
        """
        module_name, _, path = self.name.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise
            raise UsageError(
                f"{self.where}: there is no module {error.name!r} (looked for in the configuration's folder, the "
                "current folder and the installed packages)"
            ) from error
        for part in path.split("."):
            if not hasattr(found, part):
                public = [name for name in dir(found) if not name.startswith("_")]
                raise UsageError(f"{self.where}: {module_name} has no {path!r}{suggest(part, public)}")
            found = getattr(found, part)
        return found

    def check(self) -> None:
        """Checks that the object exists and has a parameter for every option.

        Raises:
            UsageError: a name or parameter is missing; the message names the closest match.
        """
        self._keywords(self.load(), {})

    def call(self, **offered: Any) -> Any:
        """Calls the object with the options, and with those of `offered` for which it has a parameter.

        Raises:
            UsageError: the object has no parameter for an option, or a required argument is missing.
        """
        target = self.load()
        if not callable(target):
            raise UsageError(f"{self.where}: {self.name} is a {type(target).__name__}, not something to call")
        keywords = self._keywords(target, offered)
        signature = read_signature(target)
        if signature is not None:
            try:
                signature.bind(**keywords)
            except TypeError as error:
                raise UsageError(f"{self.where}: {self.name}: {error}; give it beside {KEY!r}") from error
        return target(**keywords)

    def bind(self, **offered: Any) -> Any:
        """Returns a callable: an instance of a class, or a function with its options bound."""
        target = self.load()
        if isinstance(target, type):
            return self.call(**offered)
        keywords = self._keywords(target, offered)
        return partial(target, **keywords) if keywords else target

    def _keywords(self, target: object, offered: Mapping[str, Any]) -> dict[str, Any]:
        signature = read_signature(target)
        if signature is None:
            return dict(self.options)
        parameters = signature.parameters
        takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in self.options:
            if name not in parameters and not takes_any:
                raise UsageError(f"{self.where}.{name}: {self.name} takes no {name!r}{suggest(name, parameters)}")
        return {name: value for name, value in offered.items() if name in parameters} | dict(self.options)


def read_reference(where: str, value: object) -> Reference | None:
    """Reads `package.module:name`, or a mapping with `factory:` and keyword arguments; None for other values."""
    if isinstance(value, str):
        return Reference(where, value) if REFERENCE.fullmatch(value) else None
    if isinstance(value, Mapping) and KEY in value:
        name = value[KEY]
        if not isinstance(name, str) or not REFERENCE.fullmatch(name):
            raise UsageError(f"{where}.{KEY}: {name!r} is not of the form package.module:name")
        return Reference(where, name, {key: item for key, item in value.items() if key != KEY})
    return None


def require_reference(where: str, value: object) -> Reference:
    """Reads a reference as `read_reference` does, and refuses other values.

    Raises:
        UsageError: the value is not a reference.
    """
    reference = read_reference(where, value)
    if reference is None:
        raise UsageError(
            f"{where}: {value!r} is not of the form package.module:name (or a mapping with {KEY!r}: "
            "package.module:name and keyword arguments)"
        )
    return reference


def is_of(value: object, packages: Collection[str]) -> bool:
    """True if an object's class, or a base class, is from one of these packages. Imports none of them."""
    return any(kind.__module__.partition(".")[0] in packages for kind in type(value).__mro__)


def read_signature(target: Any) -> inspect.Signature | None:
    """Returns the signature of a callable; None if it cannot be inspected."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def put_on_path(*folders: Path) -> None:
    """Adds folders to the front of the import path, in this order."""
    for folder in reversed(folders):
        name = str(folder.resolve())
        if name in sys.path:
            sys.path.remove(name)
        sys.path.insert(0, name)
