"""What train, evaluate, predict and a search return, and what `compute_metrics` is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class EvalPrediction:
    """What `compute_metrics` is given. Unpacks into (predictions, label_ids[, inputs][, losses]), the parts that exist.

    Args:
        predictions: model outputs, one row per sample; an array or a (nested) tuple of arrays.
        label_ids: the targets, in the same form.
        inputs: the inputs, where `include_for_metrics` names them.
        losses: one loss per sample, where `include_for_metrics` names them.
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

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """What `evaluation_loop` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `predict` returns: as many rows of predictions as there were samples."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """What `train` returns.

    `training_loss` is the mean over the updates of this call: NaN where none of them had a loss, 0.0 where none was
    made (a finished run that was resumed).
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """What `hyperparameter_search` returns.

    Attributes:
        run_id: the trial; its folder is `run-{run_id}`.
        objective: what was reached (several where several were asked for).
        hyperparameters: what was chosen for it.
        run_summary: the backend's own account of the search.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def check_metrics(metrics: Any) -> Mapping[str, Any]:
    """What `compute_metrics` returned.

    Raises:
        TypeError: it is not a dict.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute_metrics returned {type(metrics).__name__}; it must return a dict of names and numbers, such as "
            '{"accuracy": 0.9}.'
        )
    return metrics
