"""The registry of search backends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from paceline.args.choices import HPSearchBackend
from paceline.args.errors import UnsupportedOption, did_you_mean
from paceline.core.optional import is_installed, load, require
from paceline.core.outputs import BestRun
from paceline.search import spaces
from paceline.search.trials import Trials

logger = logging.getLogger(__name__)

Runner = Callable[[Trials, int | None, list[str], dict[str, Any]], BestRun | list[BestRun]]


@dataclass(frozen=True)
class Backend:
    """A backend of `hyperparameter_search`.

    Attributes:
        name: its name in `backend`.
        module: the module of its package.
        extra: the extra that installs the package.
        runner: the location of `(trials, n_trials, directions, options) -> best run`.
        default_space: the default `hp_space`.
        is_space_shared: True if `hp_space(None)` describes all trials, False if it is called with each trial.
    """

    name: HPSearchBackend
    module: str
    extra: str
    runner: str
    default_space: Callable[[Any], dict[str, Any]]
    is_space_shared: bool = True

    def load(self) -> Runner:
        """Returns the backend's function.

        Raises:
            ImportError: its package is not installed; the message names the extra.
        """
        require(self.module, self.extra)
        return cast(Runner, load(self.runner))


BACKENDS: dict[str, Backend] = {
    "optuna": Backend(
        HPSearchBackend.OPTUNA,
        "optuna",
        "optuna",
        "paceline.search.optuna_study:run",
        spaces.default_hp_space_optuna,
        is_space_shared=False,
    ),
    "ray": Backend(HPSearchBackend.RAY, "ray.tune", "ray", "paceline.search.ray_tune:run", spaces.default_hp_space_ray),
    "wandb": Backend(
        HPSearchBackend.WANDB, "wandb", "wandb", "paceline.search.wandb_sweep:run", spaces.default_hp_space_wandb
    ),
}


def choose(name: str | None) -> Backend:
    """Returns the backend of this name; None: the first that is installed, in the order optuna, ray, wandb.

    Raises:
        UnsupportedOption: sigopt, whose service has ended.
        ValueError: there is no such backend.
        RuntimeError: none is named, and none is installed.
    """
    if name is None:
        return first_installed()
    key = str(getattr(name, "value", name))
    if key == "sigopt":
        raise UnsupportedOption("backend='sigopt': the service SigOpt has ended; use backend='optuna'.")
    if key not in BACKENDS:
        names = [each.value for each in HPSearchBackend]
        known = ", ".join(map(repr, names))
        raise ValueError(f"backend={name!r} is not valid: choose one of {known}{did_you_mean(key, names)}")
    return BACKENDS[key]


def first_installed() -> Backend:
    """Returns the first backend whose package is installed.

    Raises:
        RuntimeError: there is none.
    """
    found = [backend for backend in BACKENDS.values() if is_installed(backend.module)]
    if not found:
        remedies = "".join(f'\n - {key}: pip install "paceline[{entry.extra}]"' for key, entry in BACKENDS.items())
        raise RuntimeError(f"No hyperparameter search backend available. Install one:{remedies}")
    if len(found) > 1:
        logger.info("%d hyperparameter search backends available: using %s.", len(found), found[0].name)
    return found[0]
