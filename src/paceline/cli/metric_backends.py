"""The packages that compute the metrics of a configuration: scikit-learn, else torchmetrics."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.core.optional import is_installed, require

# (name, labels, answers, number of classes) -> value
Backend = Callable[[str, np.ndarray, np.ndarray, int], float]


def find_backend() -> Backend:
    """Returns the function that computes a metric by an installed package.

    Raises:
        ImportError: neither package is installed; the message names the extra.
    """
    if not is_installed("sklearn") and is_installed("torchmetrics"):
        return by_torchmetrics
    require("sklearn.metrics", "metrics")
    return by_sklearn


def average_of(name: str, truth: np.ndarray, num_classes: int) -> tuple[str, str]:
    """Returns (metric, average): `f1_micro` is ("f1", "micro"); `f1` that of class 1 if there are two, else the macro
    average over classes or labels.
    """
    base, _, average = name.partition("_")
    if not average:
        average = "binary" if truth.ndim == 1 and num_classes == 2 else "macro"
    return base, average


def by_sklearn(name: str, truth: np.ndarray, answers: np.ndarray, num_classes: int) -> float:
    """Returns a metric by scikit-learn; 0 for a precision, recall or F1 without samples."""
    metrics: Any = importlib.import_module("sklearn.metrics")
    plain = {
        "accuracy": "accuracy_score",
        "balanced_accuracy": "balanced_accuracy_score",
        "mcc": "matthews_corrcoef",
        "mae": "mean_absolute_error",
        "mse": "mean_squared_error",
        "rmse": "root_mean_squared_error",
        "r2": "r2_score",
    }
    if name in ("pearson", "spearman"):
        stats: Any = importlib.import_module("scipy.stats")  # a dependency of scikit-learn
        return float(getattr(stats, f"{name}r")(truth.ravel(), answers.ravel()).statistic)
    if name in plain:
        return float(getattr(metrics, plain[name])(truth, answers))
    base, average = average_of(name, truth, num_classes)
    return float(getattr(metrics, f"{base}_score")(truth, answers, average=average, zero_division=0))


def by_torchmetrics(name: str, truth: np.ndarray, answers: np.ndarray, num_classes: int) -> float:
    """Returns a metric by torchmetrics; 0 for a precision, recall or F1 without samples."""
    torch: Any = importlib.import_module("torch")
    functional: Any = require("torchmetrics.functional", "metrics")
    target, preds = (torch.from_numpy(np.ascontiguousarray(array)) for array in (truth, answers))
    regression = {
        "mae": "mean_absolute_error",
        "mse": "mean_squared_error",
        "r2": "r2_score",
        "pearson": "pearson_corrcoef",
        "spearman": "spearman_corrcoef",
    }
    if name == "rmse":
        number = target.shape[-1] if target.ndim == 2 else 1  # as in scikit-learn, the mean of those of the columns
        return float(functional.mean_squared_error(preds, target, squared=False, num_outputs=number).mean())
    if name in ("pearson", "spearman"):
        target, preds = target.ravel(), preds.ravel()
    if name in regression:
        return float(getattr(functional, regression[name])(preds, target))
    classes: Any = functional.classification
    if name == "mcc":
        return float(classes.multiclass_matthews_corrcoef(preds, target, num_classes))
    if name == "balanced_accuracy":
        present = torch.unique(target)  # as in scikit-learn, classes without samples do not count
        return float(classes.multiclass_recall(preds, target, num_classes, average="none")[present].mean())
    if truth.ndim == 2 and name == "accuracy":
        return float(classes.multilabel_exact_match(preds, target, num_classes))
    if name == "accuracy":
        return float(classes.multiclass_accuracy(preds, target, num_classes, average="micro"))
    base, average = average_of(name, truth, num_classes)
    function = "f1_score" if base == "f1" else base
    if average == "binary":
        return float(getattr(classes, f"binary_{function}")(preds, target))
    kind = "multilabel" if truth.ndim == 2 else "multiclass"
    return float(getattr(classes, f"{kind}_{function}")(preds, target, num_classes, average=average))
