"""A link from the modules of a model to the context that runs the model on sequence shards."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Link:
    """A weak reference from a module to the context that runs its model on shards; copies and pickles are empty."""

    def __init__(self, context: object = None) -> None:
        self.find: Any = weakref.ref(context) if context is not None else lambda: None

    def __reduce__(self) -> Any:
        return Link, ()


def set_context(module: nn.Module, context: object) -> None:
    """Sets the context that `context_of` returns."""
    module.paceline_context = Link(context)  # type: ignore[assignment]


def context_of(module: nn.Module) -> Any:
    """Returns the context of the model or of one of its modules; None without context parallelism."""
    link = getattr(module, "paceline_context", None)
    return link.find() if isinstance(link, Link) else None
