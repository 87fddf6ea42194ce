"""Reads `paceline search CONFIG.yaml`: the section `search` of a job. Does not import torch.

search:
  space:
    learning_rate: {low: 1e-5, high: 1e-3, log: true}      # numbers; whole ones if both bounds are
    per_device_train_batch_size: [4, 8, 16]                # one of several values
    model.width: {low: 8, high: 64, step: 8}               # a key of the section `model`
  # space: my_module:hp_space                              # or your function
  objective: eval_loss                # a metric, or my_module:function; default: that of hyperparameter_search
  direction: minimize
  n_trials: 20
  n_parallel: 2                       # processes; each has its own CUDA device, if there are any
  sampler: {name: TPESampler, seed: 0}
  pruner: MedianPruner                # not with halving
  halving: {min_steps: 100, reduction_factor: 3}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.args.option_files import read_mapping
from paceline.cli.config import SECTIONS, JobConfig, apply_overrides, make_config, plain_numbers, read_config
from paceline.cli.errors import UsageError, suggest
from paceline.cli.options import Known, argument_names, parse_options
from paceline.cli.references import REFERENCE, read_reference
from paceline.core.counts import is_number

KEYS = ("space", "objective", "direction", "n_trials", "n_parallel", "sampler", "pruner", "halving", "timeout")
BOUNDS = ("low", "high", "log", "step")
DIRECTIONS = ("minimize", "maximize")
HALVING = {"min_steps": 1, "reduction_factor": 2}  # the least value of each
OF_MODEL = "model."


@dataclass(frozen=True)
class SearchConfig:
    """A search for a job.

    Attributes:
        job: the job of each trial.
        space: a mapping of names to their values, or the name of a function.
        objective: the name of a metric or a function; None: the default.
        direction: "minimize" or "maximize".
        n_trials: trials of the study.
        n_parallel: processes.
        sampler, pruner: the name of a class of optuna with its options; None: optuna's default.
        halving: options of successive halving, or None.
        timeout: seconds, or None.
        words: the command line.
        is_worker: True in a process that a parallel search has started.
        is_json: print the result as JSON; all else goes to the error output.
    """

    job: JobConfig
    space: Any
    objective: str | None = None
    direction: str = "minimize"
    n_trials: int = 20
    n_parallel: int = 1
    sampler: Any = None
    pruner: Any = None
    halving: Any = None
    timeout: float | None = None
    words: list[str] = field(default_factory=list)
    is_worker: bool = False
    is_json: bool = False


def read_search(words: Sequence[str]) -> SearchConfig:
    """Reads the command line and the file of a search.

    Raises:
        UsageError: the file, a key or an option is unknown or invalid.
    """
    own = {"worker": True, "json": True, "n_trials": False, "n_parallel": False}
    given = parse_options(words, Known(("CONFIG.yaml",), own, tuple(SECTIONS)))
    if not given.positional:
        raise UsageError("search needs a file: paceline search CONFIG.yaml (`paceline search --help` shows one)")
    path = Path(given.positional[0])
    if not path.is_file():
        read_config(path)  # explains the error
    content = dict(plain_numbers(read_mapping(path)) or {})
    section = content.pop("search", None)
    if not isinstance(section, Mapping):
        raise UsageError(f"{path}: the section 'search' is missing (`paceline search --help` shows one)")
    try:
        job = make_config(content, path.resolve())
        settings = check_section(section)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    apply_overrides(job, given)
    for name in ("n_trials", "n_parallel"):
        if name in given.own:
            settings[name] = plain_numbers(int(given.own[name]) if str(given.own[name]).isdigit() else given.own[name])
    check_settings(settings)
    if job.framework != "torch":
        raise UsageError("search: TFTrainer has no hyperparameter_search; a search needs framework: torch")
    kept = [word for word in words if word != "--worker"]
    is_worker, is_json = (bool(given.own.get(name)) for name in ("worker", "json"))
    return SearchConfig(job, **settings, words=kept, is_worker=is_worker, is_json=is_json)


def check_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section's settings.

    Raises:
        UsageError: a key is unknown, or the space is invalid.
    """
    for key in section:
        if key not in KEYS:
            raise UsageError(f"search: unknown key {key!r}{suggest(str(key), KEYS)}")
    space = section.get("space")
    if isinstance(space, str) and REFERENCE.fullmatch(space):
        return dict(section)
    if not isinstance(space, Mapping) or not space:
        raise UsageError("search.space: give a mapping of names to values, or package.module:function")
    for name, values in space.items():
        check_values(str(name), values)
    return dict(section)


def check_values(name: str, values: object) -> None:
    """Raises UsageError if the values of a hyperparameter are neither a list nor bounds, or its name is unknown."""
    where = f"search.space.{name}"
    if not name.startswith(OF_MODEL) and name not in argument_names():
        raise UsageError(
            f"{where}: there is no such option{suggest(name, argument_names())}; keys of the model: model.KEY"
        )
    if isinstance(values, list) and values:
        odd = [value for value in values if value is not None and not isinstance(value, bool | int | float | str)]
        if odd:
            raise UsageError(f"{where}: {odd[0]!r} is neither a number nor a text; for others, name a function")
        return
    if not isinstance(values, Mapping) or not {"low", "high"} <= set(values):
        raise UsageError(f"{where}: give a list of values, or {{low: ..., high: ...}}")
    for key, value in values.items():
        if key not in BOUNDS:
            raise UsageError(f"{where}: unknown key {key!r}{suggest(str(key), BOUNDS)}")
        if key != "log" and not is_number(value):
            raise UsageError(f"{where}.{key}: {value!r} is not a number")
    check_bounds(where, values)


def check_bounds(where: str, values: Mapping[str, Any]) -> None:
    """Raises UsageError if the bounds of a hyperparameter contradict each other."""
    low, high, step, log = values["low"], values["high"], values.get("step"), values.get("log", False)
    if low > high:
        raise UsageError(f"{where}: low={low} is above high={high}")
    if not isinstance(log, bool):
        raise UsageError(f"{where}.log: {log!r} is neither true nor false")
    if log and low <= 0:
        raise UsageError(f"{where}: log: true needs bounds above 0, not low={low}")
    if step is None:
        return
    if log:
        raise UsageError(f"{where}: log and step exclude each other: leave one of them out")
    if step <= 0:
        raise UsageError(f"{where}.step: {step!r} is not above 0")
    if is_whole(values) and not isinstance(step, int):
        raise UsageError(f"{where}.step: {step!r} is not a whole number, as low and high are; write low: {low}.0")


def is_whole(values: Mapping[str, Any]) -> bool:
    """True if a hyperparameter takes whole numbers, because both of its bounds are."""
    return all(isinstance(values[key], int) for key in ("low", "high"))


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UsageError if a count or a time is not positive, or settings are invalid or exclude each other."""
    for name in ("n_trials", "n_parallel"):
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"search.{name}: {value!r} is not a whole number of 1 or more")
    timeout = settings.get("timeout")
    if timeout is not None and (not is_number(timeout) or timeout <= 0):
        raise UsageError(f"search.timeout: {timeout!r} is not a number of seconds above 0")
    if settings.get("n_parallel", 1) > 1 and (settings.get("halving") or settings.get("timeout")):
        raise UsageError("search.n_parallel: with halving or timeout, trials run one after another; leave it out")
    check_choices(settings)
    check_halving(settings)


def check_choices(settings: Mapping[str, Any]) -> None:
    """Raises UsageError if the direction, the objective, the sampler or the pruner is not named as it must be."""
    direction = settings.get("direction", "minimize")
    if isinstance(direction, list):
        raise UsageError("search.direction: give one; several are for Trainer.hyperparameter_search")
    if direction not in DIRECTIONS:
        raise UsageError(f"search.direction: {direction!r} is neither minimize nor maximize")
    objective = settings.get("objective")
    if objective is not None and not isinstance(objective, str):
        raise UsageError(f"search.objective: {objective!r} is neither a metric's name nor package.module:function")
    for name in ("sampler", "pruner"):
        value = settings.get(name)
        named = value.get("name") if isinstance(value, Mapping) else value
        if value is not None and not isinstance(named, str):
            raise UsageError(f"search.{name}: {value!r} names no class; give its name, or {{name: ..., option: value}}")


def check_halving(settings: Mapping[str, Any]) -> None:
    """Raises UsageError if the options of successive halving are invalid, or exclude other settings."""
    options = settings.get("halving")
    if options is None:
        return
    if settings.get("timeout") is not None:
        raise UsageError("search.halving: it cannot be combined with timeout; leave one of them out")
    pruner = settings.get("pruner")
    if (pruner.get("name") if isinstance(pruner, Mapping) else pruner) not in (None, "NopPruner"):
        raise UsageError("search.halving: it compares the trials itself and asks no pruner; leave one of them out")
    if not isinstance(options, Mapping) or not {"min_steps"} <= set(options) <= set(HALVING):
        raise UsageError(f"search.halving: {options!r} is not {{min_steps: ..., reduction_factor: 3}}")
    for name, least in HALVING.items():
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"search.halving.{name}: {value!r} is not a whole number of {least} or more")


def suggested(space: Mapping[str, Any], trial: Any) -> dict[str, Any]:
    """Returns a trial's value of each hyperparameter of a space."""
    params: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, list):
            params[name] = trial.suggest_categorical(name, values)
            continue
        options = {key: values[key] for key in ("log", "step") if key in values}
        ask = trial.suggest_int if is_whole(values) else trial.suggest_float
        params[name] = ask(name, values["low"], values["high"], **options)
    return params


def read_function(where: str, value: str) -> Any:
    """Returns the function that a setting names."""
    reference = read_reference(where, value)
    return None if reference is None else reference.load()
