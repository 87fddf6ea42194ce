"""The best model at the end of a run: its checkpoint is loaded, or a warning says why the last weights are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from paceline.core.state import TrainerState

logger = logging.getLogger(__name__)


def load_best(state: TrainerState, metric: str | None, load: Callable[[Path], bool]) -> bool:
    """Loads the best model of a run; logs a warning if there is none.

    Args:
        state: the state at the end of the run.
        metric: `metric_for_best_model` of its plan.
        load: loads the weights of a checkpoint; returns False, with the reason logged, if it cannot.

    Returns: True if the model has the best weights now.
    """
    if state.best_model_checkpoint is not None:
        checkpoint = Path(state.best_model_checkpoint)
        return is_best(state, checkpoint) or load(checkpoint)
    if state.is_world_process_zero:
        reason = f"no evaluation gave a number for metric_for_best_model={metric!r}"
        if state.best_metric is not None:
            reason = f"no checkpoint of the best evaluation, at step {state.best_global_step}, is left"
        logger.warning("load_best_model_at_end=True: %s, and the weights of the last step are kept.", reason)
    return False


def is_best(state: TrainerState, checkpoint: Path) -> bool:
    """True if the current model is the best one and its own checkpoint could not be written.

    Logs a warning in this case, and if a better model was lost.

    Args:
        state: the state at the end of the run.
        checkpoint: the best checkpoint that was written.
    """
    step = state.best_global_step
    if not step or checkpoint.name == f"checkpoint-{step}":
        return False
    if step == state.global_step:
        logger.warning("The best model, of step %d, is the present one: no checkpoint is loaded.", step)
        return True
    logger.warning("The best model, of step %d, could not be written: %s is loaded instead.", step, checkpoint)
    return False
