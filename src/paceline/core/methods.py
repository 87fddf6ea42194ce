"""Inspects methods: distinguishes the package's own from overrides by users, and lists the strings in their code."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def is_ours(method: object) -> bool:
    """True if a method's code belongs to this package.

    False for an override in a subclass or on an instance, and for one that a library assigned to the class. The
    function's globals decide, because `functools.wraps` copies `__module__`.
    """
    function = getattr(method, "__func__", method)
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("paceline.")


def texts_in(function: object) -> Iterator[str]:
    """Yields the strings among the constants of a function's code, nested functions included, but not its callees."""
    function = getattr(function, "func", function)  # unwraps functools.partial
    holder = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    pending = [getattr(holder, "__code__", None)]
    while pending:
        for constant in getattr(pending.pop(), "co_consts", ()):
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, tuple):
                yield from (item for item in constant if isinstance(item, str))
            elif isinstance(constant, CodeType):
                pending.append(constant)
