"""Optuna as a backend: a study that is stored, so that a search that died is continued."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.args.secrets import mask_text
from paceline.checkpoint.lock import acquire
from paceline.core.optional import LateModule
from paceline.core.outputs import BestRun
from paceline.search.shared_trial import SharedTrial
from paceline.search.trials import (
    Interrupted,
    Objective,
    Pruned,
    Report,
    SearchError,
    Trials,
    check_timeout,
    check_trials,
)

if TYPE_CHECKING:
    import optuna
else:
    optuna = LateModule("optuna")

logger = logging.getLogger(__name__)

STUDY_FILE = "study.db"
STUDY_NAME = "paceline"
# optuna's errors where the distribution of a hyperparameter is not that of the stored trials
OF_ANOTHER_SPACE = ("CategoricalDistribution does not support dynamic", "Cannot set different distribution kind")
LOCK_SECONDS = 20.0  # that a process waits for another one's write to the file
# texts in the errors of a storage, and what they mean
REASONS = {
    "locked": "another process has locked it; end that process, or wait for it",
    "not a database": "it is not a database; move the file away, or give another storage",
    "malformed": "it is damaged; restore a copy, or move the file away for a new search",
    "disk is full": "the disk is full; free space on it, and the same call continues the search",
    "no such column": "its tables are not those of optuna; give another storage",
}
OF_OPTIMIZE = ("timeout", "gc_after_trial", "callbacks", "show_progress_bar")
FOLDER, RUN_NAME, ERROR, SETTINGS = "folder", "run_name", "error", "settings"  # attributes of trials and of the study


class TrialFailed(Exception):
    """The error of one trial, after which the search continues; its cause is the original error."""


def run(
    trials: Trials, n_trials: int | None, directions: list[str], options: dict[str, Any]
) -> BestRun | list[BestRun]:
    """Searches with optuna.

    Args:
        trials: runs the trials.
        n_trials: number of trials of the whole study, those of earlier starts included; None: until `timeout`.
        directions: one for each objective.
        options: options of `optuna.create_study` and of `Study.optimize`; `halving` for successive halving.

    Returns:
        The best trial; with several objectives, those that no other trial beats in all of them.

    Raises:
        RuntimeError: no trial was completed; or the storage is locked.
        SearchError, UnsupportedOption: an option is invalid.
    """
    if not trials.is_first:
        return follow(trials)
    try:
        found = OptunaSearch(trials, n_trials, directions, options).search()
    except Exception as error:  # not after a signal, which all ranks have received
        trials.share(("end", None, f"{type(error).__name__}: {error}"))
        raise
    trials.share(("end", found, None))
    return found


def follow(trials: Trials) -> BestRun | list[BestRun]:
    """Trains the trials that rank 0 announces, on another rank; returns the same as rank 0.

    Raises:
        RuntimeError: the search has failed on rank 0.
    """
    while True:
        event, *values = trials.share(None)
        if event == "end":
            found: BestRun | list[BestRun] | None = values[0]
            if found is None:
                raise RuntimeError(f"the search failed on the first process: {values[1]}")
            return found
        number, options = values
        try:
            trials.run(SharedTrial(None, trials.share, number), str(number), **options)
        except Exception as error:  # the same on all ranks; rank 0 decides whether the search continues
            logger.info("Trial %d ended on this rank with %s.", number, type(error).__name__)


class OptunaSearch:
    """A search over a study of optuna, on rank 0. The arguments are those of `run`.

    Attributes:
        study: optuna's study.
        storage: where it is stored, for messages.
        resources: closed at the end of `search`, or by a caller that does not search.
    """

    def __init__(self, trials: Trials, n_trials: int | None, directions: list[str], options: dict[str, Any]) -> None:
        options = dict(options)
        self.trials, self.n_trials, self.directions = trials, n_trials, directions
        self.halving: Mapping[str, Any] | None = options.pop("halving", None)
        catch: Any = options.pop("catch", Exception)
        self.catch: Any = catch if isinstance(catch, type) else tuple(catch)
        self.is_worker: bool = options.pop("is_worker", False)
        n_jobs = options.pop("n_jobs", 1)
        if n_jobs != 1:
            raise UnsupportedOption(
                f"n_jobs={n_jobs!r}: one Trainer runs one trial at a time. For trials in parallel processes: "
                "`paceline search CONFIG.yaml` with n_parallel in the section `search`."
            )
        self.optimize = {name: options.pop(name) for name in OF_OPTIMIZE if name in options}
        check_timeout(self.optimize.get("timeout"))
        check_trials(n_trials, has_other_end=self.optimize.get("timeout") is not None and self.halving is None)
        self.check_pruner(options.get("pruner"))
        self.is_own_storage = "storage" not in options
        self.storage = options.get("storage", trials.folder / STUDY_FILE)
        # JSONDecodeError: of attributes, which are stored as JSON
        with storage_errors(self.storage, json.JSONDecodeError), ExitStack() as opened:
            self.study = self.open_study(options, opened)
            if not self.is_worker:
                self.recover()
            self.resources = opened.pop_all()

    @property
    def is_single(self) -> bool:
        """True if there is one objective."""
        return len(self.directions) == 1

    # ---- the study

    def check_pruner(self, pruner: object) -> None:
        """Raises SearchError if a pruner is given that would never be called."""
        if pruner is None or isinstance(pruner, optuna.pruners.NopPruner):
            return
        name = type(pruner).__name__
        if self.halving is not None:
            raise SearchError(
                f"pruner={name}: successive halving compares the trials itself and asks no pruner; leave out pruner or "
                "halving."
            )
        if not self.trials.evaluates:
            raise SearchError(
                f"pruner={name}: there are no evaluations during training to prune by; set eval_strategy='steps' or "
                "'epoch'."
            )
        if not self.is_single:
            raise SearchError(f"pruner={name}: optuna prunes with one objective only; leave it out, or give one.")

    def open_study(self, options: dict[str, Any], opened: ExitStack) -> optuna.Study:
        """Creates the study, or loads the stored one.

        Args:
            opened: receives the closing of the search's own storage.

        Raises:
            SearchError: the stored study has other directions.
        """
        if self.is_own_storage:
            options["storage"] = storage = own_storage(self.trials.folder)
            opened.callback(close_storage, storage)
            options.setdefault("study_name", STUDY_NAME)
            options.setdefault("load_if_exists", True)
        study = optuna.create_study(directions=self.directions, **options)
        stored = [direction.name.lower() for direction in study.directions]
        if stored != self.directions:
            raise SearchError(
                f"direction={self.directions}: the stored study {study.study_name!r} has {stored}. Give another "
                "output_dir or study_name for a new search."
            )
        if study.get_trials(deepcopy=False):
            # a sampler with a seed would suggest the hyperparameters of the first trials again
            study.sampler.reseed_rng()
        self.compare_settings(study)
        return study

    def compare_settings(self, study: optuna.Study) -> None:
        """Stores the options that all trials share; warns if they have changed since the study was begun.

        A worker does neither: the process that has started it does both.
        """
        if self.is_worker:
            return
        now, before = self.trials.settings(), study.user_attrs.get(SETTINGS)
        if not before:
            study.set_user_attr(SETTINGS, now)
            return
        changed = sorted(name for name in now if name in before and before[name] != now[name])
        if changed:
            logger.warning(
                "The study was begun with other arguments, so its objectives may not be comparable: %s.",
                ", ".join(f"{name}={now[name]!r} (before: {before[name]!r})" for name in changed),
            )

    def recover(self) -> None:
        """Puts the trials that a dead process of this folder has left running back into the queue.

        Raises:
            FolderInUse: a process of a search that was killed still trains one of them.
        """
        found = set()
        for trial in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if self.is_own_storage or trial.user_attrs.get(FOLDER) == str(self.trials.folder.resolve()):
                self.check_left(trial)
                self.study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.WAITING)
                found.add(trial.number)
        if found:
            logger.warning("Continuing the interrupted trials %s.", ", ".join(map(str, sorted(found))))

    def check_left(self, trial: optuna.trial.FrozenTrial) -> None:
        """Raises FolderInUse if a process trains a trial: a worker notices after its step that its parent is gone."""
        folder = self.trials.folder / str(trial.user_attrs.get(RUN_NAME, ""))
        if RUN_NAME in trial.user_attrs and folder.is_dir():
            lock = acquire(folder)
            if lock is not None:
                lock.release()

    def num_counted(self) -> int:
        """Returns the number of trials that have ended, without those that an error of the search itself ended."""
        state = optuna.trial.TrialState
        ended = self.study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED, state.FAIL))
        return sum(trial.state != state.FAIL or ERROR in trial.user_attrs for trial in ended)

    # ---- the search

    def search(self) -> BestRun | list[BestRun]:
        """Runs the trials that are missing; returns the best."""
        with self.resources, storage_errors(self.storage):
            if self.halving is not None:
                from_halving: Callable[..., BestRun] = LateModule("paceline.search.halving").run
                return from_halving(self, self.halving)
            if self.is_worker:
                self.work_off()
                return BestRun("", float("nan"), {})  # the process that queued the trials chooses
            remaining = None if self.n_trials is None else self.n_trials - self.num_counted()
            if remaining is not None and remaining <= 0:
                logger.warning(
                    "The stored study has its %d trials: nothing is left to run. For more, raise n_trials; for a new "
                    "search, give another output_dir or study_name.",
                    self.num_counted(),
                )
            else:
                with filtered_errors():
                    self.study.optimize(self.objective, n_trials=remaining, catch=(TrialFailed,), **self.optimize)
            return self.best()

    def work_off(self) -> None:
        """Runs queued trials, of which other processes take some, until none is left."""
        state = optuna.trial.TrialState
        while queued := self.study.get_trials(deepcopy=False, states=(state.WAITING,)):
            trial_id = queued[0]._trial_id
            if not self.study._storage.set_trial_state_values(trial_id, state.RUNNING):
                continue  # another process was faster
            trial = optuna.trial.Trial(self.study, trial_id)
            ending: dict[str, Any] = {}
            try:
                ending["values"] = self.objective(trial)
            except optuna.TrialPruned:
                ending["state"] = state.PRUNED
            except (TrialFailed, SearchError) as error:
                logger.warning("Trial %d failed: %s", trial.number, error)
                ending["state"] = state.FAIL
                if isinstance(error, SearchError):
                    self.tell(trial, **ending)
                    raise
            ended = self.tell(trial, **ending)
            for callback in self.optimize.get("callbacks", ()):
                callback(self.study, ended)

    def tell(self, trial: optuna.Trial, *value: float, **ending: Any) -> optuna.trial.FrozenTrial:
        """Records the end of a trial that `Study.optimize` does not run; the arguments are those of `Study.tell`.

        A sampler that has tried its whole space (`GridSampler`, `BruteForceSampler`) calls `Study.stop`, which is an
        error outside of `Study.optimize`, raised after the trial is stored. Here the trials have been chosen already.
        """
        try:
            return self.study.tell(trial, *value, **ending)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            return self.study._storage.get_trial(trial._trial_id)

    def objective(self, trial: optuna.Trial) -> Objective:
        """Runs one trial of the study."""
        return self.train(trial)

    def train(self, trial: optuna.Trial, until: int | None = None) -> Objective:
        """Trains one trial on all ranks, to the end or to an optimizer step, from its checkpoint if it has one.

        Raises:
            optuna.TrialPruned: the pruner ended the trial.
            TrialFailed: an error ended it, which `catch` names.
            SearchError: the search is set up wrong; the study has another space.
            Interrupted: a signal or Ctrl-C stopped the search.
        """
        with interruptible():
            return self._train(trial, until)

    def _train(self, trial: optuna.Trial, until: int | None) -> Objective:
        trial.set_user_attr(FOLDER, str(self.trials.folder.resolve()))
        options: dict[str, Any] = {"is_continued": RUN_NAME in trial.user_attrs, "until": until}
        self.trials.share(("trial", trial.number, options))
        given = SharedTrial(trial, self.trials.share, trial.number) if self.trials.is_distributed else trial
        try:
            value = self.trials.run(
                given,
                str(trial.number),
                report=self.reporter(trial),
                claim=lambda name: self.claim(trial, name),
                **options,
            )
        except Pruned as error:
            raise optuna.TrialPruned(str(error)) from error
        except (SearchError, optuna.TrialPruned):  # the latter is raised by functions of the user
            raise
        except Exception as error:
            if not isinstance(error, self.catch):
                raise
            if isinstance(error, ValueError) and str(error).startswith(OF_ANOTHER_SPACE):
                raise SearchError(
                    f"The study has other values of a hyperparameter than this trial requests: {error} For another "
                    "space, give another output_dir or study_name."
                ) from error
            text = mask_text(f"{type(error).__name__}: {error}")
            trial.set_user_attr(ERROR, text)
            raise TrialFailed(text) from error
        if any(math.isnan(number) for number in (value if isinstance(value, list) else [value])):
            trial.set_user_attr(ERROR, "the objective is NaN")  # optuna records the trial as failed
        return value

    def reporter(self, trial: optuna.Trial) -> Report:
        """Returns the function that reports evaluations, and asks whether the trial is to be pruned."""

        def report(value: Objective, step: int) -> bool:
            if not self.is_single or self.halving is not None:
                return False
            reported = self.study._storage.get_trial(trial._trial_id).intermediate_values
            if step not in reported:  # a trial that is continued repeats the steps after its checkpoint
                trial.report(float(value), step)  # type: ignore[arg-type]
            return bool(trial.should_prune())

        return report

    def claim(self, trial: optuna.Trial, name: str) -> None:
        """Records the name of a trial's folder.

        Raises:
            SearchError: another trial has the same name.
        """
        for other in self.study.get_trials(deepcopy=False):
            if other.number != trial.number and other.user_attrs.get(RUN_NAME) == name:
                raise SearchError(
                    f"hp_name gave {name!r} to trials {other.number} and {trial.number}, which would share a folder: "
                    "let it return another name for each, for instance with trial.number."
                )
        trial.set_user_attr(RUN_NAME, name)

    def best(self) -> BestRun | list[BestRun]:
        """Returns the best trial, or the Pareto front of several objectives.

        Raises:
            RuntimeError: no trial was completed.
        """
        state = optuna.trial.TrialState
        if not self.study.get_trials(deepcopy=False, states=(state.COMPLETE,)):
            raise RuntimeError(no_result(self.study.get_trials(deepcopy=False)))
        if self.is_single:
            best = self.study.best_trial
            return BestRun(str(best.number), float(best.value or 0.0), dict(best.params))
        return [BestRun(str(one.number), list(one.values or ()), dict(one.params)) for one in self.study.best_trials]


class ErrorFilter(logging.Filter):
    """Replaces optuna's records of failed trials: of an error in a trial, its own traceback is enough.

    That of an error of the search itself is dropped, because the search raises it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, TrialFailed):
            logger.warning("%s", record.getMessage(), exc_info=error.__cause__)
        return not isinstance(error, SearchError | TrialFailed) and not record.getMessage().endswith(
            "failed with value None."
        )


@contextmanager
def filtered_errors() -> Iterator[None]:
    """Returns a context in which optuna's records of failed trials go through `ErrorFilter`."""
    source, chosen = logging.getLogger("optuna.study._optimize"), ErrorFilter()
    source.addFilter(chosen)
    try:
        yield
    finally:
        source.removeFilter(chosen)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns Ctrl-C into `Interrupted`, wherever in a trial it comes: optuna would record the trial as failed."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted from error


def own_storage(folder: Path) -> optuna.storages.RDBStorage:
    """Returns the storage of a search without `storage=`: a SQLite file in its folder.

    Raises:
        SearchError: there is something else of its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY_FILE
    if not path.is_file() and (path.is_symlink() or path.exists()):
        raise SearchError(f"{path} is not a regular file, and the study is stored there: move it away.")
    return optuna.storages.RDBStorage(study_url(folder), engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})


def close_storage(storage: Any) -> None:
    """Closes the connections to the database of a storage of `own_storage`, or of the cache around it."""
    storage.remove_session()
    getattr(storage, "_backend", storage).engine.dispose()


def study_url(folder: Path) -> str:
    """Returns the URL of a folder's study, with the characters of the path quoted that have a meaning in URLs."""
    kind: Any = LateModule("sqlalchemy").URL
    return str(kind.create("sqlite", database=str((folder / STUDY_FILE).resolve())).render_as_string())


def no_result(trials: list[optuna.trial.FrozenTrial]) -> str:
    """Returns the error message of a search without a completed trial."""
    errors = [f"trial {trial.number}: {trial.user_attrs[ERROR]}" for trial in trials if ERROR in trial.user_attrs]
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in trials)
    text = f"No trial was completed: of {len(trials)}, {len(errors)} failed and {pruned} were pruned"
    return f"{text}. The last error was that of {errors[-1]}" if errors else f"{text}."


@contextmanager
def storage_errors(storage: object, *others: type[Exception]) -> Iterator[None]:
    """Explains the errors of a storage.

    Args:
        storage: for the message.
        others: further errors that only a damaged storage causes here.

    Raises:
        RuntimeError: the storage is locked, or cannot be read or written.
    """
    database = LateModule("sqlalchemy.exc")
    try:
        yield
    except (optuna.exceptions.StorageInternalError, database.SQLAlchemyError, AssertionError, *others) as raised:
        # optuna raises an AssertionError while it handles an error of the storage
        error = raised.__context__ if isinstance(raised, AssertionError) else raised
        kinds: tuple[type[Exception], ...] = (optuna.exceptions.StorageInternalError, database.SQLAlchemyError, *others)
        if not isinstance(error, kinds):
            raise
        where = storage if isinstance(storage, str | Path) else type(storage).__name__
        texts = f"{error} {error.__cause__} {'malformed' if isinstance(error, others) else ''}"
        reason = next((found for sign, found in REASONS.items() if sign in texts), "it cannot be read or written")
        raise RuntimeError(
            f"The storage of the study, {where}: {reason}. Finished trials are kept. ({error})"
        ) from error
