"""Schedules of the learning rate, one per member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.schedules import Multiplier
from paceline.pytorch.members.optimizer import MemberOptimizer
from paceline.pytorch.optim.schedulers import MultiplierLR


class MemberSchedule(MultiplierLR):
    """Multiplies the initial learning rate of each member by the member's own function of the step.

    Args:
        optimizer: has the same number of groups for each member.
        factors: `(step, 0-based) -> factor` of each member.
    """

    def __init__(self, optimizer: MemberOptimizer, factors: Sequence[Multiplier]) -> None:
        self._distinct = list({each: None for each in factors})
        each = len(optimizer.param_groups) // len(factors)
        self._places = [self._distinct.index(factor) for factor in factors for _ in range(each)]
        super().__init__(optimizer, factors[0])
        self.lr_lambdas = [self._distinct[place] for place in self._places]

    def step(self, epoch: int | None = None) -> None:
        """Sets each group's rate for the next optimizer step, or for the step `epoch` if given."""
        self._step_count += 1
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._last_lr = self.get_lr()
        for rate, group in zip(self._last_lr, self.optimizer.param_groups, strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[Any]:
        """Computes the rate of each group at the current step."""
        factors = [factor(self.last_epoch) for factor in self._distinct]
        return [base * factors[place] for base, place in zip(self.base_lrs, self._places, strict=True)]

    def scale_rates(self, factor: float) -> None:
        """Multiplies the initial rates of all members."""
        self.base_lrs = [base * factor for base in self.base_lrs]
