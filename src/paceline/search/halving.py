"""Successive halving (arXiv:1502.07943): all trials train a little, and the best of them continue.

A survivor resumes its own checkpoint, so no optimizer step is done twice. Its schedule is that of the full length from
the first step, so it ends like a run that was never stopped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.optional import LateModule
from paceline.core.outputs import BestRun
from paceline.search.trials import SearchError

if TYPE_CHECKING:
    import optuna

    from paceline.search.optuna_study import OptunaSearch
else:
    optuna = LateModule("optuna")

logger = logging.getLogger(__name__)

RUNGS = "rungs"  # attribute of a trial: [optimizer step, objective] of each rung that it has reached


@dataclass(frozen=True)
class HalvingSummary:
    """The optimizer steps of a search by successive halving.

    Attributes:
        num_updates: optimizer steps of all trials.
        num_saved: optimizer steps that training the survivors anew at each rung would have taken in addition.
        num_full: optimizer steps of all trials, had each been trained as long as the longest.
        survivors: the number of trials at each rung.
    """

    num_updates: int
    num_saved: int
    num_full: int
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class Ladder:
    """The rungs of a search.

    Attributes:
        min_steps: optimizer steps of the first rung.
        reduction_factor: one in this many trials continues, and trains this many times as long.
        num_rungs: rungs, the last one included, where trials are trained to their end.
    """

    min_steps: int
    reduction_factor: int
    num_rungs: int

    def until(self, rung: int) -> int | None:
        """Returns the last optimizer step of a rung; None: the end of training."""
        return self.min_steps * self.reduction_factor**rung if rung < self.num_rungs - 1 else None


def make_ladder(options: Mapping[str, Any], n_trials: int | None) -> Ladder:
    """Returns the rungs for a number of trials.

    Args:
        options: `min_steps`, and `reduction_factor` (3 by default).
        n_trials: trials of the first rung.

    Raises:
        SearchError: an option is unknown, missing or invalid.
    """
    known = ("min_steps", "reduction_factor")
    unknown = sorted(set(options) - set(known)) if isinstance(options, Mapping) else [options]
    if unknown:
        raise SearchError(f"halving={options!r}: give a dict with {' and '.join(known)}.")
    values = {"reduction_factor": 3, **options}
    for name, least in (("min_steps", 1), ("reduction_factor", 2)):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SearchError(f"halving: {name}={value!r}; give a whole number, {least} or more.")
    if n_trials is None:
        raise SearchError("halving: n_trials=None; give the number of trials of the first rung.")
    num_rungs, left = 1, n_trials
    while left > 1:
        num_rungs, left = num_rungs + 1, math.ceil(left / values["reduction_factor"])
    return Ladder(values["min_steps"], values["reduction_factor"], num_rungs)


def run(search: OptunaSearch, options: Mapping[str, Any]) -> BestRun:
    """Runs the trials rung by rung; a search that died continues at its rung.

    Raises:
        RuntimeError: no trial was completed.
        SearchError: an option is invalid.
    """
    ladder = make_ladder(options, search.n_trials)
    if not search.is_single:
        raise SearchError("halving compares trials by one objective; direction names several.")
    if search.optimize:
        raise SearchError(f"halving: {', '.join(sorted(search.optimize))} cannot be combined with it; leave it out.")
    missing = (search.n_trials or 0) - search.num_counted()
    active = {trial.number: trial for trial in (search.study.ask() for _ in range(max(missing, 0)))}
    survivors: list[int] = []
    for rung in range(ladder.num_rungs):
        for number in [number for number, trial in active.items() if len(rungs_of(trial)) <= rung]:
            if not climb(search, active[number], rung, ladder):
                del active[number]
        survivors.append(sum(len(rungs_of(trial)) > rung for trial in search.study.get_trials(deepcopy=False)))
        if rung < ladder.num_rungs - 1:
            drop_worst(search, active, rung, ladder.reduction_factor)
    for trial in active.values():
        search.tell(trial, rungs_of(trial)[-1][1])
    best = search.best()
    assert isinstance(best, BestRun)
    return best._replace(run_summary=summary_of(search.study, tuple(survivors)))


def rungs_of(trial: Any) -> list[list[float]]:
    """Returns [optimizer step, objective] of each rung that a trial has reached."""
    return list(trial.user_attrs.get(RUNGS, ()))


def climb(search: OptunaSearch, trial: optuna.Trial, rung: int, ladder: Ladder) -> bool:
    """Trains a trial to a rung. Returns False if it failed or was pruned."""
    from_error = LateModule("paceline.search.optuna_study")
    before, wanted = rungs_of(trial), ladder.until(rung - 1)
    if before and wanted is not None and before[-1][0] < wanted:  # its training ended below the last rung
        trial.set_user_attr(RUNGS, [*before, before[-1]])
        return True
    try:
        value = search.train(trial, until=ladder.until(rung))
        if not isinstance(value, float) or math.isnan(value):
            raise from_error.TrialFailed("the objective is NaN")
    except optuna.TrialPruned:  # by a function of the user
        search.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return False
    except from_error.TrialFailed as error:
        logger.warning("Trial %d failed at rung %d: %s", trial.number, rung, error)
        trial.set_user_attr(from_error.ERROR, str(error))
        search.tell(trial, state=optuna.trial.TrialState.FAIL)
        return False
    step = search.trials.num_steps
    trial.set_user_attr(RUNGS, [*before, [step, value]])
    if not before or before[-1][0] < step:
        trial.report(value, step)
    return True


def drop_worst(search: OptunaSearch, active: dict[int, optuna.Trial], rung: int, factor: int) -> None:
    """Ends the trials of a rung that are not among the best; `active` keeps those that continue."""
    sign = 1 if search.directions == ["minimize"] else -1
    reached = [trial for trial in search.study.get_trials(deepcopy=False) if len(rungs_of(trial)) > rung]
    reached.sort(key=lambda trial: (sign * rungs_of(trial)[rung][1], trial.number))
    going_on = {trial.number for trial in reached[: math.ceil(len(reached) / factor)]}
    for number in [number for number in active if number not in going_on]:
        search.tell(active.pop(number), state=optuna.trial.TrialState.PRUNED)


def summary_of(study: optuna.Study, survivors: tuple[int, ...]) -> HalvingSummary:
    """Returns the optimizer steps of a search, and logs them."""
    steps = [[int(step) for step, _ in rungs_of(trial)] for trial in study.get_trials(deepcopy=False)]
    reached = [trial for trial in steps if trial]
    longest = max((trial[-1] for trial in reached), default=0)
    summary = HalvingSummary(
        num_updates=sum(trial[-1] for trial in reached),
        num_saved=sum(sum(trial[:-1]) for trial in reached),
        num_full=longest * len(reached),
        survivors=survivors,
    )
    logger.warning(
        "Successive halving: %d optimizer steps; training the survivors anew would have taken %d more, and all trials "
        "to the end %d.",
        *(summary.num_updates, summary.num_saved, summary.num_full),
    )
    return summary
