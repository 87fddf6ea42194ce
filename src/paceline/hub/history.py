"""The evaluations of a run, from its log history."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.hub.described import CardRun

_PREFIX = "eval_"
# timings do not describe the model
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "jit_compilation_time", "model_preparation_time")


@dataclass
class Evaluation:
    """One evaluation.

    Attributes:
        step: optimizer steps before the evaluation.
        epoch: epochs before the evaluation.
        training_loss: the last training loss logged before the evaluation, or None.
        is_of_training: True for an evaluation during training, False after it.
        metrics: metrics by name, without the prefix.
    """

    step: int
    epoch: float | None
    training_loss: float | None
    is_of_training: bool
    metrics: dict[str, float] = field(default_factory=dict)


def evaluations_of(history: list[dict[str, Any]]) -> list[Evaluation]:
    """Returns the evaluations in a log history. Evaluations of several datasets at one step are merged."""
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
    """Returns the evaluation metrics in a log row, the loss first."""
    return {
        name.removeprefix(_PREFIX): float(value)
        for name, value in sorted(row.items(), key=lambda item: item[0] != f"{_PREFIX}loss")
        if name.startswith(_PREFIX)
        and not name.endswith(_TIMES)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def describing(run: CardRun) -> Evaluation | None:
    """Returns the evaluation of the current model: the last one, or the best model's if that was loaded."""
    found = evaluations_of(run.state.log_history)
    if not found:
        return None
    if run.is_best_loaded and found[-1].is_of_training and run.state.best_model_checkpoint is not None:
        return next((one for one in found if one.step == run.state.best_global_step), found[-1])
    return found[-1]


def final_metrics(run: CardRun) -> dict[str, float]:
    """Returns the finite metrics of the evaluation that describes the model."""
    found = describing(run)
    return {} if found is None else {name: value for name, value in found.metrics.items() if math.isfinite(value)}
