"""Sweeps of Weights & Biases as a backend: the service chooses the hyperparameters, an agent runs the trials."""

from __future__ import annotations

import copy
import logging
from typing import Any

from paceline.core.optional import LateModule
from paceline.core.outputs import BestRun
from paceline.search.trials import Interrupted, Objective, Pruned, SearchError, Trials, check_trials, is_better

logger = logging.getLogger(__name__)

wandb: Any = LateModule("wandb")

OPTIONS = ("sweep_id", "project", "entity", "name", "metric")
OBJECTIVE = "objective"  # the name under which the result of `compute_objective` is logged
DEFAULT_METRIC = "eval/loss"


def run(trials: Trials, n_trials: int | None, directions: list[str], options: dict[str, Any]) -> BestRun:
    """Searches with a sweep of the service wandb.ai, which must be reachable.

    Args:
        trials: runs the trials, one after the other.
        n_trials: runs of the agent.
        directions: one.
        options: `sweep_id` continues a sweep; `project`, `entity` and `name` of a new one; `metric` that the sweep
            optimizes, by default that of the search space, else "eval/loss", which is only minimized; "objective" is
            the result of `compute_objective`.

    Raises:
        RuntimeError: no trial was completed.
        SearchError: an option is invalid.
    """
    check_trials(n_trials, has_other_end=False)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise SearchError(f"backend='wandb' has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}.")
    if trials.is_distributed:
        raise SearchError("backend='wandb' runs on one process; use backend='optuna' for several.")
    if len(directions) > 1:
        raise SearchError(f"direction={directions}: a sweep has one objective; use backend='optuna'.")
    sweep = Sweep(trials, directions[0])
    sweep_id = options.get("sweep_id")
    place = {name: options.get(name) for name in ("project", "entity")}
    if not sweep_id:
        sweep_id = wandb.sweep(sweep_config(trials.space(), directions[0], options), **place)
    logger.info("wandb sweep: %s", sweep_id)
    with trials.reporting_to_wandb():
        wandb.agent(sweep_id, function=sweep.train, count=n_trials, **place)
    return sweep.result(str(sweep_id))


def sweep_config(space: dict[str, Any], direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a sweep: the search space with the metric, its direction and the name.

    Raises:
        SearchError: the space is no configuration of a sweep, or has another metric than the search.
    """
    if not isinstance(space.get("parameters"), dict):
        raise SearchError("hp_space: a sweep of wandb is a dict with 'method' and 'parameters'.")
    config = copy.deepcopy(space)
    config["metric"] = metric_of(config.get("metric") or {}, direction, options.get("metric"))
    if options.get("name"):
        config["name"] = options["name"]
    return config


def metric_of(given: dict[str, Any], direction: str, name: str | None) -> dict[str, Any]:
    """Returns the metric that a sweep optimizes.

    Args:
        given: `metric` of the search space.
        direction: the direction of the objective.
        name: the option `metric`, which goes before the name in the search space.

    Raises:
        SearchError: the sweep would optimize something else than the search.
    """
    own, goal = given.get("name"), given.get("goal", direction)
    if name is None and own != OBJECTIVE and goal != direction:
        raise SearchError(
            f"hp_space: the goal of its metric is {goal!r}, and direction={direction!r}: make them the same."
        )
    if name is None and own is None and direction != "minimize":
        raise SearchError(
            f"direction={direction!r}: without a metric the sweep would {direction} {DEFAULT_METRIC!r}. Give its name, "
            f"as metric='eval/accuracy', or metric={OBJECTIVE!r} for the result of compute_objective."
        )
    return {**given, "name": name or own or DEFAULT_METRIC, "goal": direction}


class Sweep:
    """The trials of a sweep's agent.

    Args:
        trials: runs them.
        direction: the direction of the objective.
    """

    def __init__(self, trials: Trials, direction: str) -> None:
        self.trials, self.direction = trials, direction
        self.best: BestRun | None = None
        self.errors: list[BaseException] = []
        self.fatal: BaseException | None = None

    def train(self) -> Objective | None:
        """Runs one trial with the hyperparameters that the service has chosen; its error is recorded."""
        if self.fatal is not None:  # the agent survives errors, and would continue
            return None
        run = wandb.run if wandb.run is not None else wandb.init()
        params = dict(wandb.config)
        try:
            value = self.trials.run(params, str(run.id))
        except (SearchError, Interrupted, KeyboardInterrupt) as error:
            self.fatal = error
            raise
        except Exception as error:
            if not isinstance(error, Pruned):
                self.errors.append(error)
            raise
        if wandb.run is not None:
            wandb.log({OBJECTIVE: value})
        number = value if isinstance(value, float) else value[0]
        best = None if self.best is None else self.best.objective
        if is_better(number, best if isinstance(best, float) else None, self.direction):
            self.best = BestRun(str(run.id), number, params)
        return value

    def result(self, sweep_id: str) -> BestRun:
        """Returns the best trial.

        Raises:
            RuntimeError: no trial was completed.
            SearchError, Interrupted: the search was set up wrong, or a signal stopped it.
        """
        if self.fatal is not None:
            raise self.fatal
        if self.best is None:
            last = f"; the last error was {self.errors[-1]!r}" if self.errors else ""
            raise RuntimeError(f"No trial of the sweep {sweep_id} was completed{last}.")
        return self.best._replace(run_summary=sweep_id)
