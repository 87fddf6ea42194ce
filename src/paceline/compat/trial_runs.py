"""Runs the trials of a hyperparameter search with a Trainer, which is afterwards as it was before."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption, did_you_mean
from paceline.args.places import output_folder
from paceline.checkpoint.layout import CALLBACKS
from paceline.checkpoint.lock import acquire
from paceline.checkpoint.resuming import STATE_FILE
from paceline.core.events import TrainerCallback
from paceline.core.methods import is_ours
from paceline.core.metrics import MetricNotFound, default_compute_objective
from paceline.core.optional import load
from paceline.core.outputs import BestRun
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.distributed.collectives import gather_objects, on_first, share_object
from paceline.pytorch.distributed.strategy import empty_device_cache
from paceline.search import backends
from paceline.search.trials import (
    Interrupted,
    Objective,
    Pruned,
    Report,
    SearchError,
    check_directions,
    check_objective,
    check_space,
    check_trials,
    is_number,
    params_of,
    shared_settings,
)

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

logger = logging.getLogger(__name__)

# attributes of the Trainer that a run replaces
REPLACED = (
    "args", "model", "model_wrapped", "optimizer", "lr_scheduler", "strategy", "state", "control", "signature",
    "label_names", "can_return_loss", "loss_normalizer", "label_smoother", "objective", "step_parts", "is_prepared",
    "time_spent", "was_stopped", "run_mark", "current_flos", "_signature_columns", "_packing", "_created_lr_scheduler",
    "_is_best_loaded", "_resumed_batch_size", "_view", "_trial_name", "edits", "is_in_train", "run",
)  # fmt: skip
OF_SEARCH = ("hp_name", "hp_search_backend", "hp_space", "compute_objective", "_trial_runs")
OF_HANDLER = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
DEFAULT_NAME = "run-{}"
MAX_NAME_BYTES = 200  # of a trial's folder; file systems allow 255, and some services make longer names of it
WHOLE = ("int", "int | None", int, int | None)  # declared types of options


def search(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int | None,
    direction: str | Sequence[str],
    backend: str | None,
    hp_name: Callable[[Any], str] | None,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun]:
    """Searches; the arguments are those of `Trainer.hyperparameter_search`."""
    if backend == "members":
        together = load("paceline.pytorch.members.search:search")
        found: BestRun = together(trainer, hp_space, compute_objective, n_trials, direction, hp_name, options)
        return found
    chosen = backends.choose(backend)
    run = chosen.load()
    directions = check_directions(direction)
    check_trials(n_trials, has_other_end="timeout" in options)
    for name, value in (("hp_space", hp_space), ("compute_objective", compute_objective), ("hp_name", hp_name)):
        if value is not None and not callable(value):
            raise SearchError(f"{name}={value!r} cannot be called: give a function.")
    check_support(trainer, options)
    runs = TrialRuns(trainer, len(directions))
    functions = {
        "hp_space": hp_space or chosen.default_space,
        "compute_objective": compute_objective or default_compute_objective,
        "hp_name": hp_name,
        "hp_search_backend": chosen.name,
    }
    with runs.searching(functions, is_locked=not options.get("is_worker", False)):
        try:
            best = run(runs, n_trials, directions, dict(options))
            return runs.as_trained(best) if isinstance(best, BestRun) else [runs.as_trained(one) for one in best]
        except Interrupted as error:
            raise KeyboardInterrupt(
                f"stopped in {runs.name}: the same call continues the search, and this trial from its last checkpoint"
            ) from error


def check_support(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Checks that a Trainer can run trials.

    Raises:
        RuntimeError: it has no `model_init`.
        ValueError: it has no evaluation data.
        UnsupportedOption: its output folder is a URL, or trials are to run in parallel.
    """
    if trainer.model_init is None:
        raise RuntimeError("To use hyperparameter search, you need to pass your model through a model_init function.")
    if trainer.eval_dataset is None and is_ours(trainer.get_eval_dataloader) and is_ours(trainer.evaluate):
        raise SearchError("hyperparameter_search compares evaluations: give the Trainer an eval_dataset.")
    store = trainer._own_options.output_store
    if store is not None:
        raise UnsupportedOption(
            f"output_dir={store!r}: the folders of trials are not uploaded. Search with a local "
            "output_dir, and train the best trial with the URL."
        )
    if options.get("n_parallel", 1) != 1:
        raise UnsupportedOption(
            f"n_parallel={options['n_parallel']!r}: a Trainer cannot be copied to other processes. Use `paceline "
            "search CONFIG.yaml` with n_parallel in the section `search`, where each process builds its own."
        )


class TrialWatch(TrainerCallback):
    """Stops a trial at a given step, and notes whether a signal stopped it.

    Args:
        until: the last optimizer step of this run; None: the end of training.
        is_stopped: returns True if a signal has stopped the run in progress.
        before: learning rate and weight decay of the checkpoint's run, by option, if they may differ from this run's.
    """

    def __init__(self, until: int | None, is_stopped: Callable[[], bool], before: Mapping[str, float]) -> None:
        self.until, self._is_stopped, self.before = until, is_stopped, before
        self.was_stopped = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Applies a changed learning rate and weight decay, which the checkpoint's optimizer has restored."""
        optimizer, scheduler = kwargs.get("optimizer"), kwargs.get("lr_scheduler")
        scales = {name: getattr(args, name) / value for name, value in self.before.items() if value}
        for group in getattr(optimizer, "param_groups", ()):
            for name, option in (("lr", "learning_rate"), ("initial_lr", "learning_rate"), ("weight_decay",) * 2):
                if name in group:
                    group[name] *= scales.get(option, 1.0)
        for rates in (getattr(scheduler, "base_lrs", None), getattr(scheduler, "_last_lr", None)):
            if isinstance(rates, list):
                rates[:] = [rate * scales.get("learning_rate", 1.0) for rate in rates]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.until is not None and state.global_step >= self.until:
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.was_stopped = self._is_stopped()


class TrialRuns:
    """The trials of a search; see `paceline.search.trials.Trials`.

    Args:
        trainer: trains them.
        num_objectives: numbers that `compute_objective` returns.

    Attributes:
        folder: the output folder of the search.
        num_steps: optimizer steps of the trial that was run last.
        name: the name of the trial that was started last, and of its folder.
    """

    def __init__(self, trainer: Trainer, num_objectives: int) -> None:
        self.trainer, self.num_objectives = trainer, num_objectives
        self.args = trainer.args
        self.folder = output_folder(trainer.args)
        self.name = ""
        self._before = {name: vars(trainer)[name] for name in REPLACED + OF_SEARCH if name in vars(trainer)}
        self._of_handler = {name: getattr(trainer.callback_handler, name) for name in OF_HANDLER}
        self._told_of: set[str] = set()  # hyperparameters that are no options, already warned of
        self._has_failed = False
        self._begin("", None, None)

    def _begin(self, run_id: str, report: Report | None, claim: Callable[[str], None] | None) -> None:
        self.run_id, self.report_to, self.claim = run_id, report, claim
        self.value: Objective | None = None
        self.is_pruned = False
        self.num_steps = 0

    # ---- what backends read and call

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.trainer.world.is_first

    @property
    def is_distributed(self) -> bool:
        """True if several processes train each trial."""
        return self.trainer.world.is_distributed

    @property
    def evaluates(self) -> bool:
        """True if trials are evaluated during training."""
        return self.args.eval_strategy != "no"

    def share(self, value: Any) -> Any:
        """Returns the value of rank 0 on all ranks."""
        return share_object(self.trainer.world, value)

    @property
    def uses_cuda(self) -> bool:
        """True if a trial trains on a CUDA device."""
        return self.trainer.world.device.type == "cuda"

    @property
    def is_save_due(self) -> bool:
        """True if the run saves a checkpoint after the evaluation in progress."""
        return self.trainer.control.should_save

    def space(self) -> dict[str, Any]:
        """Returns the space of all trials."""
        return check_space(self.trainer.hp_space(None))

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of the trial in progress to a folder."""
        self.trainer._tune_save_checkpoint(str(folder))

    @contextmanager
    def reporting_to_wandb(self) -> Iterator[None]:
        """Adds the reporter for Weights & Biases for a while, unless the Trainer has it."""
        kind = load("paceline.callbacks.reporters.wandb:WandbCallback")
        has_one = any(isinstance(callback, kind) for callback in self.trainer.callback_handler.callbacks)
        added = None if has_one else kind()
        if added is not None:
            self.trainer.add_callback(added)
        try:
            yield
        finally:
            if added is not None:
                self.trainer.remove_callback(added)

    @contextmanager
    def portable(self) -> Iterator[None]:
        """Takes the TensorBoard reporter, whose writer cannot be copied, from the Trainer for a while."""
        trainer = self.trainer
        kind = load("paceline.callbacks.reporters.tensorboard:TensorBoardCallback")
        taken = trainer.pop_callback(kind)
        try:
            yield
        finally:
            if taken is not None:
                trainer.add_callback(taken)

    def settings(self) -> dict[str, Any]:
        """Returns the options that all trials share."""
        return shared_settings(self.args.to_sanitized_dict())

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
        """Trains one trial and returns its objective; see `paceline.search.trials.Trials.run`."""
        trainer = self.trainer
        self._begin(run_id, report, claim)
        if self._has_failed:
            self.collect()  # the error has held the frames, and with them the model, of the trial before
            self._has_failed = False
        checkpoint: str | bool = "auto" if is_continued else False
        if resume is not None:
            checkpoint = str(resume)
        before = {} if resume is None else self.rates_of(resume)
        watch = TrialWatch(until, lambda: trainer.run is not None and trainer.run.signals.requested is not None, before)
        trainer.add_callback(watch)
        error: BaseException | None = None
        try:
            trainer.train(trial=trial, resume_from_checkpoint=checkpoint)
            if watch.was_stopped:
                raise Interrupted
            value = self.outcome()
            if self.is_pruned:
                raise Pruned(f"at step {trainer.state.global_step}")
        except (Exception, Interrupted) as raised:
            error = raised
            if isinstance(raised, MetricNotFound):  # every trial would end there
                error = SearchError(str(raised))
                error.__cause__ = raised
            self._has_failed = True
        finally:
            self.num_steps = trainer.state.global_step
            trainer.remove_callback(watch)
            self.release()
        self.agree(error)
        if error is not None:
            raise error
        return value

    def rates_of(self, checkpoint: Path) -> dict[str, float]:
        """Returns the learning rate and the weight decay of the trial that wrote a checkpoint."""
        params = TrainerState.load_from_json(checkpoint / STATE_FILE).trial_params or {}
        return {name: float(params.get(name, getattr(self.args, name))) for name in ("learning_rate", "weight_decay")}

    def agree(self, error: BaseException | None) -> None:
        """Compares the ends of a trial on all ranks.

        Raises:
            SearchError: the trial has failed on some ranks only, which are no longer in step.
        """
        ends = gather_objects(self.trainer.world, None if error is None else f"{type(error).__name__}: {error}")
        kinds = {None if end is None else end.split(":")[0] for end in ends}
        if len(kinds) > 1 and None in kinds:
            told = "; ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends) if end is not None)
            raise SearchError(f"{self.name} has failed on some processes only ({told}): the search cannot go on.")

    # ---- the life of a trial

    def set_up(self, trial: Any) -> None:
        """Sets the arguments, the name and the folder of a trial, before its model is made."""
        trainer = self.trainer
        shares_space = backends.BACKENDS[str(trainer.hp_search_backend)].is_space_shared
        params = check_space(params_of(trial) if shares_space else trainer.hp_space(trial))
        self.name = on_first(trainer.world, lambda: self.named(trial))
        trainer._trial_name = self.name
        trainer._signature_columns = None
        trainer.args = self.trial_arguments(params)
        self.reset_callbacks()
        logger.info("%s: %s", self.name, params)

    def named(self, trial: Any) -> str:
        """Returns the name of a trial's folder.

        Raises:
            SearchError: `hp_name` returned no name of a folder, or that of another trial.
        """
        given = self.trainer.hp_name
        name = DEFAULT_NAME.format(self.run_id) if given is None else given(trial)
        if not is_folder_name(name):
            raise SearchError(
                f"hp_name returned {name!r}; it must return the name of a folder: a text of {MAX_NAME_BYTES} bytes at "
                "most, without separators and control characters."
            )
        if self.claim is not None:
            self.claim(name)
        return name

    def trial_arguments(self, params: Mapping[str, Any]) -> Any:
        """Returns the arguments of a trial; hyperparameters that are no options are left to `model_init`."""
        own: dict[str, Any] = {
            "output_dir": str(self.folder / self.name),
            "resume_from_checkpoint": None,
            "push_to_hub": False,  # trials would replace each other in the repository
        }
        kinds = self.kinds()
        for name, value in params.items():
            if name in own:
                raise SearchError(f"hp_space returned {name!r}, which the search sets itself.")
            if name == "report_to":  # reporters are made with the Trainer, once for all trials
                raise SearchError("hp_space returned 'report_to', which no trial can change: set it in the arguments")
            if name in kinds:
                own[name] = converted(value, kinds[name])
            else:
                self.tell_of_unknown(name, set(kinds))
        made = replace(self.args, **own)
        for name, value in vars(self.args).items():
            vars(made).setdefault(name, value)  # attributes that are no options
        return made

    def kinds(self) -> dict[str, object]:
        """Returns the declared type of each option."""
        return {field.name: field.type for field in fields(self.args)}

    def as_trained(self, best: BestRun) -> BestRun:
        """Returns a trial with the values that its run had, whole numbers among them."""
        kinds = self.kinds()
        params = {name: converted(value, kinds.get(name)) for name, value in best.hyperparameters.items()}
        return best._replace(hyperparameters=params)

    def tell_of_unknown(self, name: str, names: set[str]) -> None:
        """Warns once of a hyperparameter that is no option, unless `model_init` takes the trial and may read it."""
        if name in self._told_of:
            return
        self._told_of.add(name)
        assert self.trainer.model_init is not None
        near = "" if "." in name else did_you_mean(name, names)  # "model.width" is no misspelt option
        takes_trial = bool(inspect.signature(self.trainer.model_init).parameters)
        level = logging.INFO if takes_trial and not near else logging.WARNING
        logger.log(
            level,
            "Trying to set %s in the hyperparameter search but there is no corresponding field in "
            "`TrainingArguments`: only model_init may read it%s",
            name,
            near or ".",
        )

    def reset_callbacks(self) -> None:
        """Gives the callbacks the state that they had before the search: no trial inherits another one's counters."""
        self.trainer._make_session().items()[CALLBACKS].load_state_dict(self._callbacks)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an evaluation during training; ends the run if the backend prunes the trial."""
        self.value = self.compute(metrics)
        value, asks = self.value, self.report_to
        # an error of the storage is raised on all ranks, or the others would wait
        if on_first(self.trainer.world, lambda: asks is not None and asks(value, step)):
            self.is_pruned = self.trainer.control.should_training_stop = True

    def outcome(self) -> Objective:
        """Returns the objective of the last evaluation of this run; evaluates if there was none.

        The log of a resumed trial has the evaluations before its checkpoint too, which are of fewer steps.
        """
        if self.value is None:
            state = self.trainer.state
            self.value = self.compute(evaluation_at(state.global_step, state.log_history) or self.trainer.evaluate())
        return self.value

    def compute(self, metrics: Mapping[str, float]) -> Objective:
        """Returns the objective of metrics.

        Raises:
            SearchError: a metric is missing, or the objective is no number.
        """
        try:
            value = self.trainer.compute_objective(dict(metrics))
        except MetricNotFound as error:
            raise SearchError(f"compute_objective: {error}") from error
        except KeyError as error:
            raise SearchError(
                f"compute_objective asked for {error}, which the evaluation does not give; it gives "
                f"{', '.join(sorted(metrics))}."
            ) from error
        return check_objective(value, self.num_objectives)

    # ---- the Trainer before and after

    @contextmanager
    def searching(self, functions: Mapping[str, Any], is_locked: bool) -> Iterator[None]:
        """Reserves the output folder, and restores the Trainer at the end.

        Args:
            functions: the Trainer's attributes during the search.
            is_locked: keep other searches out of the folder.

        Raises:
            FolderInUse: another process searches or trains there.
        """
        trainer = self.trainer
        lock = on_first_lock(trainer, self.folder) if is_locked else None
        self._callbacks = trainer._make_session().items()[CALLBACKS].state_dict()
        trainer._trial_runs = self
        for name, value in functions.items():
            setattr(trainer, name, value)
        if self.args.push_to_hub:
            logger.warning(
                "push_to_hub=True: trials are not pushed, as each would replace the last. Push the best run."
            )
        try:
            yield
        finally:
            self.reset_callbacks()
            self.restore(REPLACED + OF_SEARCH)
            if lock is not None:
                lock.release()

    def release(self) -> None:
        """Frees the model and everything else that a trial has made."""
        self.restore(REPLACED)
        self.collect()

    def collect(self) -> None:
        """Frees the memory of unused objects."""
        gc.collect()  # models and optimizers are parts of reference cycles
        empty_device_cache(self.trainer.world.device)

    def restore(self, names: Sequence[str]) -> None:
        """Gives the Trainer the attributes that it had before the search."""
        for name in names:
            if name in self._before:
                setattr(self.trainer, name, self._before[name])
            else:
                vars(self.trainer).pop(name, None)
        for name, value in self._of_handler.items():
            setattr(self.trainer.callback_handler, name, value)


def is_folder_name(name: object) -> bool:
    """True for a text that can be the name of a trial's folder."""
    if not isinstance(name, str) or not name.isprintable() or Path(name).name != name or name in (".", ".."):
        return False
    return 0 < len(name.encode()) <= MAX_NAME_BYTES


def converted(value: Any, kind: object) -> Any:
    """Returns a number of a backend for an option of a type: whole numbers also come from continuous distributions.

    The type is the declared one: that of the current value is int too where `weight_decay=0` was given.
    """
    plain = value.item() if is_number(value) and hasattr(value, "item") else value
    return int(plain) if kind in WHOLE and isinstance(plain, float) else plain


def on_first_lock(trainer: Trainer, folder: Path) -> Any:
    """Locks the folder of a search on rank 0; an error is raised on all ranks."""
    held: list[Any] = []
    on_first(trainer.world, lambda: held.append(acquire(folder)))
    return held[0] if held else None


def evaluation_at(step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the metrics of the evaluation at an optimizer step in a log, of all its datasets; empty without one."""
    metrics: dict[str, float] = {}
    for row in rows:
        if row.get("step") == step and any(name.startswith("eval_") for name in row):
            metrics.update({name: value for name, value in row.items() if name != "step"})
    return metrics
