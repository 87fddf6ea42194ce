"""The loss without logits in a run: its readers, and the agreement of all processes on the result of its check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.args.regularizers import regularizers_of
from paceline.args.sections import Options
from paceline.pytorch.distributed.collectives import sum_ints
from paceline.pytorch.distributed.world import World
from paceline.pytorch.optim.layerwise import steps_in_backward

if TYPE_CHECKING:
    from paceline.pytorch.model.linear_loss import LinearLoss

OPTION = "linear_cross_entropy"


class LinearLossRun:
    """Follows the optimizer steps of a run.

    Args:
        find: returns the chunked loss of the current objective; None: it has none.
        model: the model as the user gave it.
        options: the arguments.
        world: the processes.
        num_steps: returns the optimizer steps so far.

    Raises:
        UnsupportedOption: chunks are required, and the model has no head that permits them.
    """

    def __init__(
        self,
        find: Callable[[], LinearLoss | None],
        model: nn.Module,
        options: Options,
        world: World,
        num_steps: Callable[[], int],
    ) -> None:
        self._find, self._world, self._num_steps = find, world, num_steps
        self._reader = find_reading_option(options)
        self._optimizer: Any = None
        part = find()
        if part is not None:
            part.bind(model)

    def join(self, engine: Any) -> None:
        """Notes the optimizer of a run, before whose steps logits that are still kept are computed."""
        self._optimizer = engine.optimizer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Follows the optimizer steps while entered."""
        handle = self._optimizer.register_step_pre_hook(self._before_step) if self._can_follow() else None
        part = self._find()
        if part is not None:
            part.asked_by = self._reader
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            part = self._find()
            if part is not None:
                part.asked_by = None

    def _can_follow(self) -> bool:
        """Returns True if the optimizer calls step hooks. A wrapper that leaves out Optimizer.__init__ calls none."""
        has_hooks = hasattr(self._optimizer, "_optimizer_step_pre_hooks")
        return has_hooks and not steps_in_backward(self._optimizer)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        part = self._find()
        if part is None:
            return
        part.asked_by = self._reader  # a training phase may have made another objective
        part.settle()
        number = self._num_steps() + 1
        if number & (number - 1) == 0:  # 1, 2, 4, 8, ...
            self.agree()

    def agree(self) -> None:
        """Makes all processes compute their logits if the check of one of them failed. A collective."""
        part = self._find()
        if part is None or part.is_required or not self._world.is_distributed:
            return
        if sum_ints(self._world, [int(part.is_right is False)])[0]:
            part.is_right = False


def find_reading_option(options: Options) -> str | None:
    """Returns an option, with its value, that reads the logits of training passes; None if there is none."""
    if options.data_map:
        return "data_map=True"
    if options.loss_by_source:
        return f"loss_by_source={options.loss_by_source!r}"
    for each in regularizers_of(options):
        if OPTION in each.excludes:
            return f"the regularizer {each.name}"
    return None
