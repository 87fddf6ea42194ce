"""What reporters share: they speak for the whole run, and never stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
