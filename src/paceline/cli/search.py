"""`paceline search CONFIG.yaml`: searches the hyperparameters of a job with optuna, in one process or several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.args.training import TrainingArguments
from paceline.callbacks.defaults import DISPLAYS
from paceline.checkpoint.lock import acquire
from paceline.cli.config import JobConfig
from paceline.cli.display import say
from paceline.cli.errors import UsageError, need
from paceline.cli.job_model import build_model
from paceline.cli.job_predictions import SECTIONS as PREDICTION_SECTIONS
from paceline.cli.jobs import Job, kept
from paceline.cli.references import REFERENCE, put_on_path, read_reference
from paceline.cli.search_options import OF_MODEL, SearchConfig, read_function, suggested
from paceline.cli.search_table import Beginning, TrialsDisplay, shown
from paceline.cli.train import COMMANDS, IDENTITY, check_references, check_splits, make_arguments
from paceline.cli.train_torch import build_trainer
from paceline.core.events import TrainerCallback
from paceline.core.metrics import best_metric_value
from paceline.core.optional import LateModule, is_installed
from paceline.core.record import jsonable
from paceline.search.optuna_study import RUN_NAME, STUDY_NAME, OptunaSearch, close_storage, no_result, own_storage
from paceline.search.trials import params_of, shared_settings

if TYPE_CHECKING:
    import optuna
else:
    optuna = LateModule("optuna")

WORKER_LOG = "worker-{}.log"  # the output of a process beside a table
PLOTS = ("plot_optimization_history", "plot_param_importances", "plot_parallel_coordinate", "plot_slice")


class Orphaned(TrainerCallback):
    """Stops a trial with a checkpoint if the process that started this one is gone."""

    def __init__(self) -> None:
        self.parent = os.getppid()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if os.getppid() != self.parent:
            raise KeyboardInterrupt


class TrialJobs(TrainerCallback):
    """Writes `job.json` to the folder of each trial, so that `paceline replay` can run its steps again.

    Args:
        job: the configuration of the search.
        args: its arguments, which those of a trial are compared with.
    """

    def __init__(self, job: JobConfig, args: TrainingArguments) -> None:
        self.job, self.before = job, args.to_dict()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not state.is_hyper_param_search:
            return
        sections = sections_of_trial(self.job, state.trial_params or {})
        changed = {name: value for name, value in args.to_dict().items() if value != self.before.get(name)}
        given = {**kept(self.job.arguments), **changed}
        Job(
            Path(str(args.output_dir)),
            COMMANDS["torch"],
            {name: sections[name] for name in IDENTITY if sections.get(name) is not None},
            {
                "arguments": args.to_sanitized_dict(),
                "given": {"path": str(self.job.path), "sections": sections, "arguments": given},
            },
        ).write()


def run(config: SearchConfig) -> int:
    """Searches, and shows the best trial; returns the exit code.

    Raises:
        UsageError: the configuration is invalid.
    """
    need("optuna", "optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    put_on_path(config.job.folder, Path.cwd())
    check_references(config.job)
    for name in PREDICTION_SECTIONS:
        if config.job.get(name) is not None:
            raise UsageError(f"{name}: a search makes no predictions: leave it out, and give it to `paceline train`")
    args = make_arguments(config.job)
    folder = Path(str(args.output_dir)).absolute()
    with redirect_stdout(sys.stderr) if config.is_json else nullcontext():
        if config.n_parallel > 1 and not config.is_worker:
            code = run_parallel(config, args, folder)
        else:
            run_here(config, args)
            code = 0
    if not config.is_worker:
        show_result(folder, is_json=config.is_json)
    return code


def run_here(config: SearchConfig, args: TrainingArguments) -> None:
    """Runs trials in this process."""
    trainer, splits = build_trainer(config.job, args, partial(model_of_trial, config.job))
    check_splits(splits, args, ("do_train", "do_eval"), {"do_eval": True})
    display = None if config.is_worker else TrialsDisplay(Path(str(args.output_dir)).absolute())
    trainer.add_callback(TrialJobs(config.job, args))
    if display is None:
        trainer.add_callback(Orphaned)
    else:
        trainer.add_callback(Beginning(display))
        if display.is_moving:  # bars and rows of logs would be written into the table
            for kind in DISPLAYS:
                trainer.remove_callback(kind)
    options: dict[str, Any] = {
        "sampler": choose("samplers", config.sampler),
        "pruner": choose("pruners", config.pruner),
    }
    for name in ("halving", "timeout"):
        if getattr(config, name) is not None:
            options[name] = getattr(config, name)
    if config.is_worker:
        options["is_worker"] = True
    with nullcontext() if display is None else display.shown():
        trainer.hyperparameter_search(
            hp_space=space_of(config),
            compute_objective=objective_of(config.objective),
            n_trials=config.n_trials,
            direction=config.direction,
            backend="optuna",
            **options,
        )


def model_of_trial(job: JobConfig, tokenizer: object, trial: Any) -> nn.Module:
    """Returns the model of a trial: that of the job, with the trial's `model.KEY` set.

    Raises:
        UsageError: the section `model` names a finished module, which all trials would share.
    """
    reference = read_reference("model", job.get("model"))
    if reference is not None and not reference.options and isinstance(reference.load(), nn.Module):
        raise UsageError(f"model: {reference.name} is a finished module, which all trials would train: name a function")
    sections = sections_of_trial(job, params_of(trial))
    return build_model(JobConfig(job.path, sections, job.arguments, job.framework), tokenizer)


def sections_of_trial(job: JobConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a job with the `model.KEY` among a trial's hyperparameters set."""
    section = job.get("model")
    changed = {name[len(OF_MODEL) :]: value for name, value in params.items() if name.startswith(OF_MODEL)}
    if isinstance(section, str):
        section = {"factory" if REFERENCE.fullmatch(section) else "path": section}
    return {**job.sections, "model": {**(section or {}), **changed}}


def space_of(config: SearchConfig) -> Callable[[Any], dict[str, Any]]:
    """Returns `hp_space`."""
    if isinstance(config.space, str):
        found: Callable[[Any], dict[str, Any]] = read_function("search.space", config.space)
        return found
    return partial(suggested, config.space)


def objective_of(value: str | None) -> Callable[[Mapping[str, float]], float] | None:
    """Returns `compute_objective`: a function, or the value of a metric; None for the default."""
    if value is None:
        return None
    if REFERENCE.fullmatch(value):
        found: Callable[[Mapping[str, float]], float] = read_function("search.objective", value)
        return found
    return partial(best_metric_value, name=value)


def choose(kind: str, value: Any) -> Any:
    """Returns a sampler or a pruner of optuna, from its name or a mapping with `name` and options; None for None.

    Raises:
        UsageError: there is no such class, or an option is invalid.
    """
    if value is None:
        return None
    options = {"name": value} if isinstance(value, str) else dict(value)
    module = getattr(optuna, kind)
    found = getattr(module, str(options.pop("name", "")), None)
    if not isinstance(found, type):
        names = ", ".join(name for name in dir(module) if name.endswith(kind[:-1].capitalize()))
        raise UsageError(f"search.{kind[:-1]}: {value!r} is none of {names}")
    try:
        return found(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"search.{kind[:-1]}: {error}") from error


# ---- several processes


class SharedSearch:
    """The facts of a search that runs in other processes; see `paceline.search.trials.Trials`.

    Args:
        args: the arguments of the job.
        folder: the output folder.
    """

    is_first, is_distributed = True, False

    def __init__(self, args: TrainingArguments, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.evaluates = args.eval_strategy != "no"

    def settings(self) -> dict[str, Any]:
        """Returns the options that all trials share."""
        return shared_settings(self.args.to_sanitized_dict())


def run_parallel(config: SearchConfig, args: TrainingArguments, folder: Path) -> int:
    """Queues the trials, and runs them in several processes; returns the exit code.

    Raises:
        RuntimeError: no trial was completed.
    """
    lock = acquire(folder)
    try:
        pruner = choose("pruners", config.pruner)
        search = OptunaSearch(SharedSearch(args, folder), config.n_trials, [config.direction], {"pruner": pruner})  # type: ignore[arg-type]
        state = optuna.trial.TrialState
        with search.resources:
            waiting = len(search.study.get_trials(deepcopy=False, states=(state.WAITING,)))
            for _ in range(config.n_trials - search.num_counted() - waiting):
                # as `enqueue_trial` without fixed parameters, to which samplers of a grid would give no place in it
                search.study.add_trial(optuna.trial.create_trial(state=state.WAITING))
            display = TrialsDisplay(folder)
            display.start()
            with display.shown():
                codes = run_workers(config, folder if display.is_moving else None)
            ended = search.study.get_trials(deepcopy=False)
            left = [trial for trial in ended if trial.state in (state.RUNNING, state.WAITING)]
    finally:
        if lock is not None:
            lock.release()
    if left:
        where = f" Messages: {folder / WORKER_LOG.format('*')}" if display.is_moving else ""
        say(f"{len(left)} trials were not finished (exit codes {codes}): the same command continues them.{where}")
    elif not any(trial.state == state.COMPLETE for trial in ended):
        raise RuntimeError(no_result(ended))
    return 1 if left else 0


def run_workers(config: SearchConfig, folder: Path | None = None) -> list[int]:
    """Runs the processes of a search, each with its own CUDA device, and returns their exit codes.

    Args:
        config: the search.
        folder: where each process appends its output to a file; None: they write to that of this process.
    """
    devices = visible_devices()
    command = [sys.executable, "-m", "paceline", "search", *config.words, "--worker"]
    workers = []
    for index in range(config.n_parallel):
        environment = dict(os.environ)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[index % len(devices)]
        if folder is None:
            output = sys.stderr.fileno() if config.is_json else None
            workers.append(subprocess.Popen(command, env=environment, stdout=output))
            continue
        with (folder / WORKER_LOG.format(index)).open("ab") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        return [worker.wait() for worker in workers]
    except KeyboardInterrupt:  # the terminal has interrupted the workers too, which write checkpoints
        for worker in workers:
            worker.wait()
        raise


def visible_devices() -> Sequence[str]:
    """Returns the names of the CUDA devices that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


# ---- the result


def show_result(folder: Path, *, is_json: bool) -> None:
    """Prints the result of a search, as text with optuna's plots drawn, or as JSON."""
    storage = own_storage(folder)
    try:
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage)
        if is_json:
            print(json.dumps(to_json(study, folder), indent=2))
        else:
            show_study(study, folder)
    finally:
        close_storage(storage)


def to_json(study: optuna.Study, folder: Path) -> dict[str, Any]:
    """Returns the trials of a study as plain values, with the number of the best one; None if none was completed."""
    trials = study.get_trials(deepcopy=False)
    is_done = any(trial.state == optuna.trial.TrialState.COMPLETE for trial in trials)
    found: dict[str, Any] = jsonable(
        {
            "folder": str(folder),
            "direction": study.direction.name.lower(),
            "best_trial": study.best_trial.number if is_done else None,
            "trials": [trial_to_json(trial, folder) for trial in trials],
        }
    )
    return found


def trial_to_json(trial: optuna.trial.FrozenTrial, folder: Path) -> dict[str, Any]:
    """Returns the facts of one trial."""
    name = trial.user_attrs.get(RUN_NAME)
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "objective": trial.value,
        "seconds": trial.duration.total_seconds() if trial.duration is not None else None,
        "folder": None if name is None else str(folder / name),
        "parameters": trial.params,
    }


def show_study(study: optuna.Study, folder: Path) -> None:
    """Prints the best trial of a study and the importance of the hyperparameters, and draws optuna's plots."""
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if not done:
        return
    best = study.best_trial
    say(f"\nBest: trial {best.number} with {best.value:.6g}, in {folder / best.user_attrs[RUN_NAME]}/")
    for name, value in best.params.items():
        say(f"  {name}: {shown(value)}")
    if len(done) > 1:
        say(f"Importance: {importance_of(study)}")
    if is_installed("plotly"):
        say(f"Plots: {', '.join(draw(study, folder / 'plots'))}")
    else:
        say('For plots: pip install "paceline[optuna]"')


def importance_of(study: optuna.Study) -> str:
    """Returns the share of each hyperparameter in the differences between the objectives, as text."""
    try:
        found = optuna.importance.get_param_importances(study)
    except (ImportError, RuntimeError, ValueError) as error:
        return f"unknown ({error})"
    return ", ".join(f"{name} {share:.0%}" for name, share in found.items()) or "unknown (nothing varied)"


def draw(study: optuna.Study, folder: Path) -> list[str]:
    """Writes optuna's plots of a study as HTML; returns their paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name in PLOTS:
        try:
            figure = getattr(optuna.visualization, name)(study)
        except (ImportError, RuntimeError, ValueError) as error:
            say(f"{name}: {error}")
            continue
        path = folder / f"{name.removeprefix('plot_')}.html"
        figure.write_html(path)
        paths.append(str(path))
    return paths
