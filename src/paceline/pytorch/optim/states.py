"""Saves the state of optimizers of other packages in checkpoints, and restores it exactly.

torch's own `load_state_dict` casts the state of an optimizer to the dtype of the weights. Several packages store
objects other than tensors, or store them outside of `state`. Both would prevent an exact resume.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

KIND = "paceline_kind"
"""Key that marks a dict in a saved state as an object; its value is the name of a class in the optimizer's `parts`."""

_WRAPPED_BY_BITSANDBYTES = "__bnb_optimizer_quant_state__"

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


class ExactState(_Base):
    """A mixin for optimizer classes: `state_dict` returns plain values, and `load_state_dict` casts nothing.

    Attributes:
        parts: classes of the objects in the optimizer's state, by name: tensor subclasses that can be flattened, and
            classes whose attributes are tensors and plain values. Objects of other classes are never created from a
            file.
    """

    parts: Mapping[str, type] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, with each object as a dict of its attributes."""
        saved = super().state_dict()
        saved["state"] = {key: self._packed(entry) for key, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a saved state; every tensor keeps its saved dtype.

        Raises:
            ValueError: the parameter groups differ, or the class of an object is not in `parts`.
        """
        groups, saved = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError(
                f"the saved optimizer has parameter groups of {[len(group['params']) for group in saved]} parameters, "
                f"this one of {[len(group['params']) for group in groups]}"
            )
        of_index = dict(
            zip(
                chain.from_iterable(group["params"] for group in saved),
                chain.from_iterable(group["params"] for group in groups),
                strict=True,
            )
        )
        state: dict[Any, Any] = defaultdict(dict)
        for key, entry in state_dict["state"].items():
            owner = of_index.get(key, key)
            device = owner.device if isinstance(owner, Tensor) else None
            state[owner] = self._unpacked(entry, device, name="")
        merged = [{**own, **new, "params": own["params"]} for own, new in zip(groups, saved, strict=True)]
        self.__setstate__({"state": state, "param_groups": merged})

    def _packed(self, value: object) -> Any:
        kind = type(value).__name__
        if self.parts.get(kind) is type(value):
            if isinstance(value, Tensor):
                names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
                return {KIND: kind, "tensors": {name: getattr(value, name) for name in names}, "context": context}
            return {KIND: kind, "attributes": dict(vars(value))}
        if isinstance(value, dict):
            return {key: self._packed(item) for key, item in value.items()}
        return value

    def _unpacked(self, value: Any, device: torch.device | None, name: Any) -> Any:
        if isinstance(value, Tensor):
            # a step counter stays on its device, as in torch
            return value if device is None or name == "step" else value.to(device)
        if not isinstance(value, Mapping):
            is_list = isinstance(value, list)
            return [self._unpacked(item, device, name) for item in value] if is_list else value
        items = {key: self._unpacked(item, device, key) for key, item in value.items()}
        if KIND in items:
            return self._rebuilt(items)
        items.update(items.pop(_WRAPPED_BY_BITSANDBYTES, {}))
        return items

    def _rebuilt(self, saved: dict[str, Any]) -> Any:
        kind = self.parts.get(str(saved[KIND]))
        if kind is None:
            raise ValueError(f"{type(self).__name__} keeps no {saved[KIND]!r} in its state")
        if issubclass(kind, Tensor):
            return kind.__tensor_unflatten__(saved["tensors"], saved["context"])  # type: ignore[attr-defined]
        made = object.__new__(kind)
        vars(made).update(saved["attributes"])
        return made


def with_mixins(base: type, *mixins: type, parts: tuple[type, ...] = ()) -> type:
    """Returns a subclass of `base` with `mixins`, under the same name.

    Args:
        base: the optimizer class.
        mixins: classes that precede it in the method resolution order.
        parts: see `ExactState.parts`.
    """
    names = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__signature__": inspect.signature(base),
        "parts": {part.__name__: part for part in parts},
    }
    return type(base.__name__, (*mixins, base), names)
