"""The passes of an accumulation window, and the members of the engine that a strategy calls to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.pytorch.model.loss import Counts, LossNormalizer

# (compute_loss, normalizer, inputs, num_items_in_batch) -> loss, without gradients
LossOf = Callable[[Callable[..., Any], LossNormalizer, Any, Any], Tensor | None]


@dataclass(slots=True)
class Pass:
    """One forward and backward pass over one micro-batch.

    Attributes:
        batch: the micro-batch, on the host unless `is_prepared`.
        counts: the counts of the micro-batch; the weight is 0 in a dummy pass.
        index: position of the micro-batch in the window; 0 in a dummy pass.
        is_last: this is the last pass of the window.
        syncs_gradients: gradients are synchronized in its backward pass, if the strategy delays synchronization.
        needs_factor: the loss is scaled; False for the only pass of a window on a single process.
        is_required: the pass runs even with weight 0, because other processes wait in its collectives.
        is_dummy: the pass only takes part in collectives, and its loss counts as 0.
        is_prepared: the batch is on the device.
    """

    batch: Any
    counts: Counts
    index: int = 0
    is_last: bool = True
    syncs_gradients: bool = True
    needs_factor: bool = False
    is_required: bool = False
    is_dummy: bool = False
    is_prepared: bool = False

    def become_dummy(self, batch: Any) -> None:
        """Makes this pass, of weight 0, a dummy pass over another batch; None: it need not run."""
        self.batch, self.is_dummy = batch, True


class PassRunner(Protocol):
    """The members of the engine that a strategy uses to run an accumulation window.

    Attributes:
        optimizer: steps the parameters of the model.
        num_micro_steps: number of micro-batches in the window.
        prepare_inputs: moves a micro-batch to the device.
    """

    optimizer: Any
    num_micro_steps: int
    prepare_inputs: Callable[[Any], Any]

    def enter_training(self, model: nn.Module) -> None:
        """Switches a model and the optimizer to training mode."""
        ...

    def look_ahead(self, passes: list[Pass], model: nn.Module, loss_of: LossOf) -> list[Pass]:
        """Probes the losses of the window before its first pass, if due; returns its passes."""
        ...

    def run_pass(self, current: Pass, model: nn.Module | None = None) -> Tensor:
        """Runs forward and backward; returns the contribution to the window's loss, 0-dim, detached."""
        ...

    def skip_pass(self, current: Pass) -> None:
        """Skips a micro-batch of weight 0."""
        ...

    def end_pass(self, current: Pass | None) -> None:
        """Fires the event between two passes; `current` is None if no pass is in progress."""
        ...
