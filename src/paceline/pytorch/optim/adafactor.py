"""Adafactor (arXiv:1804.04235) with the options and the saved state of transformers' Adafactor.

torch's own Adafactor always scales the step by the size of the weights. Here this is an option, because
`optim="adafactor"` uses an external learning rate without it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import ParamsT

_HALF = (torch.float16, torch.bfloat16)


def _root_mean_square(tensor: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5)


class Adafactor(Optimizer):
    """Adam with the second moment stored as row and column means: n + m instead of n x m values for a matrix.

    16-bit parameters are updated in float32 and rounded once; their state is float32. No step synchronizes with the
    device.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate; None with `relative_step`.
        eps: the value added to the squared gradient, and the smallest root mean square of weights for
            `scale_parameter`.
        clip_threshold: largest root mean square of a step before it is multiplied by the learning rate.
        decay_rate: exponent c in the second moment's decay, `1 - step ** c`.
        beta1: decay of the first moment; None disables it.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        scale_parameter: multiply the step by the root mean square of the weights.
        relative_step: use `min(1e-2, 1 / sqrt(step))` as the learning rate.
        warmup_init: with `relative_step`, use at most `1e-6 * step` instead of 1e-2.

    Raises:
        ValueError: exactly one of `lr` and `relative_step` is required, or `warmup_init` is set without
            `relative_step`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        # locals() contains exactly the parameters above, as long as nothing else is assigned before
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        if relative_step and lr is not None:
            raise ValueError(
                f"Cannot combine manual `lr` and `relative_step=True` options: leave lr={lr} out, or set "
                "relative_step=False."
            )
        if lr is None and not relative_step:
            raise ValueError("relative_step=False needs a learning rate: give lr")
        if warmup_init and not relative_step:
            raise ValueError("`warmup_init=True` requires `relative_step=True`: it is a way to start that")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient, and returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, weight = parameter.grad, parameter
        if gradient is None or gradient.is_sparse:
            raise RuntimeError('Adafactor does not support sparse gradients: optim="sgd" and "adagrad" do')
        if gradient.dtype in _HALF:
            gradient = gradient.float()
        if weight.dtype in _HALF:
            weight = weight.float()
        state = self.state[parameter] or self._start(parameter, gradient, group)
        state["step"] += 1
        if group["scale_parameter"]:
            state["RMS"] = _root_mean_square(weight)
        rate = step_size(group, state)
        update = _normalised(gradient, state, 1.0 - state["step"] ** group["decay_rate"], group["eps"][0])
        update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1.0 - group["beta1"])
        if group["weight_decay"] != 0:
            weight.mul_(1.0 - group["weight_decay"] * rate)
        weight.sub_(update)
        if weight is not parameter:
            parameter.copy_(weight)

    # ---- for subclasses with their own step

    @staticmethod
    def _rms(tensor: Tensor) -> Tensor:
        return _root_mean_square(tensor)

    @staticmethod
    def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> Any:
        return step_size(param_group, param_state)

    @staticmethod
    def _get_options(param_group: dict[str, Any], param_shape: tuple[int, ...]) -> tuple[bool, bool]:
        """Returns (second moment is stored as row and column means, there is a first moment)."""
        return len(param_shape) >= 2, param_group["beta1"] is not None

    @staticmethod
    def _approx_sq_grad(exp_avg_sq_row: Tensor, exp_avg_sq_col: Tensor) -> Tensor:
        """Returns the inverse square root of the second moment, from its row and column means."""
        row_factor = (exp_avg_sq_row / exp_avg_sq_row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return row_factor.mul(exp_avg_sq_col.rsqrt().unsqueeze(-2))

    # ---- state

    def _start(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state.update(step=0, RMS=0)
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(gradient)
        if gradient.ndim >= 2:
            state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
            state["exp_avg_sq_col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state in its saved precision; torch would cast it to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if value.dtype != self.state[parameter][key].dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
                if key in ("exp_avg_sq_row", "exp_avg_sq_col"):
                    self.state[parameter][key] = _replicated_like(parameter, self.state[parameter][key])


def _replicated_like(parameter: Any, value: Tensor) -> Tensor:
    """Returns a whole tensor as `new_zeros` of a sharded parameter places it: a replica on each process."""
    if not hasattr(parameter, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    placed = parameter.new_zeros(value.shape, dtype=value.dtype)
    placed.to_local().copy_(value)
    found: Tensor = placed.detach()
    return found


def _normalised(gradient: Tensor, state: dict[str, Any], decay: float, eps: float) -> Tensor:
    """Updates the second moment, and returns the gradient divided by its root as a new tensor."""
    square = gradient.square().add_(eps)
    if "exp_avg_sq" in state:
        moment: Tensor = state["exp_avg_sq"].lerp_(square, 1.0 - decay)
        return moment.rsqrt().mul_(gradient)
    row: Tensor = state["exp_avg_sq_row"].lerp_(square.mean(dim=-1), 1.0 - decay)
    column: Tensor = state["exp_avg_sq_col"].lerp_(square.mean(dim=-2), 1.0 - decay)
    return Adafactor._approx_sq_grad(row, column).mul_(gradient)


def step_size(group: dict[str, Any], state: dict[str, Any]) -> Any:
    """Returns the factor of one parameter's clipped step: a float, or a 0-dim tensor with `scale_parameter`."""
    rate = group["lr"]
    if group["relative_step"]:
        ceiling = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
        rate = min(ceiling, state["step"] ** -0.5)
    if group["scale_parameter"]:
        rate = torch.as_tensor(state["RMS"]).clamp(min=group["eps"][1]) * rate
    return rate


class AdafactorSchedule(LambdaLR):
    """Reports the rates that an `Adafactor` with `relative_step` sets itself, so that they can be logged.

    The rates are also written to the parameter groups' `lr`, which such an optimizer does not read.

    Args:
        optimizer: an `Adafactor`.
        initial_lr: the rate that is reported before the first optimizer step.
    """

    shows_rates = True  # the groups' `lr` is that of the previous step, so callers must ask the schedule

    def __init__(self, optimizer: Optimizer, initial_lr: float = 0.0) -> None:
        if not isinstance(optimizer, Adafactor):
            raise TypeError(f"AdafactorSchedule shows the rates of an Adafactor, not of a {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.base_lrs = [initial_lr] * len(optimizer.param_groups)
        self.last_epoch = 0
        self._show()

    def _show(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if group["relative_step"]:
                group["lr"] = rate

    def step(self, epoch: int | None = None) -> None:
        """Counts a step, and writes the optimizer's rates to its groups. Synchronizes with the device."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._show()

    def get_last_lr(self) -> list[Any]:
        """Returns the step size of each group's first stepped parameter as a float. Synchronizes with the device."""
        return self.get_lr()

    def get_lr(self) -> list[Any]:
        """Returns the same as `get_last_lr`."""
        rates = list(self.base_lrs)
        for index, group in enumerate(self.optimizer.param_groups):
            states = (self.optimizer.state.get(parameter) for parameter in group["params"])
            state = next((state for state in states if state), None)
            if state is not None:
                rates[index] = float(step_size(group, state))
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps and the initial rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the saved number of steps and initial rates."""
        self.last_epoch = int(state_dict["last_epoch"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._show()
