"""`optim_args`: "name=value,name=value" as typed keyword arguments of an optimizer class."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.spelling import nearest

_SEPARATOR = re.compile(r",(?![^(\[]*[)\]])")  # a comma outside brackets
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None, "null": None}


def split_options(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parses `optim_args` into options with values as written.

    Raises:
        ValueError: a part that is not `name=value`, or a name twice.
    """
    if text is None or isinstance(text, Mapping):
        return dict(text or {})
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in _SEPARATOR.split(text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f'optim_args={text!r}: {part!r} is not of the form name=value, as in "momentum=0.9"')
        if name in options:
            raise ValueError(f"optim_args={text!r} gives {name!r} twice")
        options[name] = value
    return options


def typed_options(
    text: str | Mapping[str, Any] | None,
    make: Callable[..., Any],
    optimizer: str,
    further: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns `optim_args` as keyword arguments of `make`, each in the type of that argument's default.

    Args:
        further: options in addition to the arguments of `make`, with their defaults.

    Raises:
        TypeError: `make` has no such argument; the nearest one is named.
        ValueError: a value of the wrong type.
    """
    parameters = dict(inspect.signature(make).parameters)
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for reserved in ("params", "kwargs", "lr"):
        parameters.pop(reserved, None)
    defaults = {name: parameter.default for name, parameter in parameters.items()} | dict(further or {})
    options = split_options(text)
    for name, value in options.items():
        if name == "lr":
            raise TypeError(f"optim_args: lr={value} belongs in learning_rate={value}")
        if name not in defaults and not takes_anything:
            raise TypeError(f"optim_args: {optimizer} has no option {name!r}; {nearest(name, defaults)}")
        options[name] = _typed(name, value, defaults.get(name), optimizer)
    return options


def _typed(name: str, value: Any, default: Any, optimizer: str) -> Any:
    if isinstance(value, str):
        value = _literal(value)
    kind: tuple[type, ...]
    if isinstance(default, bool):
        kind, word = (bool,), "true or false"
    elif isinstance(default, (int, float)):
        kind, word = (int, float), "a number"
    elif isinstance(default, (tuple, list)):
        kind, word = (tuple, list), f"{len(default)} values in brackets"
    else:
        return value
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind == (bool,))
    if not fits or (isinstance(default, tuple) and len(value) != len(default)):
        raise ValueError(f"optim_args: {name}={value!r} of {optimizer} should be {word}, as in {name}={default}")
    return tuple(value) if isinstance(default, tuple) else value


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
