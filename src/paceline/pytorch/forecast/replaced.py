"""Replaces functions of libraries while a step is traced whose other processes do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute while entered.

    Args:
        owner: a module or a class, which may inherit the attribute.
        name: of the attribute.
        value: the replacement.

    Raises:
        AttributeError: there is no such attribute.
    """
    before = getattr(owner, name)
    is_own = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
