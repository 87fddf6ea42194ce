"""Muon for the hidden matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT


class MuonWithAdamW(Optimizer):
    """Combines torch's Muon on the groups marked `use_muon=True` with torch's AdamW on the others.

    It has one list of groups and one state, so schedulers, clipping and checkpoints treat it as one optimizer. Muon's
    step is scaled to the root mean square of AdamW's ("match_rms_adamw", arXiv:2502.16982), so that one learning rate
    and weight decay fit both. Muon is described at https://kellerjordan.github.io/posts/muon/

    Args:
        params: parameter groups; those with `use_muon=True` contain 2-D parameters only.
        lr, weight_decay: apply to both.
        momentum, nesterov, ns_steps, adjust_lr_fn: arguments of `torch.optim.Muon`.
        betas, eps, fused: arguments of AdamW.

    Raises:
        ImportError: this torch has no Muon.
        ValueError: a parameter of a Muon group is not 2-D, or a value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        # Each group contains the options of both optimizers, so that they can be rebuilt from the groups alone.
        # locals() contains exactly the parameters above, as long as nothing else is assigned before.
        options = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        if not hasattr(torch.optim, "Muon"):
            raise ImportError('optim="muon" needs torch.optim.Muon: install torch 2.9 or later')
        super().__init__(params, {**options, "use_muon": False})
        self._link()

    def _link(self) -> None:
        """Recreates the two inner optimizers over the current groups (the same dicts) and the current state."""
        muon = [group for group in self.param_groups if group["use_muon"]]
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._parts: list[Optimizer] = []
        if muon:
            self._parts.append(torch.optim.Muon(muon))
        if others:
            self._parts.append(AdamW(others, fused=self.defaults["fused"]))
        for part in self._parts:
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which Muon trains if it has `use_muon=True`."""
        super().add_param_group(param_group)
        if hasattr(self, "_parts"):
            self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps both optimizers, and returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
