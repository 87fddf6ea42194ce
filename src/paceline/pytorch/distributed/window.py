"""One accumulation window as a strategy runs it: its passes, and the calls of the engine that make them."""

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
        batch: on the host, unless `is_prepared`.
        counts: of the micro-batch; the weight is 0 in a dummy pass.
        index: of the micro-batch in the window; 0 in a dummy pass.
        is_last: no pass of the window comes after this one.
        syncs_gradients: the gradients are exchanged in its backward pass, where the strategy delays that exchange.
        needs_factor: its loss is weighed even if it stands alone; False for all that there is of a window.
        is_required: it runs even if it weighs nothing, because other processes wait for it.
        is_dummy: this process only takes part, and its loss counts as 0.
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


class PassRunner(Protocol):
    """The engine, as a strategy that runs an accumulation window calls it.

    Attributes:
        optimizer: over the parameters of the model.
        num_micro_steps: micro-batches of the window.
        prepare_inputs: moves a micro-batch to the device.
    """

    optimizer: Any
    num_micro_steps: int
    prepare_inputs: Callable[[Any], Any]

    def enter_training(self, model: nn.Module) -> None:
        """Switch a model and the optimizer to training mode."""
        ...

    def look_ahead(self, passes: list[Pass], model: nn.Module, loss_of: LossOf) -> list[Pass]:
        """Look at the losses of the window before its passes are made, where that is due; returns its passes."""
        ...

    def run_pass(self, current: Pass, model: nn.Module | None = None) -> Tensor:
        """Forward and backward; returns the contribution to the window's loss, 0-dim, detached."""
        ...

    def skip_pass(self, current: Pass) -> None:
        """Leave out a micro-batch that weighs nothing."""
        ...

    def end_pass(self, current: Pass | None) -> None:
        """Fire the event between two passes; None: no pass is in progress."""
        ...
