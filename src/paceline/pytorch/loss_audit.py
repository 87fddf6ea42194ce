"""Looks at the returned loss of an accumulation window, by extra forward passes, before any of it is weighed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.core.contracts import Strategy
from paceline.core.methods import is_ours
from paceline.pytorch.distributed.precision import widened
from paceline.pytorch.distributed.strategy import is_out_of_memory
from paceline.pytorch.distributed.window import LossOf
from paceline.pytorch.loss_probe import LossProbe, Part, choose_parts
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.objective import accepts
from paceline.pytorch.model.reductions import Observation

MAX_PARTS = 6  # micro-batches of a window that one look chooses from


@dataclass(eq=False)
class LossAudit:
    """Finds out what the returned loss is a mean over.

    Args:
        strategy: has the model.
        normalizer: is asked what is still open.
        model: as the strategy prepared it.
        compute_loss, prepare_inputs: the Trainer's, bound.
        must_match: all processes have to make the same number of extra passes.
        agree: `(flag) -> True if it is set on any process`, called alike on all of those that must match.
    """

    strategy: Strategy
    normalizer: LossNormalizer
    model: nn.Module
    compute_loss: Callable[..., Tensor]
    prepare_inputs: Callable[[Any], Any]
    must_match: bool
    agree: Callable[[bool], bool]

    def __post_init__(self) -> None:
        self._passes_count = accepts(self.compute_loss, "num_items_in_batch")

    def observe(
        self, inputs: object, index: int, batches: Sequence[Any], counts: Sequence[Counts], num_items: object
    ) -> list[Observation]:
        """Look at the micro-batch in progress and at others of its window.

        Args:
            inputs: the micro-batch in progress, prepared.
            index: of it in the window.
            batches: of the window, on the host.
            counts: of them.
            num_items: as the model is given it.
        """
        parts = [Part(inputs, counts[index])]
        if is_ours(self.prepare_inputs):  # another may count its calls
            for place in choose_parts(counts, index, MAX_PARTS - 1):
                try:
                    parts += self._prepare([place], batches, counts)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    break  # there is no room for another one: the look goes on, as that of other processes does
        owners = [self.prepare_inputs, self.compute_loss]
        probe = LossProbe(self.model, self._loss_of, must_match=self.must_match, owners=owners, agree=self.agree)
        return probe.look(self.normalizer, parts, num_items)

    def observe_ahead(
        self, model: nn.Module, loss_of: LossOf, batches: Sequence[Any], counts: Sequence[Counts], num_items: object
    ) -> list[Observation]:
        """Look at a window none of whose passes has begun.

        Args:
            model: whose state the extra passes leave as it is.
            loss_of: the strategy's way to a loss, for all of its processes.
            batches, counts, num_items: as for `observe`.
        """
        parts = self._prepare(choose_parts(counts, -1, MAX_PARTS), batches, counts)

        def loss_of_batch(inputs: object, num_items: object) -> Tensor | None:
            return loss_of(self.compute_loss, self.normalizer, inputs, num_items)

        probe = LossProbe(model, loss_of_batch, owners=[self.compute_loss])
        return probe.look(self.normalizer, parts, num_items) if parts else []

    def _prepare(self, places: Sequence[int], batches: Sequence[Any], counts: Sequence[Counts]) -> list[Part]:
        return [Part(self.prepare_inputs(copy.copy(batches[place])), counts[place]) for place in places]

    def _loss_of(self, inputs: object, num_items: object) -> Tensor | None:
        """The loss of a batch as the Trainer makes it, without gradients. Nothing is autocast where that works."""
        numbers = {"num_items_in_batch": num_items} if self._passes_count else {}
        if not self.strategy.precision.autocasts:
            return self.compute_loss(self.model, inputs, **numbers)
        try:
            with widened(self.model):
                return self.compute_loss(self.model, copy.copy(inputs), **numbers)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            with self.strategy.forward_context(), widened(self.model):  # a kernel that knows 16 bits only
                return self.compute_loss(self.model, inputs, **numbers)
