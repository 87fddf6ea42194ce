"""From the modules of a model to what calls the model in parts of its sequences."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Link:
    """From a module to what calls its model in parts. It keeps nothing alive; a copy of the module has an empty one."""

    def __init__(self, context: Any = None) -> None:
        self.find: Any = weakref.ref(context) if context is not None else lambda: None

    def __reduce__(self) -> Any:
        return Link, ()


def set_context(module: nn.Module, context: Any) -> None:
    """Let `context_of` find it."""
    module.paceline_context = Link(context)  # type: ignore[assignment]


def context_of(module: nn.Module) -> Any:
    """What calls a model in parts, of the model or one of its modules; None: nothing does."""
    link = getattr(module, "paceline_context", None)
    return link.find() if isinstance(link, Link) else None
