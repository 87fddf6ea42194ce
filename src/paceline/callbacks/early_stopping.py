"""Stop when the model has ceased to get better."""

from __future__ import annotations

import logging
import math
from typing import Any

from paceline.core.events import TrainerCallback
from paceline.core.state import ExportableState, TrainerControl, TrainerState

logger = logging.getLogger(__name__)


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after `early_stopping_patience` evaluations in a row without a better `metric_for_best_model`.

    Args:
        early_stopping_patience: evaluations to wait for a better one.
        early_stopping_threshold: by how much, at least, a better one must differ from the best so far.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        self._has_warned = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check that there will be something to go by.

        Raises:
            ValueError: nothing is evaluated, or no metric decides about the best model.
        """
        self._has_warned = False
        if args.eval_strategy == "no":
            raise ValueError(
                'EarlyStoppingCallback needs evaluations on the way: set eval_strategy="steps" or "epoch" '
                f"(it is {str(getattr(args.eval_strategy, 'value', args.eval_strategy))!r})."
            )
        if _metric_name(args) is None:
            raise ValueError(
                "EarlyStoppingCallback needs to know what to go by: metric_for_best_model is not set. "
                'Set metric_for_best_model="loss", or the name of a metric that compute_metrics returns.'
            )
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the model after training will be the "
                "last one, not the best."
            )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        name = _metric_name(args)
        if name is None or metrics is None:
            return
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            if not self._has_warned:  # each of several evaluation sets comes here: one of them has it
                self._has_warned = True
                logger.warning(
                    "EarlyStoppingCallback goes by %s, which this evaluation did not give. It gave: %s.",
                    key,
                    ", ".join(sorted(metrics)),
                )
            return
        self.check_metric_value(args, state, control, metrics[key])
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Count one more evaluation without a better value, or start to count anew."""
        best = state.best_metric
        if best is None:
            is_progress = not math.isnan(metric_value)
        else:
            gain = metric_value - best if _greater_is_better(args) else best - metric_value
            is_progress = gain > (self.early_stopping_threshold or 0.0)
        self.early_stopping_patience_counter = 0 if is_progress else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        """Patience and threshold, and how many evaluations have been in vain."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def state_dict(self) -> dict[str, Any]:
        """The same as `state`."""
        return self.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; patience and threshold stay those that this run was given."""
        self.early_stopping_patience_counter = int(state["attributes"]["early_stopping_patience_counter"])


def _metric_name(args: Any) -> str | None:
    name: str | None = args.metric_for_best_model
    if name is None and (args.load_best_model_at_end or getattr(args, "save_strategy", "no") == "best"):
        return "loss"
    return name


def _greater_is_better(args: Any) -> bool:
    if args.greater_is_better is not None:
        return bool(args.greater_is_better)
    return not (_metric_name(args) or "loss").endswith("loss")
