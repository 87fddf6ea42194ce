"""Captures the outputs of named modules in a forward pass, whose hidden states are distilled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paceline.pytorch.model.outputs import ModelOutputError


class Captures:
    """The outputs of modules in their last forward pass.

    Args:
        model: holds the modules.
        names: the names of the modules.
        owner: "student" or "teacher", for error messages.

    Raises:
        ValueError: the model has no module of a name.
    """

    def __init__(self, model: nn.Module, names: list[str], owner: str) -> None:
        modules = dict(model.named_modules())
        missing = [name for name in names if name not in modules]
        if missing:
            raise ValueError(
                f"distillation_layers: the {owner} has no module {missing[0]!r}; it has, for instance, "
                f"{', '.join(list(modules)[1:9])}."
            )
        self.owner = owner
        self.found: dict[str, Any] = {}
        self._handles = [modules[name].register_forward_hook(self._keeper(name)) for name in names]

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, outputs: Any) -> None:
            self.found[name] = outputs

        return keep

    def take(self, name: str) -> Tensor:
        """Returns the states `(samples, ..., width)` that a module has computed, and drops them.

        Raises:
            ModelOutputError: it has computed none.
        """
        outputs = self.found.pop(name, None)
        states = getattr(outputs, "last_hidden_state", outputs)
        if isinstance(states, tuple | list) and states:
            states = states[0]
        if not isinstance(states, Tensor) or states.dim() < 2:
            raise ModelOutputError(
                f"distillation_layers: {name!r} of the {self.owner} returned no tensor of hidden states "
                f"({type(outputs).__name__})."
            )
        return states.movedim(1, -1) if states.dim() > 3 else states  # channels of feature maps

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.found.clear()
