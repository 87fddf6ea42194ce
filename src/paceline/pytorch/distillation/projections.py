"""Linear maps between hidden states of different widths, trained beside the student of a distillation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from paceline.pytorch.distributed.random import preserved_rng

DEFAULT_RATE = 1e-3  # beside an optimizer that computes its own rate


class Projections:
    """Linear maps from the width of the student's hidden states to the teacher's, with their own optimizer.

    They are no part of the student, so that its files have its own parameters only. AdamW trains them with the learning
    rate of the student's first parameter group; gradients are averaged over the processes as the student's are.

    Args:
        seed: the seed of their initial weights, the same on all processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.maps: dict[str, nn.Linear] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def project(self, name: str, states: Tensor, width: int) -> Tensor:
        """Returns hidden states with the teacher's width, projected if theirs differs."""
        if states.shape[-1] == width:
            return states
        made = self.maps.get(name) or self._make(name, states.shape[-1], width)
        made.to(states.device)
        return made(states.to(made.weight.dtype))  # type: ignore[no-any-return]

    def _make(self, name: str, width: int, teacher_width: int) -> nn.Linear:
        with preserved_rng():
            torch.manual_seed(self.seed + len(self.maps))
            made = nn.Linear(width, teacher_width, bias=False)
        self.maps[name] = made
        self._optimizers[name] = torch.optim.AdamW(made.parameters(), lr=0.0, weight_decay=0.0)
        return made

    def average(self, world_size: int) -> None:
        """Averages the gradients over the processes; collective."""
        for name in sorted(self.maps) if world_size > 1 else ():
            weight = self.maps[name].weight
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            distributed.all_reduce(gradient)
            weight.grad = gradient / world_size

    def step(self, rate: Any) -> None:
        """Trains the maps by one step, and drops their gradients. Gradients that are not finite count as zero.

        Args:
            rate: the learning rate; None (Adafactor's own): AdamW's default.
        """
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = DEFAULT_RATE if rate is None else float(rate)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Returns the weights and the states of their optimizers."""
        return {
            # copies: they change while a checkpoint is written
            name: {
                "weight": made.weight.detach().clone(),
                "optimizer": copy.deepcopy(self._optimizers[name].state_dict()),
            }
            for name, made in self.maps.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores weights and optimizers."""
        device = {name: made.weight.device for name, made in self.maps.items()}
        self.maps.clear()
        self._optimizers.clear()
        for name, saved in state.items():
            weight = saved["weight"]
            made = self._make(name, weight.shape[1], weight.shape[0]).to(device.get(name, "cpu"))
            with torch.no_grad():
                made.weight.copy_(weight)
            self._optimizers[name].load_state_dict(saved["optimizer"])
