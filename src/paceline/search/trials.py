"""The trials of a search: the functions that backends call, the checks of what users return, and the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

DIRECTIONS = ("minimize", "maximize")
# options that need not agree between the starts of a search
FREE = {"output_dir", "run_name", "logging_dir", "report_to", "disable_tqdm", "resume_from_checkpoint", "project"}

Objective = float | list[float]
Report = Callable[[Objective, int], bool]  # (objective, optimizer step) -> True if the trial is to end here


class SearchError(ValueError):
    """The search itself is set up wrong, so that every trial would fail: it ends at once."""


class Pruned(Exception):
    """The backend ended a trial before its last step."""


class Interrupted(BaseException):
    """A signal stopped the search in the middle of a trial, which the next start continues.

    It is no Exception, so that no backend records the trial as failed.
    """


class Trials(Protocol):
    """Runs the trials of one Trainer.

    Attributes:
        folder: the output folder of the search.
        is_first: True on rank 0, which queries the backend.
        is_distributed: True if several processes train each trial.
        evaluates: True if trials are evaluated during training, so that they can be pruned.
        uses_cuda: True if a trial trains on a CUDA device.
        num_steps: optimizer steps of the trial that was run last.
        is_save_due: True if the run saves a checkpoint after the evaluation in progress.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def is_distributed(self) -> bool: ...

    @property
    def evaluates(self) -> bool: ...

    @property
    def uses_cuda(self) -> bool: ...

    @property
    def is_save_due(self) -> bool: ...

    @property
    def num_steps(self) -> int: ...

    def share(self, value: Any) -> Any:
        """Returns the value of rank 0 on all ranks."""

    def settings(self) -> dict[str, Any]:
        """Returns the options that all trials share."""

    def space(self) -> dict[str, Any]:
        """Returns `hp_space(None)`, the space of all trials.

        Raises:
            SearchError: it is no dict.
        """

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of the trial in progress to `checkpoint-STEP` in a folder, and waits for it."""

    def portable(self) -> AbstractContextManager[None]:
        """Returns a context in which the trials can be copied to other processes."""

    def reporting_to_wandb(self) -> AbstractContextManager[None]:
        """Returns a context in which the Trainer reports to Weights & Biases."""

    def run(
        self,
        trial: Any,
        run_id: str,
        *,
        report: Report | None = None,
        is_continued: bool = False,
        resume: Path | None = None,
        until: int | None = None,
        claim: Callable[[str], None] | None = None,
    ) -> Objective:
        """Trains one trial and returns its objective.

        Args:
            trial: the backend's trial, or a dict of hyperparameters.
            run_id: identifies the trial; its folder is `run-{run_id}` unless `hp_name` names it.
            report: called with each evaluation's objective.
            is_continued: resume from the newest checkpoint of the trial, if there is one.
            resume: resume from this checkpoint.
            until: stop after this optimizer step, with an evaluation and a checkpoint; None: train to the end.
            claim: called with the name of the trial's folder before training.

        Raises:
            Pruned: `report` ended the trial.
            SearchError: the search space, the objective or `hp_name` is invalid.
            Interrupted: a signal stopped the run.
        """


def check_directions(direction: str | Sequence[str]) -> list[str]:
    """Returns the directions as a list.

    Raises:
        SearchError: one of them is not known.
    """
    directions: list[Any] = list(direction) if isinstance(direction, list | tuple) else [direction]
    for name in directions:
        if name not in DIRECTIONS:
            raise SearchError(f"hyperparameter_search: direction={name!r} is neither 'minimize' nor 'maximize'.")
    if not directions:
        raise SearchError("hyperparameter_search: direction=[] has no direction: give one for each objective.")
    return directions


def check_timeout(timeout: object) -> None:
    """Raises SearchError if the seconds of a search are given and not positive."""
    if timeout is not None and not (is_number(timeout) and float(timeout) > 0):  # type: ignore[arg-type]
        raise SearchError(f"hyperparameter_search: timeout={timeout!r}: give a number of seconds above 0.")


def check_trials(n_trials: int | None, has_other_end: bool) -> None:
    """Checks the number of trials.

    Raises:
        SearchError: it is not positive; or None, and nothing else ends the search.
    """
    if n_trials is None and has_other_end:
        return
    if isinstance(n_trials, bool) or not isinstance(n_trials, int) or n_trials < 1:
        raise SearchError(f"hyperparameter_search: n_trials={n_trials!r}: give a whole number of trials, 1 or more.")


def check_space(params: object) -> dict[str, Any]:
    """Returns the result of `hp_space` for a trial.

    Raises:
        SearchError: it is not a dict with names as keys.
    """
    if not isinstance(params, Mapping):
        raise SearchError(
            f"hp_space returned {type(params).__name__}; it must return a dict of hyperparameters, such as "
            '{"learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True)}.'
        )
    wrong = [name for name in params if not isinstance(name, str)]
    if wrong:
        raise SearchError(f"hp_space returned the key {wrong[0]!r}: keys are names of hyperparameters.")
    return dict(params)


def check_objective(value: object, num_objectives: int) -> Objective:
    """Returns the result of `compute_objective` as one number, or as one for each direction.

    Raises:
        SearchError: it is not that.
    """
    if num_objectives == 1 and is_number(value):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, list | tuple) and all(is_number(item) for item in value):
        if num_objectives > 1 and len(value) == num_objectives:
            return [float(item) for item in value]
        hint = f"give direction a list of {len(value)}" if len(value) != 1 else "return the number itself"
        raise SearchError(
            f"compute_objective returned {len(value)} number(s), and direction names {num_objectives}: {hint}."
        )
    wanted = "a number" if num_objectives == 1 else f"a list of {num_objectives} numbers"
    raise SearchError(f"compute_objective returned {value!r}; it must return {wanted}.")


def is_number(value: object) -> bool:
    """True for a real number, also in an array or tensor without dimensions; a bool is none."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool)


def shared_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the options of a Trainer that have to agree between the starts of a search."""
    return {name: value for name, value in options.items() if name not in FREE}


def params_of(trial: object) -> dict[str, Any]:
    """Returns the hyperparameters of a backend's trial: its `params`, or the items of a dict."""
    params = getattr(trial, "params", trial)
    return dict(params) if isinstance(params, Mapping) else {}


def is_better(value: float, best: float | None, direction: str) -> bool:
    """True if an objective is better than the best one so far; NaN is never better."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if direction == "minimize" else value > best
