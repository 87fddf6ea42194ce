"""Captures the outputs of named modules in a forward pass, whose hidden states are distilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.pytorch.model.outputs import ModelOutputError
from paceline.pytorch.model.signature import innermost


def names_in_encoder(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Returns those of the names of modules that are in the encoder of a model with encoder and decoder."""
    inner: Any = innermost(model)
    has_both = hasattr(inner, "get_encoder") and hasattr(inner, "get_decoder")
    if not (has_both and getattr(getattr(inner, "config", None), "is_encoder_decoder", False)):
        return frozenset()
    own, other = (set(map(id, part.modules())) for part in (inner.get_encoder(), inner.get_decoder()))
    modules = dict(model.named_modules())
    return frozenset(name for name in names if id(modules[name]) in own - other)


def masks_of_encoder(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the attention masks of an encoder's inputs, with a further dimension."""
    names = [name for name in inputs if "attention_mask" in name and "decoder" not in name]
    return {name: inputs[name].unsqueeze(-1) for name in names if isinstance(inputs[name], Tensor)}


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
