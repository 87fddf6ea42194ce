"""What reporters share: they speak for the whole run, and never stop it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core import record
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerState


class Reporter(TrainerCallback):
    """A callback that tells somebody else how the run goes.

    An exception in it is logged once, and training goes on. `requires` names the packages any one of which it needs.
    """

    may_fail = True
    requires: tuple[str, ...] = ()


def log_row(logs: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    """One row of a log file: the step and epoch first, then what was logged."""
    return {"step": state.global_step, "epoch": state.epoch, **logs}


def set_aside(path: Path) -> Path | None:
    """Rename the log of an earlier run, `log.csv` to `log.1.csv` or the next free number, so that it is not lost."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(free)


def grouped(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The names that trackers group by: `eval_x` becomes `eval/x`, `test_x` `test/x`, the rest `train/x`."""
    names = {}
    for name, value in logs.items():
        split, _, rest = name.partition("_")
        names[f"{split}/{rest}" if split in ("eval", "test") and rest else f"train/{name}"] = value
    return names


def settings_of(args: Any, model: Any) -> dict[str, Any]:
    """What a tracker is told of a run: the model's configuration under the arguments, in plain types.

    Tokens and passwords are masked, by the names of the options and by their form.
    """
    config = getattr(model, "config", None)
    settings: dict[str, Any] = {}
    adapters = getattr(model, "peft_config", None)
    if adapters:
        settings["peft_config"] = {name: as_mapping(adapter) for name, adapter in as_mapping(adapters).items()}
    settings.update(as_mapping(config))
    settings.update(args.to_dict())
    plain: dict[str, Any] = record.jsonable(settings)
    return plain


def as_mapping(config: Any) -> dict[str, Any]:
    """A configuration as a dict; an empty one where there is none."""
    described = config.to_dict() if hasattr(config, "to_dict") else config
    return dict(described) if isinstance(described, Mapping) else {}


def num_parameters(model: Any) -> int | None:
    """Number of elements of all parameters; None of something that has none."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else None


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on", "y")
