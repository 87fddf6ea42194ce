"""The evaluations of a run, as its log history tells them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.hub.names import HubNames

_PREFIX = "eval_"
# how long something took says nothing about the model
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "jit_compilation_time", "model_preparation_time")


@dataclass
class Evaluation:
    """One evaluation.

    Attributes:
        step: optimizer updates before it.
        epoch: passes over the data before it.
        training_loss: as logged last before it; None where nothing was logged.
        metrics: by name, without the prefix.
        is_of_training: made while training, not after it.
    """

    step: int
    epoch: float | None
    training_loss: float | None
    is_of_training: bool
    metrics: dict[str, float] = field(default_factory=dict)


def evaluations_of(history: list[dict[str, Any]]) -> list[Evaluation]:
    """The evaluations in a log history; those of several data sets at one step are one."""
    found: list[Evaluation] = []
    loss: float | None = None
    is_training = True
    for row in history:
        if "loss" in row:
            loss, is_training = row["loss"], True
        elif "train_runtime" in row:
            is_training = False
        metrics = metrics_of(row)
        if not metrics:
            continue
        step = int(row.get("step", 0))
        if not found or (found[-1].step, found[-1].is_of_training) != (step, is_training):
            found.append(Evaluation(step, row.get("epoch"), loss, is_training))
        found[-1].metrics.update(metrics)
    return found


def metrics_of(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation in a row of logs, the loss first."""
    return {
        name.removeprefix(_PREFIX): float(value)
        for name, value in sorted(row.items(), key=lambda item: item[0] != f"{_PREFIX}loss")
        if name.startswith(_PREFIX)
        and not name.endswith(_TIMES)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def describing(trainer: HubNames) -> Evaluation | None:
    """The evaluation of the model as it is now: the last one, or where the best model was loaded, that of the best."""
    found = evaluations_of(trainer.state.log_history)
    if not found:
        return None
    is_best = trainer.args.load_best_model_at_end and not trainer.is_in_train
    if is_best and found[-1].is_of_training and trainer.state.best_model_checkpoint is not None:
        return next((one for one in found if one.step == trainer.state.best_global_step), found[-1])
    return found[-1]


def final_metrics(trainer: HubNames) -> dict[str, float]:
    """The finite metrics of the evaluation that describes the model."""
    found = describing(trainer)
    return {} if found is None else {name: value for name, value in found.metrics.items() if math.isfinite(value)}
