"""Optimizers that step inside the backward pass, one parameter at a time, so that gradients are never all in memory.

Such an optimizer has a method `fused_backward(loss, lr)`, which the strategy calls in place of `loss.backward()`, and a
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

DEFAULT_MAX_NORM = 1.0  # default of TrainingArguments: it is indistinguishable from an explicit one


def steps_in_backward(optimizer: object) -> bool:
    """True if the gradients of `optimizer` are consumed when the backward pass ends."""
    return callable(getattr(optimizer, "fused_backward", None))


def check_run(optimizer: object, name: str, plan: Any) -> None:
    """Raises for options that an optimizer which steps inside backward does not support; any other optimizer passes.

    Args:
        name: of the optimizer, for the message.
        plan: accumulation_steps, precision, nonfinite_policy, max_grad_norm, world_size.

    Raises:
        ValueError: the gradients would be needed as a whole; the option is named.
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
    """One optimizer for each parameter, stepped as soon as its gradient is computed.

    Its groups and its state are those of one optimizer of the inner class: schedules set the rates of its groups, and a
    checkpoint holds the state of all of them. Its gradients come from `fused_backward`; a plain `backward` leaves the
    weights unchanged.

    Args:
        params: parameter groups.
        optimizer_class: of each parameter's own optimizer.
        settings: its keyword arguments.
    """

    def __init__(self, params: Any, optimizer_class: Callable[..., Optimizer], **settings: Any) -> None:
        super().__init__([group for group in params if group["params"]], {})
        self.parts = getattr(optimizer_class, "parts", {})
        self._inside: dict[nn.Parameter, tuple[Optimizer, int]] = {}
        self._is_stepping = False
        this = weakref.ref(self)  # a parameter must not keep the optimizer of an earlier run alive
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
        """Runs the backward pass with the steps in it; `lr` is ignored, since the groups hold their rates."""
        self._is_stepping = True
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._is_stepping = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing: `fused_backward` has stepped."""

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
    """Steps a parameter when its gradient is computed."""
    if optimizer is not None:
        optimizer._step_parameter(parameter)
