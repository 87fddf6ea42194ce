"""Sharpness-aware minimization: SAM (Foret et al., 2021, arXiv:2010.01412) and ASAM (Kwon et al., 2021, 2102.11600).

An optimizer step runs its accumulation window twice. The first time gives the gradient at the weights, along which they
are moved by `rho` in the norm of all parameters on all processes. The second time gives the gradient there; then the
weights are restored bit for bit, and the optimizer steps with that gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.regularizers import SAM
from paceline.pytorch.data.batches import recast
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import total_norm
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.tensor_parts import is_dtensor
from paceline.pytorch.optim.layerwise import steps_in_backward
from paceline.pytorch.probes.side_effects import frozen_that_may_change
from paceline.pytorch.regularizers.passes import Context, RegularizerPass
from paceline.pytorch.sync import RunWindow

TINY = 1e-12  # added to the norm of the gradient, which may be 0


class SharpnessAware(RegularizerPass):
    """Runs each window twice: at the weights, and at weights nearby where the loss is higher.

    Both times draw the same random numbers (dropout masks). The second time leaves no trace in buffers, such as the
    statistics of batch norm, and in frozen parameters, such as those of a momentum encoder. The loss that is logged is
    that at the weights; the norm of the gradient that is logged and clipped is that of the second time.

    Args:
        settings: a SAM.
        context: the parts of the run.

    Raises:
        UnsupportedOption: the gradient of the whole step is not available here.
    """

    def __init__(self, settings: SAM, context: Context) -> None:
        super().__init__(settings, context)
        strategy = context.strategy
        if not strategy.mesh.is_data_only:
            raise UnsupportedOption(
                "regularizers: sam is not supported with tensor, context or pipeline parallelism: use parallel='ddp' "
                "or 'fsdp', or leave it out."
            )
        if strategy.precision.scales or strategy.precision.has_masters:
            raise UnsupportedOption("regularizers: sam is not supported with fp16 or Apex: set bf16=True instead.")
        if steps_in_backward(context.optimizer):
            raise UnsupportedOption(
                "regularizers: sam with an optimizer that steps in the backward pass is not supported: choose another "
                "optim, or leave it out."
            )

    def run_window(self, call: RunWindow, engine: Engine, passes: list[Pass]) -> list[Tensor]:
        """Runs the window twice; returns the losses of the first time."""
        strategy, model = self.context.strategy, self.context.model
        # user code may pop labels, or change its inputs in place
        again = [replace(each, batch=recast(copy.copy(each.batch), torch.clone)) for each in passes]
        with preserved_rng():
            losses = call(engine, passes)
        with self.moved(strategy.parameters), unchanged(model), engine.unobserved():
            strategy.clear_gradients()
            call(engine, again)
        return losses

    @contextmanager
    def moved(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Moves the parameters along their gradients while entered; restores their values bit for bit."""
        trained = [each for each in parameters if each.grad is not None]
        before = [each.detach().clone() for each in trained]
        try:
            self._move(trained)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(trained, before, strict=True):
                    parameter.copy_(value)

    @torch.no_grad()
    def _move(self, parameters: list[nn.Parameter]) -> None:
        """Adds rho * T^2 g / ||T g|| to the weights w, where T is 1, or |w| + eta with `adaptive`.

        The norm is over all parameters; gradients are those of all processes already, and the norm of sharded ones is
        that of all shards.
        """
        if not parameters:
            return
        gradients = [each.grad for each in parameters if each.grad is not None]
        gradients = [each.to_dense() if each.is_sparse else each for each in gradients]
        scales = [each.abs() + self.settings.eta for each in parameters] if self.settings.adaptive else []
        if scales:
            gradients = [gradient * scale for gradient, scale in zip(gradients, scales, strict=True)]
        norm = total_norm(gradients)
        length = self.settings.rho / ((norm.full_tensor() if is_dtensor(norm) else norm) + TINY)
        for index, parameter in enumerate(parameters):
            step = gradients[index] * scales[index] if scales else gradients[index]
            parameter.add_(step * length.to(step.device))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores the values of the model's buffers, and of frozen parameters that forward may change, afterwards."""
    # a forward pass may assign another tensor to the name of a buffer
    places = [(module._buffers, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    tensors = [buffer for _, _, buffer in places if buffer is not None]
    before = [(tensor, tensor.detach().clone()) for tensor in (*tensors, *frozen_that_may_change(model))]
    try:
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
