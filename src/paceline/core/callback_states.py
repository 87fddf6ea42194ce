"""The state of callbacks in checkpoints: by name, restored in place.

A callback is stateful if it has `state_dict` and `load_state_dict`, or `state` and `from_state` (transformers'
`ExportableState`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.core.events import CallbackHandler
from paceline.core.state import TrainerControl

logger = logging.getLogger(__name__)


def callback_states(handler: CallbackHandler, control: TrainerControl | None = None) -> dict[str, dict[str, Any]]:
    """Returns the state of every stateful callback by name; with `control`, its flags under its class name.

    The name is the callback's `state_key`, else its class name, with "#2", "#3" ... if it repeats.
    """
    states = {name: _state_of(callback) for name, callback in _stateful(handler).items()}
    if control is not None:
        states[type(control).__name__] = control.state()
    return states


def restore_callback_states(handler: CallbackHandler, states: Mapping[str, Any], with_arguments: bool = False) -> None:
    """Restores the callbacks' states by name, in place.

    A callback without a saved state starts afresh; a saved state without a callback is ignored with a warning. The
    lists of states that transformers writes are read too.

    Args:
        handler: holds the callbacks.
        states: the result of `callback_states`, or `TrainerState.stateful_callbacks`.
        with_arguments: True restores an `ExportableState` that also has `load_state_dict` by `from_state`,
            constructor arguments included (`restore_callback_states_from_checkpoint`).

    Raises:
        ValueError: a callback could not load its state; the message names the callback.
    """
    saved = dict(states)
    for key, value in states.items():
        if isinstance(value, list):
            del saved[key]
            saved.update({_numbered(key, number): item for number, item in enumerate(value, start=1)})
    saved.pop("TrainerControl", None)  # belongs to the loop
    for name, callback in _stateful(handler).items():
        if name not in saved:
            logger.info("The checkpoint has no state for callback %s: it starts afresh.", name)
            continue
        try:
            _restore(callback, name, saved.pop(name), with_arguments)
        except Exception as error:
            raise ValueError(
                f"Callback {name} could not load its state from the checkpoint: {type(error).__name__}: {error}"
            ) from error
    if saved:
        names = ", ".join(sorted(saved))
        logger.warning("Checkpoint included callbacks not included in current configuration, left out: %s.", names)


def _stateful(handler: CallbackHandler) -> dict[str, Any]:
    named: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for callback in handler.callbacks:
        if not (_is_exportable(callback) or _has_state_dict(callback)):
            continue
        name = getattr(callback, "state_key", None) or type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        named[_numbered(name, counts[name])] = callback
    return named


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"


def _has_state_dict(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _is_exportable(callback: Any) -> bool:
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


def _state_of(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = callback.state_dict() if _has_state_dict(callback) else callback.state()
    return state


def _restore(callback: Any, name: str, state: Mapping[str, Any], with_arguments: bool) -> None:
    if _has_state_dict(callback) and not (with_arguments and _is_exportable(callback)):
        callback.load_state_dict(state)
        return
    present = callback.state().get("args", {})
    for argument, value in state.get("args", {}).items():
        if argument in present and present[argument] != value:
            logger.info("Callback %s: %s=%r, as in the checkpoint.", name, argument, value)
    # In place, so that other references to the callback stay valid.
    vars(callback).update(vars(type(callback).from_state(state)))
