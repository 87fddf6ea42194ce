"""Return types of train, evaluate, predict and hyperparameter search, and the argument of `compute_metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class EvalPrediction:
    """The argument of `compute_metrics`. Unpacks into (predictions, label_ids[, inputs][, losses]), those not None.

    Args:
        predictions: model outputs, one row per sample; an array or a (nested) tuple of arrays.
        label_ids: the targets, in the same form.
        inputs: the inputs, if `include_for_metrics` names them.
        losses: one loss per sample, if `include_for_metrics` names them.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements: tuple[Any, ...] = (predictions, label_ids)
        if inputs is not None:
            self.elements += (inputs,)
        if losses is not None:
            self.elements += (losses,)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, idx: int) -> Any:
        return self.elements[idx]


class EvalLoopOutput(NamedTuple):
    """The result of `evaluation_loop`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `predict`: one row of predictions per sample."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `train`.

    `training_loss` is the mean over the optimizer steps of this call: NaN if none of them had a loss, 0.0 if there
    were none (a finished run that was resumed).
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The result of `hyperparameter_search`.

    Attributes:
        run_id: the best trial; its folder is `run-{run_id}`.
        objective: its objective (a list for a multi-objective search).
        hyperparameters: its hyperparameters.
        run_summary: the backend's summary of the search.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def check_metrics(metrics: Any) -> Mapping[str, Any]:
    """Returns the result of `compute_metrics` after a check of its type.

    Raises:
        TypeError: it is not a dict.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute_metrics returned {type(metrics).__name__}; it must return a dict of names and numbers, such as "
            '{"accuracy": 0.9}.'
        )
    return metrics
