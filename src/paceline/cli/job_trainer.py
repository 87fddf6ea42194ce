"""Builds the Trainer of a job from the class, functions and callbacks of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.args.sections import Options
from paceline.cli.config import SECTIONS, JobConfig
from paceline.cli.errors import UsageError, suggest
from paceline.cli.job_data import Splits
from paceline.cli.job_metrics import METRICS, make_metrics, read_metrics
from paceline.cli.references import Reference, require_reference


def make_trainer(
    config: JobConfig,
    base: type,
    *,
    model: object,
    args: Options,
    splits: Splits,
    tokenizer: object,
    data_collator: object = None,
    shifts: bool = False,
    model_init: Callable[[Any], Any] | None = None,
) -> Any:
    """Builds a Trainer of the configuration's class, which is `base` or a subclass.

    Args:
        data_collator: the default if the configuration names none.
        shifts: the model's prediction at a position is that of the next label.
        model_init: makes the model of each trial of a search, instead of `model`.

    Raises:
        UsageError: a name cannot be found, or settings contradict each other.
    """
    functions = {name: bind(config, name, tokenizer) for name in SECTIONS if is_function(name)}
    if config.get("metrics") is not None:
        functions["compute_metrics"] = named_metrics(config, args, model, splits, shifts)
    check_best_metric(config, args)
    if functions["data_collator"] is None:
        functions["data_collator"] = data_collator
    trainer_class = find_trainer(config, base)
    try:
        return trainer_class(
            model=model,
            args=args,
            train_dataset=splits.train,
            eval_dataset=splits.eval,
            processing_class=tokenizer,
            callbacks=[make_callback(i, value) for i, value in enumerate(config.get("callbacks") or [])],
            **functions,
            **({} if config.get("members") is None else {"members": config.get("members")}),
            **({} if model_init is None else {"model_init": model_init}),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def is_function(section: str) -> bool:
    """True if a section names a function that is an argument of the Trainer."""
    return section not in (
        *("model", "tokenizer", "data", "preprocess", "trainer", "metrics"),
        *("augmentation", "calibration", "ensemble"),
    )


def named_metrics(config: JobConfig, args: Options, model: object, splits: Splits, shifts: bool) -> Any:
    """Returns the `compute_metrics` that the section `metrics` names.

    Raises:
        UsageError: the section is invalid, or there is nothing to compute metrics of.
    """
    section = read_metrics(config.get("metrics"))
    if splits.eval is None and splits.test is None:
        raise UsageError("metrics: the data has no eval and no test set: add one, or data.eval_fraction")
    if args.batch_eval_metrics:
        raise UsageError("metrics: batch_eval_metrics=True needs a function of batches: give compute_metrics instead")
    return make_metrics(section, model, shifts)


def check_best_metric(config: JobConfig, args: Options) -> None:
    """Checks before training that `metrics` gives the metric that decides which model is best.

    With code that may add metrics of its own (a trainer, callbacks, tasks of eval_harness, compiled metrics
    of Keras), it is not known here.

    Raises:
        UsageError: it does not.
    """
    metric = args.metric_for_best_model
    has_own_code = any(config.get(name) is not None for name in ("compute_metrics", "trainer", "callbacks"))
    if metric is None or has_own_code or args.log_token_metrics or args.eval_harness or config.framework == "tf":
        return
    given = config.get("metrics")
    named = () if given is None else read_metrics(given).names
    name = metric.removeprefix("eval_")
    known = ("loss", *named, "runtime", "per_second")
    is_known = any(name == each or name.endswith(f"_{each}") for each in known)  # after the name of a dataset
    if not is_known and (named or name in METRICS):
        hint = f": add it to metrics: [{', '.join((*named, name))}]" if name in METRICS else suggest(name, known[:-2])
        raise UsageError(f"metric_for_best_model: {metric!r} is no metric of the evaluation{hint}")


def bind(config: JobConfig, name: str, tokenizer: object) -> Any:
    """Returns the function that a section names, or None."""
    value = config.get(name)
    return None if value is None else require_reference(name, value).bind(tokenizer=tokenizer)


def find_trainer(config: JobConfig, base: type) -> Any:
    """Returns the Trainer class: `base` or a subclass."""
    value = config.get("trainer")
    if value is None:
        return base
    reference = require_reference("trainer", value)
    found = reference.load()
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(f"trainer: {reference.name} is no subclass of paceline.{base.__name__}")
    if reference.options:
        raise UsageError(f"trainer: {', '.join(reference.options)}: a trainer takes its settings from 'arguments'")
    return found


def make_callback(index: int, value: object) -> Any:
    """Loads an entry of `callbacks`: a class (instantiated) or an instance."""
    reference: Reference = require_reference(f"callbacks[{index}]", value)
    found = reference.load()
    return reference.call() if isinstance(found, type) or reference.options else found
