"""Metrics of a run: speed, names, JSON-safe values, and comparison."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import time
from collections.abc import Mapping
from typing import Any


class StartTime(float):
    """The current `time.time()`; durations since then use the monotonic clock."""

    _begun: float

    def __new__(cls) -> StartTime:
        made = super().__new__(cls, time.time())
        made._begun = time.monotonic()
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)  # the monotonic clock of another process has another origin

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._begun


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Returns `{split}_runtime` in seconds, and the rate per second of each given count since `start_time`.

    `start_time` is a `StartTime` or a value of `time.time()`. There are no rates if no measurable time has passed.
    """
    runtime = start_time.elapsed() if isinstance(start_time, StartTime) else time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime > 0:
        for unit, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
            if count is not None:
                metrics[f"{split}_{unit}_per_second"] = round(count / runtime, 3)
    return metrics


def prefix_metrics(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Adds `prefix_` to the metric names that lack it, in the same order."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def jsonable(value: object) -> Any:
    """Converts a value to plain Python: numbers, strings, lists, dicts.

    Scalars of numpy or of a tensor library become Python numbers (reading one from a device synchronizes), arrays
    become lists, enums their value, dataclasses dicts, and anything else its text.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, Mapping):
        return {str(jsonable(name)): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, (bool, int, float, str)):  # their subclasses: np.float64 is a float, np.str_ a str
        return value.item() if hasattr(value, "item") else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        plain = value.tolist()
        return str(value) if plain is value else jsonable(plain)
    return str(value)


class MetricNotFound(KeyError):
    """`metric_for_best_model` is not among the metrics of the evaluation."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes


def best_metric_value(metrics: Mapping[str, Any], name: str) -> float:
    """Returns the value of `metric_for_best_model`, named with or without `eval_`.

    Raises:
        MetricNotFound: there is no such metric; the message lists the available ones.
        TypeError: it is not a number.
    """
    prefixed = name if name.startswith("eval_") else f"eval_{name}"
    key = prefixed if prefixed in metrics else name
    if key not in metrics:
        available = ", ".join(sorted(metrics)) or "none"
        raise MetricNotFound(
            f"The `metric_for_best_model` training argument is set to {name!r}, which is not found in the evaluation "
            f"metrics. metric_for_best_model={name!r}: the evaluation gave no {prefixed!r}. It gave: {available}. Name "
            "one of these, or return it from compute_metrics."
        )
    value = jsonable(metrics[key])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"metric_for_best_model={name!r}: {key} must be a number to compare, it is {value!r:.80}.")
    return float(value)


def is_better(metric: float, best: float | None, greater_is_better: bool) -> bool:
    """True if `metric` is strictly better than `best`; any number beats None and NaN, and NaN beats nothing."""
    if math.isnan(metric):
        return False
    if best is None or math.isnan(best):
        return True
    return metric > best if greater_is_better else metric < best


# Not about the quality of a model: excluded from the sum that a search optimizes.
_UNRELATED_ENDINGS = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The default objective of a hyperparameter search: the sum of `compute_metrics`' values, else `eval_loss`.

    Raises:
        MetricNotFound: there is neither.
    """
    own = [
        value
        for name, value in metrics.items()
        if name not in ("eval_loss", "epoch") and not name.endswith(_UNRELATED_ENDINGS) and "_mem_" not in name
    ]
    return sum(own) if own else best_metric_value(metrics, "eval_loss")


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Formats metrics for display: memory in MB, times as h:mm:ss.cc, operations in GF, 4 decimals."""
    return {name: _format_metric(name, value) for name, value in metrics.items()}


def _format_metric(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if "_runtime" in name:
        hundredths = int(abs(value - int(value)) * 100)
        return f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
