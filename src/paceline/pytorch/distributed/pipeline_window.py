"""The losses of an accumulation window in a pipeline, computed on the last stage when the schedule requests them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from paceline.core.methods import is_ours
from paceline.pytorch.distributed.last_stage import LastStage
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.model.loss import Counts


class WindowLosses:
    """Computes the losses of a window on the last stage, when the schedule requests them.

    Args:
        engine: runs a pass.
        passes: the passes of the window.
        last: the last stage, called in place of the model.
        take_loss: returns the loss of the latest call of `backward`, scaled, with its graph.

    Attributes:
        batches: the batches of all passes, prepared once because every stage reads them.
        weighing: the passes that are not dummies.
    """

    def __init__(
        self, engine: PassRunner, passes: list[Pass], last: LastStage, take_loss: Callable[[], Tensor]
    ) -> None:
        self.engine, self.last, self.take_loss = engine, last, take_loss
        passes = [replace(each, batch=engine.prepare_inputs(each.batch), is_prepared=True) for each in passes]
        self.batches = [each.batch for each in passes]
        self.weighing = [each for each in passes if not each.is_dummy]
        first = self.batches[0]
        self._dummy = Pass(first, Counts(0, None, 0), is_last=False, needs_factor=True, is_dummy=True, is_prepared=True)
        self._losses: dict[int, Tensor] = {}

    def make(self, number: int) -> Tensor:
        """Returns the scaled loss of a micro-batch, with its graph; an index beyond the window gives a loss of 0."""
        is_dummy = number >= len(self.weighing)
        current = self._dummy if is_dummy else self.weighing[number]
        current = replace(current, batch=copy.copy(current.batch))
        self.last.expect(current.batch)
        loss = self.engine.run_pass(current, self.last)
        self.last.check_called("compute_loss")
        if not is_dummy:
            self._losses[number] = loss
        return self.take_loss()

    def found(self) -> list[Tensor]:
        """Returns the contributions of the micro-batches to the window's loss, in order; empty on other stages."""
        return [self._losses[number] for number in sorted(self._losses)]


def check_own(training_step: Callable[..., Tensor]) -> None:
    """Refuses an overridden `training_step`: the schedule interleaves forward and backward of the micro-batches.

    Raises:
        ValueError: a subclass overrides `training_step`.
    """
    if not is_ours(training_step):
        name = getattr(training_step, "__qualname__", "training_step")
        raise ValueError(
            f"{name}: training_step cannot be overridden with stages on several processes, whose schedule runs forward "
            "and backward of all micro-batches. Override compute_loss, which the last stage calls, or leave 'pp' out "
            "of parallel."
        )
