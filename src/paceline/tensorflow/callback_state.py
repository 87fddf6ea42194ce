"""The state of a Keras callback in a checkpoint: the attributes that it has changed since its `on_train_begin`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

SET_BY_FIT = ("_model", "model", "params", "validation_data")
MISSING = object()


class CallbackAttributes:
    """The attributes of one Keras callback that are its state.

    These are numbers, text, None, and lists and dicts of them, that differ from their values after `on_train_begin`.
    Arguments of the constructors of Keras' own classes are none: a resumed run has its own (`patience`), and the first
    use may change them (`min_delta` gets a sign). A callback with `state_dict` and `load_state_dict` decides by itself.

    Args:
        callback: an instance of `keras.callbacks.Callback`.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        methods = (getattr(callback, name, None) for name in ("state_dict", "load_state_dict"))
        self.has_own_state = all(map(callable, methods))
        kinds = [kind for kind in type(callback).__mro__ if is_of_keras(kind)]
        self.skipped = {*SET_BY_FIT, *(name for kind in kinds for name in inspect.signature(kind).parameters)}
        self._initial: dict[str, Any] | None = None  # after on_train_begin; None before the first run
        self._is_told = False

    def begin(self) -> None:
        """Notes the attributes as they are after `on_train_begin`."""
        self._initial = {name: plain_or_same(value) for name, value in self._attributes()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, JSON-serializable, and the names of changed attributes that cannot be part of it."""
        if self.has_own_state:
            return {"own": self.callback.state_dict()}
        before = self._initial or {}
        now = self._attributes() if self._initial is not None else ()
        changed = {name: value for name, value in now if differs(value, before.get(name, MISSING))}
        kept = plain_items(changed)
        unsaved = sorted(name for name, value in changed.items() if name not in kept and is_state(value))
        self._tell(unsaved, "are not saved")
        return {"attributes": kept, "unsaved": unsaved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the attributes to the saved values, and those that had not changed to their values at the start."""
        if self.has_own_state:
            if "own" in state:
                self.callback.load_state_dict(state["own"])
            return
        self._tell(state.get("unsaved", []), "were not saved")
        values = vars(self.callback)
        for name, value in {**plain_items(self._initial or {}), **state.get("attributes", {})}.items():
            is_kept = name in values and not is_state(values[name])  # a function, as `monitor_op` once it is chosen
            if name not in self.skipped and not is_kept and differs(values.get(name, MISSING), value):
                values[name] = plain_copy(value)

    def _attributes(self) -> Iterable[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self.callback).items() if name not in self.skipped]

    def _tell(self, names: list[str], what: str) -> None:
        """Warns once of attributes that a resumed run lacks."""
        if not names or self._is_told:
            return
        self._is_told = True
        kind = type(self.callback).__name__
        remedy = (
            "Set load_best_model_at_end=True instead of restore_best_weights."
            if names == ["best_weights"]
            else f"Give {kind} the methods state_dict() and load_state_dict(state), of numbers, text, lists and dicts."
        )
        logger.warning(
            "%s of the callback %s %s with checkpoints: a resumed run starts without. %s",
            " and ".join(names),
            kind,
            what,
            remedy,
        )


def is_of_keras(kind: type) -> bool:
    """True if a class is defined by Keras."""
    return kind.__module__.partition(".")[0] in ("keras", "tf_keras")


def numbered_names(callbacks: Iterable[object]) -> list[str]:
    """Returns the class name of each callback, with "#2", "#3" ... if it repeats."""
    names: list[str] = []
    for callback in callbacks:
        name = type(callback).__name__
        number = 1 + sum(each.partition("#")[0] == name for each in names)
        names.append(name if number == 1 else f"{name}#{number}")
    return names


def plain_copy(value: Any) -> Any:
    """Returns a copy of numbers, text, None, lists and dicts, as JSON keeps them; a tuple becomes a list.

    Raises:
        TypeError: the value is, or holds, something else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return [plain_copy(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain_copy(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__}")


def plain_or_same(value: Any) -> Any:
    """Returns the plain copy of a value, or the value itself if it has none."""
    try:
        return plain_copy(value)
    except TypeError:
        return value


def plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns plain copies of those values that have one."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            found[name] = plain_copy(value)
        except TypeError:
            continue
    return found


def is_state(value: Any) -> bool:
    """True for plain values and for whatever holds numbers; False for functions, files and other objects."""
    return bool(plain_items({"": value})) or holds_numbers(value)


def differs(value: Any, before: Any) -> bool:
    """True unless both are the same object, or equal plain values."""
    if value is before:
        return False
    try:
        return bool(plain_copy(value) != plain_copy(before))
    except TypeError:
        return True


def holds_numbers(value: Any) -> bool:
    """True for numbers, text, arrays, tensors, and collections of them."""
    if isinstance(value, Mapping):
        return any(map(holds_numbers, value.values()))
    if isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        return any(map(holds_numbers, value))
    return isinstance(value, bool | int | float | str) or (hasattr(value, "shape") and hasattr(value, "dtype"))
