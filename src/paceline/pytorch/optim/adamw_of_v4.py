"""AdamW (arXiv:1711.05101) of transformers up to version 4, for code that imports it from there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class AdamW(Optimizer):
    """Adam with decoupled weight decay, with the details of transformers 4.

    Unlike torch's AdamW, it adds `eps` to the root of the second moment before the bias correction, decays the weights
    after the step, and has other defaults.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        correct_bias: correct the moments for their initial value of 0.
        no_deprecation_warning: has no effect, because there is no such warning here.

    Raises:
        ValueError: `lr` or `eps` is negative, or a beta is outside [0, 1).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if min(lr, eps) < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW(lr={lr}, betas={betas}, eps={eps}): expected lr and eps >= 0, 0 <= beta < 1.")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one optimizer step, and returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state, (first, second) = parameter.grad, self.state[parameter], group["betas"]
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients: use torch.optim.SparseAdam.")
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate = group["lr"]
        if group["correct_bias"]:
            rate = rate * math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)
        if group["weight_decay"] > 0:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
