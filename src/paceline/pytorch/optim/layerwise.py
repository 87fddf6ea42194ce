"""Optimizers that step inside the backward pass, one parameter at a time, so that gradients are never all in memory.

Such an optimizer has a method `fused_backward(loss, lr)`, which the strategy calls instead of `loss.backward()`, and a
`step` that does nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.pytorch.optim.states import ExactState

logger = logging.getLogger(__name__)

DEFAULT_MAX_NORM = 1.0  # default of TrainingArguments, which cannot be distinguished from an explicit value


def steps_in_backward(optimizer: object) -> bool:
    """Returns True if `optimizer` consumes its gradients inside the backward pass."""
    return callable(getattr(optimizer, "fused_backward", None))


def check_run(optimizer: object, name: str, plan: Any) -> None:
    """Checks that an optimizer which steps inside the backward pass supports the options of a run.

    Args:
        optimizer: any optimizer; others are not checked.
        name: its name, for the message.
        plan: accumulation_steps, precision, nonfinite_policy, max_grad_norm, world_size.

    Raises:
        ValueError: an option requires all gradients at once; the message names it.
    """
    if not steps_in_backward(optimizer):
        return
    who = f"optim={name!r} ({type(optimizer).__name__})"
    why = f"{who} updates each parameter inside the backward pass and never holds all gradients"
    if plan.accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={plan.accumulation_steps}: {why}; set gradient_accumulation_steps=1."
        )
    if plan.precision not in ("full", "bf16"):
        raise ValueError(f"fp16=True: {why}, so none can be left out when one overflows; set bf16=True instead.")
    if plan.nonfinite_policy == "skip":
        raise ValueError(f"nonfinite_policy='skip': {why}, so a step cannot be skipped; set 'raise' or 'rollback'.")
    if plan.world_size > 1:
        raise ValueError(f"{why}, so they cannot be averaged over {plan.world_size} processes; start one process.")
    if plan.max_grad_norm not in (0, DEFAULT_MAX_NORM):
        raise ValueError(f"max_grad_norm={plan.max_grad_norm}: {why}, so their norm is not known; set max_grad_norm=0.")
    if plan.max_grad_norm:
        logger.warning("%s: they are not clipped. Set max_grad_norm=0 to say that this is meant.", why)


class LayerwiseOptimizer(ExactState, Optimizer):
    """A separate optimizer per parameter, stepped as soon as the parameter's gradient is computed.

    The groups and the state are those of a single optimizer of the inner class: schedules set the rates of the groups,
    and a checkpoint contains the state of all parameters. Only `fused_backward` steps; a plain `backward` leaves the
    weights unchanged.

    Args:
        params: parameter groups.
        optimizer_class: the class of each parameter's optimizer.
        settings: keyword arguments of that class.
    """

    def __init__(self, params: Any, optimizer_class: Callable[..., Optimizer], **settings: Any) -> None:
        super().__init__([group for group in params if group["params"]], {})
        self.parts = getattr(optimizer_class, "parts", {})
        self._inside: dict[nn.Parameter, tuple[Optimizer, int]] = {}
        self._is_stepping = False
        this = weakref.ref(self)  # so that a parameter's hook does not keep the optimizer of an earlier run alive
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                own = optimizer_class([{**group, "params": [parameter]}], **settings)
                self._inside[parameter] = own, index
                self.state.update(own.state)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda given: step_parameter(this(), given))
            made = self._inside[group["params"][0]][0].param_groups[0]
            group.update({key: value for key, value in made.items() if key != "params"})

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        """Runs the backward pass and steps inside it; `lr` is ignored, because the groups have their own rates."""
        self._is_stepping = True
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._is_stepping = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing, because `fused_backward` has already stepped."""

    def _step_parameter(self, parameter: nn.Parameter) -> None:
        if not self._is_stepping:
            return
        own, index = self._inside[parameter]
        options = own.param_groups[0]
        options.update({key: value for key, value in self.param_groups[index].items() if key != "params"})
        own.state = self.state
        own.step()
        parameter.grad = None


def step_parameter(optimizer: LayerwiseOptimizer | None, parameter: nn.Parameter) -> None:
    """Steps a parameter after its gradient is computed, unless the optimizer no longer exists."""
    if optimizer is not None:
        optimizer._step_parameter(parameter)
