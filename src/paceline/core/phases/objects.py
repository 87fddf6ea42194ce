"""The objects of training phases: those that strings name, and the callbacks of the phase in progress."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.args.phases import Phase
from paceline.core.phases.progress import PhaseProgress
from paceline.core.session import Session


def loaded(phase: Phase) -> Phase:
    """Returns a phase with the objects that it names as `package.module:name`."""
    found = {name: load(phase, name, getattr(phase, name)) for name in ("train_dataset", "data_collator", "loss")}
    callbacks = [load(phase, "callbacks", callback) for callback in phase.callbacks]
    for callback in callbacks:
        phase.check_callback(callback)
    return replace(phase, **found, callbacks=callbacks)


def load(phase: Phase, setting: str, value: object) -> Any:
    """Returns the object that a string names; a class, and a function for a dataset, is called without arguments.

    Raises:
        ValueError: there is no such module or name.
    """
    if not isinstance(value, str):
        return value
    module, _, path = value.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"phases[{phase.name!r}].{setting}: {value!r} cannot be imported: {error}") from error
    is_data = hasattr(found, "__getitem__") or hasattr(found, "__iter__")
    is_factory = isinstance(found, type) or (setting == "train_dataset" and callable(found) and not is_data)
    return found() if is_factory else found


class PhaseCallbacks:
    """Adds the callbacks of the phase in progress to those of a session.

    Args:
        of: the session.
        phases: the phases.
        progress: the callbacks are called before it.
        adapt: converts callbacks of another library.
    """

    def __init__(
        self,
        of: Session[Any, Any],
        phases: Sequence[Phase],
        progress: PhaseProgress,
        adapt: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self._of, self._phases = of, phases
        self._progress, self._adapt = progress, adapt
        self._active: list[Any] = []

    def add(self, index: int) -> None:
        """Adds the callbacks of a phase."""
        callbacks = self._of.callback_handler.callbacks
        self._active = self._adapt(
            [each() if isinstance(each, type) else each for each in self._phases[index].callbacks]
        )
        place = next(number for number, each in enumerate(callbacks) if each is self._progress)
        for offset, callback in enumerate(self._active):
            callbacks.insert(place + offset, callback)

    def begin(self, index: int) -> None:
        """Adds the callbacks of a phase that begins within a run, which get `on_train_begin`."""
        self.add(index)
        self._fire("on_train_begin")

    def end(self) -> None:
        """Removes the callbacks of the phase in progress, which get `on_train_end`."""
        self._fire("on_train_end")
        self.remove()

    def remove(self) -> None:
        """Removes the callbacks of the phase in progress."""
        for callback in self._active:
            self._of.callback_handler.remove_callback(callback)
        self._active = []

    def _fire(self, event: str) -> None:
        """Calls an event of these callbacks alone, as the handler would."""
        of = self._of
        for callback in self._active:
            method = getattr(callback, event, None)
            if method is not None:
                method(of.args, of.state, of.control, **of.callback_handler.kwargs)
