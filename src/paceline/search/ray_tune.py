"""Ray Tune as a backend: each trial is a process of Ray, which gets a copy of the Trainer."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.optional import LateModule
from paceline.core.outputs import BestRun
from paceline.search.trials import Objective, SearchError, Trials, check_trials

logger = logging.getLogger(__name__)

ray: Any = LateModule("ray")
tune: Any = LateModule("ray.tune")

METRIC = "objective"
SCOPES = ("all", "last", "avg", "last-5-avg", "last-10-avg")
# schedulers that decide by intermediate results
BY_RESULTS = {
    "AsyncHyperBandScheduler",
    "HyperBandForBOHB",
    "HyperBandScheduler",
    "MedianStoppingRule",
    "PB2",
    "PopulationBasedTraining",
}
# options that a trial keeps when it resumes another one's checkpoint: its optimizer and its schedule hold them
FIXED = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "optim",
    "optim_args",
    "per_device_train_batch_size",
    "warmup_ratio",
    "warmup_steps",
}


def run(trials: Trials, n_trials: int | None, directions: list[str], options: dict[str, Any]) -> BestRun:
    """Searches with `ray.tune.run`.

    Args:
        trials: runs the trials; it is copied to each of them.
        n_trials: `num_samples` of Tune.
        directions: one.
        options: options of `ray.tune.run`.

    Environment:
        RAY_SCOPE: the results of a trial by which the best one is chosen, a `scope` of `ExperimentAnalysis`; "last".

    Raises:
        RuntimeError: no trial has given an objective.
        SearchError: an option is invalid.
    """
    check_trials(n_trials, has_other_end=False)
    scope = os.environ.get("RAY_SCOPE", "last")
    check(trials, directions, options, scope)
    mode = directions[0][:3]
    scheduler = options.get("scheduler")
    if getattr(scheduler, "_metric", None) is None and "metric" not in options:
        options.update(metric=METRIC, mode=mode)
    options.setdefault("resources_per_trial", {"cpu": 1, **({"gpu": 1} if trials.uses_cuda else {})})
    options.setdefault("storage_path", str(trials.folder / "ray"))
    options.setdefault("raise_on_failed_trial", False)
    with trials.portable():
        analysis = tune.run(
            tune.with_parameters(train, trials=trials), config=trials.space(), num_samples=n_trials, **options
        )
    best = analysis.get_best_trial(metric=METRIC, mode=mode, scope=scope)
    if best is None:
        errors = [
            f"{one.trial_id}: {Path(one.error_file).read_text()[-500:]}" for one in analysis.trials if one.error_file
        ]
        raise RuntimeError(
            "No trial was completed" + (f"; the last error was that of trial {errors[-1]}" if errors else ".")
        )
    return BestRun(best.trial_id, best.last_result[METRIC], best.config, analysis)


def check(trials: Trials, directions: list[str], options: Mapping[str, Any], scope: str) -> None:
    """Raises SearchError if an option cannot be honoured."""
    if trials.is_distributed:
        raise SearchError("backend='ray': Ray starts the processes itself; call it from one process.")
    if len(directions) > 1:
        raise SearchError(f"direction={directions}: Ray Tune takes one objective; use backend='optuna'.")
    if scope not in SCOPES:
        raise SearchError(f"RAY_SCOPE={scope!r} is none of {', '.join(SCOPES)}.")
    mutated = sorted(set(getattr(options.get("scheduler"), "_hyperparam_mutations", None) or ()) & FIXED)
    if mutated:
        raise SearchError(
            f"hyperparam_mutations names {mutated[0]!r}: the optimizer and the schedule of a checkpoint keep it. Of "
            "their options, learning_rate and weight_decay can be changed during training."
        )
    kinds = {kind.__name__ for kind in type(options.get("scheduler")).__mro__}
    if kinds & BY_RESULTS and not trials.evaluates:
        raise SearchError(
            f"scheduler={type(options['scheduler']).__name__} decides by evaluations during training, and there are "
            "none: set eval_strategy='steps' or 'epoch'."
        )


def train(config: dict[str, Any], trials: Trials) -> None:
    """Runs one trial in a process of Ray, from Tune's checkpoint if it gives one."""
    reported: list[int] = []

    def report(value: Objective, step: int) -> bool:
        reported.append(step)
        with saved(trials) as checkpoint:
            tune.report({METRIC: value, "step": step}, checkpoint=checkpoint)
        return False

    given = tune.get_checkpoint()
    run_id = str(tune.get_context().get_trial_id())
    if given is None:
        value = trials.run(config, run_id, report=report)
    else:
        with given.as_directory() as folder:
            value = trials.run(config, run_id, report=report, resume=next(Path(folder).glob("checkpoint-*")))
    if not reported and given is None:
        tune.report({METRIC: value})


@contextmanager
def saved(trials: Trials) -> Iterator[Any]:
    """Returns a context with Tune's checkpoint of a trial, if one is due now; else with None."""
    if not trials.is_save_due:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        trials.save(Path(folder))
        yield tune.Checkpoint.from_directory(folder)
