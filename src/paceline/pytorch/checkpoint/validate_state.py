"""Checks that a state fits its target object before it is loaded.

torch's optimizers and schedules accept any state dict, and fail one optimizer step later, without naming the file.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.pytorch.checkpoint.tensors import CheckpointError

# optimizers of torch.optim whose per-parameter state has the parameter's shape, except the number of steps
_ELEMENTWISE = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


@contextmanager
def wrap_load_error(path: Path) -> Iterator[None]:
    """Converts errors that damaged content causes in the block to a CheckpointError that names the file."""
    try:
        yield
    except OSError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if path.name in str(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} is damaged, or does not fit this run: {kind}{error}") from error


def find_misfit(target: Any, state: Mapping[str, Any]) -> str | None:
    """Returns a description of the mismatch between `state` and `target`; None if none is found."""
    if isinstance(target, torch.optim.Optimizer):
        return _misfit_of_optimizer(target, state)
    return next((text for text in _differences(target.state_dict(), state, "")), None)


def _misfit_of_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    groups, kept = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(kept, dict):
        return "it has no param_groups or no state"
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        if not isinstance(saved, dict) or not isinstance(saved.get("params"), list):
            return f"group {number} has no params"
        plain = {name: value for name, value in own.items() if name != "params"}
        for text in _differences(plain, saved, f"group {number}: "):
            return text
        for name, value in plain.items():
            # only numbers and tuples are required: new torch releases add switches, which have defaults
            is_needed = isinstance(value, (int, float, tuple)) and not isinstance(value, bool) and name != "initial_lr"
            if is_needed and name not in saved:
                return f"group {number} has no {name}"
    kind = getattr(optimizer, "inner_class", type(optimizer))
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
    return _misfit_of_elements(optimizer, groups, kept) if is_known else None


def _misfit_of_elements(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    kept: Mapping[Any, Any],
) -> str | None:
    names: set[str] | None = None
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        for parameter, index in zip(own["params"], saved["params"], strict=False):
            if isinstance(index, (list, dict, Tensor)) or index not in kept:
                continue  # a parameter that has had no gradient yet has no state
            entry = kept[index]
            if not isinstance(entry, dict):
                return f"the state of parameter {index} is a {type(entry).__name__}"
            names = set(entry) if names is None else names
            if set(entry) != names:
                return f"the state of parameter {index} has {sorted(map(str, entry))}, another one {sorted(names)}"
            for name, value in entry.items():
                if not _can_be_kept(name, value, parameter):
                    return f"{name} of parameter {index} is {_describe(value)}; its shape is {tuple(parameter.shape)}"
    return None


def _can_be_kept(name: str, value: object, parameter: Tensor) -> bool:
    if value is None or (isinstance(value, numbers.Real) and name in ("step", "mu_product", "eta")):
        return True
    if not isinstance(value, Tensor):
        return False
    if value.is_floating_point() and value.ndim == 0:
        return True
    return value.shape == parameter.shape and value.dtype.is_floating_point == parameter.dtype.is_floating_point


def _differences(own: Any, saved: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields descriptions of values of a wrong type. Names that only one side has are left to the target."""
    for name, value in own.items():
        if name in saved and not _is_alike(value, saved[name]):
            yield f"{where}{name} is {_describe(saved[name])} instead of {_describe(value)}"


def _is_alike(own: Any, saved: Any) -> bool:
    if own is None or saved is None:
        return not isinstance(saved, Tensor)  # a tensor in place of None would fail in `if value`
    if isinstance(own, bool):
        return isinstance(saved, bool)
    if isinstance(own, numbers.Real) or (isinstance(own, Tensor) and own.ndim == 0):
        is_scalar = isinstance(saved, Tensor) and saved.numel() == 1
        return is_scalar or (isinstance(saved, numbers.Real) and not isinstance(saved, bool))
    if isinstance(own, (list, tuple)):
        is_long_enough = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        return is_long_enough and all(map(_is_alike, own, saved))
    if isinstance(own, Mapping):
        return isinstance(saved, Mapping)
    return True


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"{str(value)[:40]!r}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
