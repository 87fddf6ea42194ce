"""LOMO and AdaLomo (arXiv:2306.09782, arXiv:2310.10195): SGD and Adafactor fused with the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.pytorch.optim.states import ExactState

if TYPE_CHECKING:
    _Base = ExactState
else:
    _Base = object

_BY_NAME = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")  # attributes of AdaLomo: parameter name -> tensor


class OnDevice(TorchFunctionMode):
    """Makes `tensor.cuda()` move to `device` while entered, because AdaLomo calls it although it needs no GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.cuda:
            return args[0].to(self.device)
        return function(*args, **(kwargs or {}))


class LomoState(_Base):
    """A mixin for lomo-optim's classes: they run on any device, step only in `fused_backward`, and save their state.

    The hooks that the classes leave on a model would otherwise consume the gradients of every later backward pass.

    Args:
        model: the model to train.
        settings: arguments of the class; with `clip_grad_norm` each step takes two backward passes, one for the norm.

    Raises:
        ValueError: the weights are float16, for which the package scales losses in a way that cannot be resumed.
    """

    _is_stepping = False
    if TYPE_CHECKING:
        clip_grad_norm: float | None
        grad_norm: Callable[[Tensor], None]

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float16:
                raise ValueError(f"optim='lomo', 'adalomo': {name} is float16; load the model in bfloat16 or float32")
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with OnDevice(device):
            super().__init__(model, **settings)  # type: ignore[arg-type]

    def fuse_update(self) -> Callable[[Any], Any]:
        """Returns the package's hook, disabled outside of `fused_backward`."""
        update = super().fuse_update()  # type: ignore[misc]

        def guarded(gradient: object) -> Any:
            return update(gradient) if self._is_stepping else gradient

        return guarded

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        """Runs the backward pass and steps inside it, with the learning rate `lr`."""
        self._is_stepping = True
        try:
            if self.clip_grad_norm:
                self.grad_norm(loss)
            super().fused_backward(loss, float(lr))  # type: ignore[misc]
        finally:
            self._is_stepping = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing, because `fused_backward` has already stepped."""

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state and the package's own state."""
        kept = {name: dict(vars(self)[name]) for name in _BY_NAME if name in vars(self)}
        return {**super().state_dict(), "lomo": {**kept, "step_num": getattr(self, "step_num", 0)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a saved state.

        Raises:
            ValueError: it has other parameters than the model.
        """
        super().load_state_dict(state_dict)
        kept = state_dict.get("lomo", {})
        for name in _BY_NAME:
            own = vars(self).get(name, {})
            if set(kept.get(name, own)) != set(own):
                raise ValueError(f"the saved optimizer has other parameters than this model: {name}")
            for key, value in kept.get(name, {}).items():
                own[key].copy_(value)
        if hasattr(self, "step_num"):
            self.step_num = kept.get("step_num", 0)
