"""Early stopping."""

from __future__ import annotations

import logging
import math
from typing import Any

from paceline.args.metric_names import is_maximized
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import ExportableState, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after `early_stopping_patience` evaluations in a row without a better `metric_for_best_model`.

    Args:
        early_stopping_patience: evaluations without an improvement before training stops.
        early_stopping_threshold: minimum difference from the best value that counts as an improvement.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        self._has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks that there are evaluations and a metric.

        Raises:
            ValueError: nothing is evaluated, or metric_for_best_model is not set.
        """
        self._has_warned = False
        if args.eval_strategy == "no":
            raise ValueError(
                'EarlyStoppingCallback needs evaluations on the way: set eval_strategy="steps" or "epoch" '
                f"(it is {str(getattr(args.eval_strategy, 'value', args.eval_strategy))!r})."
            )
        if _metric_name(args) is None:
            raise ValueError(
                "EarlyStoppingCallback requires metric_for_best_model, which is not set. "
                'Set metric_for_best_model="loss", or the name of a metric that compute_metrics returns.'
            )
        if not args.load_best_model_at_end:
            logger.warning(
                "Using EarlyStoppingCallback without load_best_model_at_end=True: once training is finished, the model "
                "is the last one, not the best."
            )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        name = _metric_name(args)
        if name is None or metrics is None:
            return
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            if not self._has_warned:  # with several evaluation sets, often only one of them has the metric
                self._has_warned = True
                logger.warning(
                    "early stopping required metric_for_best_model, but did not find %s in this evaluation, which "
                    "gave: %s. This evaluation is ignored.",
                    key,
                    ", ".join(sorted(metrics)),
                )
            return
        self.check_metric_value(args, state, control, metrics[key])
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Increments the counter of evaluations without an improvement, or resets it after an improvement."""
        best = state.best_metric
        if best is None:
            is_progress = not math.isnan(metric_value)
        else:
            gain = metric_value - best if _greater_is_better(args) else best - metric_value
            is_progress = gain > (self.early_stopping_threshold or 0.0)
        self.early_stopping_patience_counter = 0 if is_progress else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        """Returns patience, threshold, and the number of evaluations without an improvement."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the same as `state`."""
        return self.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counter; patience and threshold stay those of this run."""
        self.early_stopping_patience_counter = int(state["attributes"]["early_stopping_patience_counter"])


def _metric_name(args: TrainingArguments) -> str | None:
    name: str | None = args.metric_for_best_model
    if name is None and (args.load_best_model_at_end or getattr(args, "save_strategy", "no") == "best"):
        return "loss"
    return name


def _greater_is_better(args: TrainingArguments) -> bool:
    if args.greater_is_better is not None:
        return bool(args.greater_is_better)
    return is_maximized(_metric_name(args) or "loss")
