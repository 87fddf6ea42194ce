"""Hyperparameter search whose trials are trained at once, as members of a `MembersTrainer`."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.args.members import Member
from paceline.args.places import output_folder
from paceline.callbacks.defaults import with_defaults
from paceline.core.events import TrainerCallback
from paceline.core.methods import is_ours
from paceline.core.metrics import default_compute_objective
from paceline.core.optional import load
from paceline.core.outputs import BestRun
from paceline.search.trials import (
    SearchError,
    check_directions,
    check_objective,
    check_space,
    check_trials,
    is_better,
)

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

logger = logging.getLogger(__name__)

# arguments of backend="optuna" that need a study
OF_STUDY = {"halving", "load_if_exists", "pruner", "sampler", "storage", "study_name", "timeout"}
SEARCHABLE = tuple(field.name for field in fields(Member) if field.name != "name")


class RandomTrial:
    """Draws hyperparameters at random, with the methods of a trial of optuna, their arguments and distributions.

    A hyperparameter that is requested again has the value that was drawn first.

    Args:
        number: number of the trial.
        seed: the seed of the search.

    Attributes:
        params: the drawn values by name.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self._random = random.Random(f"{seed}/{number}")

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Returns a number between two bounds; with `log`, uniform in its logarithm; with `step`, `low + k * step`."""
        check_range(name, low, high, step, log)
        drawn = self._random.random()
        if step is not None:
            value = low + math.floor(drawn * (math.floor((high - low) / step + 1e-9) + 1)) * step
        elif log:
            value = math.exp(math.log(low) + drawn * math.log(high / low))
        else:
            value = low + drawn * (high - low)
        drawn_value: float = self.params.setdefault(name, float(min(value, high)))
        return drawn_value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Returns a whole number between two bounds, which are included; see `suggest_float`."""
        check_range(name, low, high, None if log and step == 1 else step, log)
        if log:  # as optuna: the logarithm of a range in which each number has a unit
            drawn = self._random.uniform(math.log(low - 0.5), math.log(high + 0.5))
            value = min(max(round(math.exp(drawn)), low), high)
        else:
            value = self._random.randrange(low, high + 1, step)
        drawn_value: int = self.params.setdefault(name, value)
        return drawn_value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Returns one of several values."""
        if not choices:
            raise SearchError(f"hp_space: {name} has no choices.")
        return self.params.setdefault(name, self._random.choice(list(choices)))


def check_range(name: str, low: float, high: float, step: float | None, log: bool) -> None:
    """Raises SearchError if no number can be drawn."""
    if not low <= high or (log and low <= 0):
        raise SearchError(f"hp_space: {name} from {low} to {high} (log={log}) is no range.")
    if step is not None and (step <= 0 or log):
        raise SearchError(f"hp_space: {name} with step={step} and log={log}: a step is above 0, and goes without log.")


def search(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int,
    direction: str | Sequence[str],
    hp_name: object,
    options: Mapping[str, Any],
) -> BestRun:
    """Searches by random trials; the arguments are those of `Trainer.hyperparameter_search`.

    The trials are trained in groups of `members_at_once` (all of them by default), which write to `members-0`,
    `members-1` ... in the output folder. The Trainer is not changed. There is no stored study: a search that died
    starts again.

    Raises:
        SearchError: an argument is invalid, or a hyperparameter is not one that members may differ in.
        RuntimeError: there is no `model_init`, or no trial has a number as its objective.
    """
    directions = check_directions(direction)
    check_trials(n_trials, has_other_end=False)
    at_once = options.get("members_at_once", n_trials)
    check_call(options, directions, n_trials, at_once)
    check_trainer(trainer)
    if hp_space is None:
        raise SearchError("backend='members' has no default space: give hp_space.")
    if hp_name is not None:
        raise SearchError("backend='members' names its trials run-0, run-1 ...: leave hp_name out.")
    tell_of_earlier(output_folder(trainer.args))
    trials = [RandomTrial(number, trainer.args.seed) for number in range(n_trials)]
    params = [check_params(hp_space(trial)) for trial in trials]
    best: BestRun | None = None
    for group, start in enumerate(range(0, n_trials, at_once)):
        drawn = params[start : start + at_once]
        each = train_group(trainer, drawn, start, group)
        for offset, metrics in enumerate(each[: len(drawn)]):
            value = check_objective((compute_objective or default_compute_objective)(metrics), 1)
            assert isinstance(value, float)
            logger.info("Trial %d: %s, objective %s", start + offset, drawn[offset], value)
            known = None if best is None else float(best.objective)  # type: ignore[arg-type]
            if is_better(value, known, directions[0]):
                best = BestRun(str(start + offset), value, drawn[offset])
    if best is None:
        raise RuntimeError("hyperparameter_search: no trial has a number as its objective.")
    return best


def check_call(options: Mapping[str, Any], directions: Sequence[str], n_trials: int, at_once: object) -> None:
    """Raises SearchError if an argument of a search is invalid."""
    of_study = sorted(set(options) & OF_STUDY)
    if of_study:
        raise SearchError(
            f"{of_study[0]}={options[of_study[0]]!r}: backend='members' draws its trials at random before the first is "
            "trained, and stores no study: a search that died starts again. Use backend='optuna' for it."
        )
    unknown = sorted(set(options) - {"members_at_once"})
    if unknown or len(directions) > 1 or n_trials < 2:
        wrong = f"option {unknown[0]!r}" if unknown else "several directions, or less than two trials"
        raise SearchError(f"backend='members' does not take {wrong}.")
    if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 2:
        raise SearchError(f"members_at_once={at_once!r}: give a whole number, 2 or more.")


def tell_of_earlier(folder: Path) -> None:
    """Warns of the groups of an earlier search, which are trained again."""
    found = sorted(path.name for path in folder.glob("members-*") if path.is_dir())
    if found:
        logger.warning(
            "%s holds %s of an earlier search: backend='members' continues no search, so all trials start again.",
            folder,
            ", ".join(found),
        )


def check_trainer(trainer: Trainer) -> None:
    """Checks that trials can be trained as members.

    Raises:
        RuntimeError: there is no `model_init`.
        SearchError: there is no evaluation data, the output folder is a URL, or a method is overridden.
        UnsupportedOption: there is a teacher, or a callback of one model.
    """
    if trainer.model_init is None:
        raise RuntimeError("To use hyperparameter search, you need to pass your model through a model_init function.")
    if trainer.eval_dataset is None:
        raise SearchError("hyperparameter_search compares evaluations: give the Trainer an eval_dataset.")
    store = trainer._own_options.output_store
    if store is not None:
        raise SearchError(
            f"output_dir={store!r}: the folders of trials are not uploaded. Search with a local "
            "output_dir, and train the best trial with the URL."
        )
    if trainer.teacher is not None:
        raise UnsupportedOption("backend='members': members do not learn from a teacher: use backend='optuna'.")
    load("paceline.pytorch.members.checks:check_callbacks")(trainer.callback_handler.callbacks)
    own = next((each for each in methods_of(trainer) if not is_ours(each)), None)
    if own is not None:
        raise SearchError(
            f"backend='members': {own.__name__} of {type(trainer).__name__} is overridden, and members do not call it: "
            "use backend='optuna'."
        )


def methods_of(trainer: Trainer) -> list[Callable[..., object]]:
    """Returns the methods of a Trainer that its members would not call."""
    names = ("compute_loss", "training_step", "create_optimizer", "create_scheduler", "evaluate", "prediction_step")
    return [getattr(trainer, name) for name in (*names, "get_train_dataloader", "get_eval_dataloader", "log")]


def check_params(params: object) -> dict[str, Any]:
    """Returns the hyperparameters of a trial.

    Raises:
        SearchError: one changes the architecture or the batches, which members share.
    """
    found = check_space(params)
    for name in found:
        if name not in SEARCHABLE:
            raise SearchError(
                f"hp_space: {name!r} cannot differ between members that are trained at once, which share architecture, "
                f"batches and steps; they differ in {', '.join(SEARCHABLE)}. Use backend='optuna' for {name!r}."
            )
    return found


def train_group(trainer: Trainer, params: Sequence[dict[str, Any]], start: int, group: int) -> list[dict[str, float]]:
    """Trains trials at once, and returns the evaluation of each after training."""
    members = [Member(**each, name=f"run-{start + offset}") for offset, each in enumerate(params)]
    if len(members) == 1:  # a stack has two or more
        members.append(replace(members[0], name="unused"))
    kind = load("paceline.pytorch.members.trainer:MembersTrainer")
    run = kind(
        args=replace(trainer.args, output_dir=str(output_folder(trainer.args) / f"members-{group}")),
        members=members,
        model_init=trainer.model_init,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
        data_collator=trainer.data_collator,
        processing_class=trainer.processing_class,
        compute_loss_func=trainer.compute_loss_func,
        compute_metrics=trainer.compute_metrics,
        optimizer_cls_and_kwargs=trainer.optimizer_cls_and_kwargs,
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
        callbacks=given_callbacks(trainer),
    )
    run.train()
    run.evaluate()
    return [result.metrics for result in run.results()]


def given_callbacks(trainer: Trainer) -> list[TrainerCallback]:
    """Returns the callbacks of the user; a Trainer makes the others itself."""
    made = {each if isinstance(each, type) else type(each) for each in with_defaults([], trainer.args)}
    return [each for each in trainer.callback_handler.callbacks if type(each) not in made]
