"""GreedyLR: a learning rate that follows a metric up and down (arXiv:2512.14527)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.greedy import GreedyRule


class GreedyLR(GreedyRule, LRScheduler):
    """Raises the rate after `patience` consecutive improvements of a metric, and lowers it after as many failures.

    Args:
        optimizer: the optimizer whose groups' "lr" is changed.
        mode: "min" if a smaller metric is better, "max" if a larger one is.
        factor: below 1; the rate is multiplied by it to decrease, and divided by it to increase.
        patience: consecutive observations before a change.
        threshold: the smallest improvement over the best metric that counts.
        threshold_mode: the threshold is a share of the best metric ("rel") or a difference ("abs").
        cooldown, warmup: observations ignored after a decrease, and after an increase.
        min_lr, max_lr: bounds of the rate, one for all groups or one per group.
        eps: smaller changes of the rate are skipped.
        verbose: log each change at level INFO.
        smooth: use the mean of the last `window_size` metrics instead of the last one.
        window_size: metrics in that mean.
        reset_start: decreases with every rate at its minimum before the schedule restarts.

    Raises:
        ValueError: a value is out of range, or the bounds do not match the number of groups.
        TypeError: `optimizer` is not a torch optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        # locals() contains exactly the parameters above, as long as nothing else is assigned before
        options = {name: value for name, value in locals().items() if name not in ("self", "optimizer", "__class__")}
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"a learning-rate scheduler needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        super().__init__(len(optimizer.param_groups), **options)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set(self, index: int, rate: float) -> None:
        group = self.optimizer.param_groups[index]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Records one observation of the metric (a number or 1-element tensor), and changes the rates if due."""
        self.observe(float(metrics), epoch)

    def get_last_lr(self) -> list[Any]:
        """Returns the rate of each group after the last observation."""
        return self._last_lr

    def get_lr(self) -> list[Any]:
        """Returns the current rate of each group, which no formula determines."""
        return self._rates()

    def state_dict(self) -> dict[str, Any]:
        """Returns all options and counters as plain values."""
        return self.export()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state, and sets the optimizer's rates to the saved ones.

        Raises:
            ValueError: the numbers of parameter groups differ.
        """
        self.take_up(state_dict)
