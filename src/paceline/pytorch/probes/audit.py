"""Probes the loss of an accumulation window by extra forward passes, before the loss is scaled."""

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
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.objective import accepts
from paceline.pytorch.model.reductions import Observation
from paceline.pytorch.probes.loss import LossProbe, Part, choose_parts

MAX_PARTS = 6  # maximum number of micro-batches of a window in one probe


@dataclass(eq=False)
class LossAudit:
    """Infers the reduction of the returned loss.

    Args:
        strategy: holds the model.
        normalizer: knows which reductions are still open.
        model: as the strategy prepared it.
        compute_loss, prepare_inputs: the Trainer's, bound.
        must_match: all processes must run the same number of extra passes.
        agree: `(flag) -> True if it is set on any process`; with `must_match`, called equally often on all.
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
        """Probes the micro-batch in progress and others of its window.

        Args:
            inputs: the micro-batch in progress, prepared.
            index: its position in the window.
            batches: micro-batches of the window, on the host.
            counts: the counts of each.
            num_items: `num_items_in_batch` as the model gets it.
        """
        parts = [Part(inputs, counts[index])]
        if is_ours(self.prepare_inputs):  # an overridden one may count its calls
            for place in choose_parts(counts, index, MAX_PARTS - 1):
                try:
                    parts += self._prepare([place], batches, counts)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    break  # no memory for another batch: continue with fewer, as the other processes also probe
        owners = [self.prepare_inputs, self.compute_loss]
        probe = LossProbe(
            self.model,
            self._loss_of,
            copies=self._copies(counts),
            must_match=self.must_match,
            owners=owners,
            agree=self.agree,
            is_gated=self.strategy.memory_gate is not None,
        )
        return probe.look(self.normalizer, parts, num_items)

    def observe_ahead(
        self, model: nn.Module, loss_of: LossOf, batches: Sequence[Any], counts: Sequence[Counts], num_items: object
    ) -> list[Observation]:
        """Probes a window before its first pass.

        Args:
            model: the model; the extra passes leave its state unchanged.
            loss_of: computes a loss as the strategy does, on all of its processes.
            batches, counts, num_items: as for `observe`.
        """
        parts = self._prepare(choose_parts(counts, -1, MAX_PARTS), batches, counts)

        def loss_of_batch(inputs: object, num_items: object) -> Tensor | None:
            return loss_of(self.compute_loss, self.normalizer, inputs, num_items)

        probe = LossProbe(model, loss_of_batch, copies=self._copies(counts), owners=[self.compute_loss])
        return probe.look(self.normalizer, parts, num_items) if parts else []

    def _copies(self, counts: Sequence[Counts]) -> int:
        """Returns the number of micro-batches of a window over all processes whose gradients are averaged."""
        return len(counts) * round(self.normalizer.scaled_factor)

    def _prepare(self, places: Sequence[int], batches: Sequence[Any], counts: Sequence[Counts]) -> list[Part]:
        return [Part(self.prepare_inputs(copy.copy(batches[place])), counts[place]) for place in places]

    def _loss_of(self, inputs: object, num_items: object) -> Tensor | None:
        """Returns the loss that `compute_loss` computes for a batch, without autocast if possible."""
        numbers = {"num_items_in_batch": num_items} if self._passes_count else {}
        if not self.strategy.precision.autocasts:
            return self.compute_loss(self.model, inputs, **numbers)
        try:
            with widened(self.model):
                return self.compute_loss(self.model, copy.copy(inputs), **numbers)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            with self.strategy.forward_context(), widened(self.model):  # some kernels support 16-bit types only
                return self.compute_loss(self.model, inputs, **numbers)
