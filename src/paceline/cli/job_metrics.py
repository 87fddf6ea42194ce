"""The metrics that a configuration names: `metrics: [accuracy, f1]`, computed by scikit-learn or torchmetrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paceline.cli.errors import UsageError, check_keys, suggest
from paceline.cli.metric_backends import find_backend
from paceline.core.outputs import EvalPrediction

logger = logging.getLogger(__name__)

SINGLE, MULTI, TOKENS, REGRESSION = "single_label", "multi_label", "token_classification", "regression"
TASKS = (SINGLE, MULTI, TOKENS, REGRESSION)
CLASSES = (SINGLE, MULTI, TOKENS)
AVERAGES = ("macro", "micro", "weighted")
IGNORED = -100  # label of a position without a target
# name -> tasks that it fits
METRICS: Mapping[str, tuple[str, ...]] = {
    "accuracy": CLASSES,
    "balanced_accuracy": (SINGLE, TOKENS),
    **{
        name: CLASSES
        for base in ("f1", "precision", "recall")
        for name in (base, *(f"{base}_{way}" for way in AVERAGES))
    },
    "mcc": (SINGLE, TOKENS),
    "mae": (REGRESSION,),
    "mse": (REGRESSION,),
    "rmse": (REGRESSION,),
    "r2": (REGRESSION,),
    "pearson": (REGRESSION,),
    "spearman": (REGRESSION,),
}
KEYS = ("names", "task", "threshold")


class MetricError(ValueError):
    """A metric does not fit the task, or the task cannot be read from the predictions and labels."""


@dataclass(frozen=True)
class MetricsSection:
    """The section `metrics`.

    Attributes:
        names: the metrics, in order.
        task: one of `TASKS`; None to read it from predictions and labels.
        threshold: predictions above it are positive, for multi_label and for one number per sample; None for 0, the
            threshold of logits, or 0.5 if all predictions are between 0 and 1.
    """

    names: tuple[str, ...]
    task: str | None = None
    threshold: float | None = None


def read_metrics(value: object) -> MetricsSection:
    """Reads `metrics`: a name, a list of names, or `{names: [...], task: ..., threshold: ...}`.

    Raises:
        UsageError: an unknown key, metric or task.
    """
    section: Mapping[str, Any] = value if isinstance(value, Mapping) else {"names": value}
    check_keys("metrics", section, KEYS)
    names = section.get("names")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"metrics: expected a list of names, of {', '.join(METRICS)}; not {names!r}")
    for name in names:
        if name not in METRICS:
            hint = suggest(name, METRICS) or f"; known are: {', '.join(METRICS)}"
            raise UsageError(f"metrics: there is no {name!r}{hint} (for another: compute_metrics: package.module:name)")
    task, threshold = section.get("task"), section.get("threshold")
    if task is not None and task not in TASKS:
        raise UsageError(f"metrics.task: {task!r} is none of {', '.join(TASKS)}")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise UsageError(f"metrics.threshold: {threshold!r} is not a number")
    if task is not None:
        try:
            check_fit(names, task)
        except MetricError as error:
            raise UsageError(str(error)) from error
    return MetricsSection(tuple(names), task, threshold)


def make_metrics(section: MetricsSection, model: object, shifts: bool = False) -> Callable[[Any], dict[str, float]]:
    """Returns `compute_metrics` for the named metrics.

    Args:
        section: the section `metrics`.
        model: its configuration may name the task.
        shifts: the prediction at a position is that of the next label, as in causal language models.

    Raises:
        UsageError: a metric does not fit the model's task, or no package that computes the metrics is installed.
    """
    task = section.task or task_of_model(model)
    try:
        check_fit(section.names, task)
        backend = find_backend()
    except (MetricError, ImportError) as error:
        raise UsageError(str(error)) from error
    return partial(compute, section, task, backend, shifts)


def task_of_model(model: Any) -> str | None:
    """Returns the task that the configuration of a transformers model names; None if labels decide it."""
    config, name = getattr(model, "config", None), type(model).__name__
    if config is None:
        return None
    if name.endswith(("ForTokenClassification", "ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return TOKENS
    kind = getattr(config, "problem_type", None)
    named = {"single_label_classification": SINGLE, "multi_label_classification": MULTI, "regression": REGRESSION}
    if kind in named:
        return named[kind]
    is_one = name.endswith("ForSequenceClassification") and getattr(config, "num_labels", None) == 1
    return REGRESSION if is_one else None


def check_fit(names: Sequence[str], task: str | None) -> None:
    """Checks that the metrics are defined for a task; None fits all.

    Raises:
        MetricError: one is not; the message names it, the task, and the metrics that are.
    """
    for name in names:
        if task is not None and task not in METRICS[name]:
            fitting = ", ".join(other for other, tasks in METRICS.items() if task in tasks)
            raise MetricError(f"metrics: {name} is not defined for {task}; these are: {fitting}")


def compute(
    section: MetricsSection, task: str | None, backend: Any, shifts: bool, prediction: EvalPrediction
) -> dict[str, float]:
    """Returns the metrics of an evaluation by name.

    Raises:
        MetricError: the task is unclear, or a metric does not fit it; the message names the remedy.
    """
    predictions, labels = prediction.predictions, prediction.label_ids
    if isinstance(predictions, tuple) and predictions:
        predictions = predictions[0]  # the logits; hidden states and the like follow
    if not isinstance(predictions, np.ndarray) or not isinstance(labels, np.ndarray):
        raise MetricError(
            "metrics: one array of predictions and one of labels are needed, not "
            f"{type(predictions).__name__} and {type(labels).__name__}: give compute_metrics instead"
        )
    if shifts and predictions.ndim == labels.ndim + 1:
        predictions, labels = predictions[:, :-1], labels[:, 1:]
    if predictions.ndim == 2 and predictions.shape[1] == 1 and labels.ndim == 1:
        predictions = predictions[:, 0]
    elif labels.ndim == 2 and labels.shape[1] == 1 and predictions.ndim == 1:
        labels = labels[:, 0]
    found = task or find_task(predictions, labels, section.names)
    check_fit(section.names, found)
    truth, answers, num_classes = align(found, predictions, labels, section.threshold)
    if has_unknown(found, predictions, labels):  # a model that diverged must not end its run here
        return dict.fromkeys(section.names, math.nan)
    return {name: backend(name, truth, answers, num_classes) for name in section.names}


def find_task(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str:
    """Returns the task that the arrays are of.

    Args:
        predictions: (samples, ..., classes), or the shape of the labels.
        labels: (samples, ...).
        names: the metrics; those of one number per sample decide between regression and two classes.

    Raises:
        MetricError: the arrays fit several tasks or none.
    """
    is_integer = np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool
    if predictions.ndim == labels.ndim + 1 and is_integer:
        return SINGLE if labels.ndim == 1 else TOKENS
    if predictions.shape != labels.shape:
        raise MetricError(
            f"metrics: predictions of shape {predictions.shape} and {labels.dtype} labels of shape {labels.shape} are "
            "of no known task: give compute_metrics instead"
        )
    if np.issubdtype(predictions.dtype, np.integer) and is_integer:
        return SINGLE if labels.ndim == 1 else TOKENS  # preprocess_logits_for_metrics has chosen the classes
    is_binary = bool(np.isin(labels, (0, 1)).all())
    if not is_binary:
        return REGRESSION
    if labels.ndim == 2 and not (labels.sum(-1) == 1).all():
        return MULTI
    if labels.ndim == 1 and all(REGRESSION in METRICS[name] for name in names):
        return REGRESSION
    if labels.ndim == 1:
        return SINGLE
    raise MetricError(
        f"metrics: each row of the labels, of shape {labels.shape}, has exactly one 1, so they are one of several "
        "classes or several labels: give metrics: {names: [...], task: single_label} or task: multi_label"
    )


def align(
    task: str, predictions: np.ndarray, labels: np.ndarray, threshold: float | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (labels, answers, number of classes or labels) in the form that the metrics take.

    Classes are integers of shape (samples,), without ignored ones; several labels are 0 or 1 of shape (samples,
    labels); numbers are float64.

    Raises:
        MetricError: the shapes do not fit, or no label is left.
    """
    if task in (REGRESSION, MULTI):
        if predictions.shape != labels.shape:
            raise MetricError(
                f"metrics: {task} needs predictions of the shape of the labels, {labels.shape}, not {predictions.shape}"
            )
        if task == REGRESSION:
            return labels.astype(np.float64), predictions.astype(np.float64), 1
        return labels.astype(np.int64), decide(predictions, threshold), labels.shape[-1]
    num_classes = 2
    if predictions.ndim == labels.ndim + 1:
        num_classes = predictions.shape[-1]
        predictions = predictions.argmax(-1)
    elif predictions.shape == labels.shape and labels.ndim == 2 and np.isin(labels, (0, 1)).all():
        num_classes = labels.shape[-1]  # one-hot labels
        predictions, labels = predictions.argmax(-1), labels.argmax(-1)
    elif predictions.shape != labels.shape:
        raise MetricError(f"metrics: predictions of shape {predictions.shape} do not fit labels of {labels.shape}")
    elif np.issubdtype(predictions.dtype, np.floating):
        predictions = decide(predictions, threshold)
    kept = labels != IGNORED
    truth, answers = labels[kept].astype(np.int64), predictions[kept].astype(np.int64)
    if not truth.size:
        raise MetricError(f"metrics: the evaluation has no labels other than {IGNORED}, which are ignored")
    if truth.min() < 0:
        raise MetricError(f"metrics: label {truth.min()} is neither a class nor {IGNORED}, which is ignored")
    return truth, answers, max(num_classes, int(truth.max()) + 1, int(answers.max()) + 1)


def has_unknown(task: str, predictions: np.ndarray, labels: np.ndarray) -> bool:
    """True if a prediction whose label counts is NaN, which is no class, although `argmax` returns one for it.

    In a regression it has to be finite.
    """
    if task == REGRESSION:
        return not bool(np.isfinite(predictions).all())
    if not np.issubdtype(predictions.dtype, np.floating):
        return False
    with np.errstate(invalid="ignore"):
        values = predictions.max(-1) if predictions.ndim == labels.ndim + 1 else predictions  # NaN if one of them is
    return bool((np.isnan(values) & (labels != IGNORED)).any())


def decide(predictions: np.ndarray, threshold: float | None) -> np.ndarray:
    """Returns 1 for predictions above the threshold, else 0."""
    if threshold is None:
        threshold = 0.0
        if predictions.size and predictions.min() >= 0 and predictions.max() <= 1:
            threshold = 0.5
            logger.warning(
                "metrics: all predictions are between 0 and 1 and taken as probabilities, with the threshold 0.5. If "
                "they are logits: metrics: {names: [...], threshold: 0}."
            )
    positive: np.ndarray = (predictions > threshold).astype(np.int64)
    return positive
