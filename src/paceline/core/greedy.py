"""GreedyLR: a learning rate that rises and falls with a metric (arXiv:2512.14527). Framework-independent."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

LISTS = ("min_lrs", "max_lrs", "_last_lr", "_init_lrs")
OF_SUBCLASSES = ("optimizer", "learning_rate")  # attributes of subclasses that hold the learning rates


def check_rule(factor: float, mode: str, threshold_mode: str, where: str = "") -> None:
    """Checks the options of a schedule that follows a metric. Raises ValueError; the message starts with `where`."""
    if not 0.0 < factor < 1.0:
        raise ValueError(f"{where}factor={factor} must lie between 0 and 1")
    if mode not in ("min", "max"):
        raise ValueError(f"{where}mode={mode!r} is neither 'min' nor 'max'")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"{where}threshold_mode={threshold_mode!r} is neither 'rel' nor 'abs'")


def beats(current: float, best: float, *, mode: str, threshold: float, threshold_mode: str) -> bool:
    """True if `current` beats `best` by more than the threshold."""
    margin = threshold if mode == "max" else -threshold
    target = best + margin if threshold_mode == "abs" else best * (1.0 + margin)
    return current > target if mode == "max" else current < target


class GreedyRule:
    """Updates learning rates from observations of a metric. Subclasses read and set them by `_rates` and `_set`.

    Args:
        num_groups: the number of parameter groups.
        mode, factor, patience, threshold, threshold_mode, cooldown, warmup, min_lr, max_lr, eps, verbose, smooth,
            window_size, reset_start: as in `paceline.pytorch.optim.greedy.GreedyLR`.

    Raises:
        ValueError: a value out of range, or bounds that do not match the number of groups.
    """

    _last_lr: list[Any]
    last_epoch: int

    def __init__(
        self,
        num_groups: int,
        *,
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
        check_rule(factor, mode, threshold_mode)
        if window_size < 1:
            raise ValueError(f"window_size={window_size} must be at least 1")
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup = cooldown, warmup
        self.eps, self.verbose = eps, verbose
        self.smooth, self.window_size = smooth, window_size
        self.reset_start_original = reset_start
        self.min_lrs = _per_group("min_lr", min_lr, num_groups)
        self.max_lrs = _per_group("max_lr", max_lr, num_groups)
        self._init_lrs = self._rates()
        self._last_lr = list(self._init_lrs)
        self.last_epoch = 0
        self._forget()

    def _rates(self) -> list[float]:
        raise NotImplementedError

    def _set(self, index: int, rate: float) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self.reset_start = self.reset_start_original
        self._window: deque[float] = deque()
        self._sum = 0.0

    def observe(self, metric: float, epoch: int | None = None) -> None:
        """Records one observation of the metric and changes the learning rates if due."""
        observed = self._smoothed(metric) if self.smooth else metric
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        elif self.warmup_counter > 0:
            self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._judge(observed)
        self._last_lr = self._rates()

    def _judge(self, observed: float) -> None:
        if self.is_better(observed, self.best):
            self.best = observed
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._raise_rates()
            self.num_good_epochs, self.warmup_counter = 0, self.warmup
        elif self.num_bad_epochs > self.patience:
            self._lower_rates()
            self.num_bad_epochs, self.cooldown_counter = 0, self.cooldown

    def _smoothed(self, value: float) -> float:
        # A running sum costs the same at any window size, and a resumed run rounds as an uninterrupted one does.
        self._window.append(value)
        self._sum += value
        if len(self._window) > self.window_size:
            self._sum -= self._window.popleft()
        return self._sum / len(self._window)

    def is_better(self, current: float, best: float) -> bool:
        """True if `current` beats `best` by more than the threshold."""
        return beats(current, best, mode=self.mode, threshold=self.threshold, threshold_mode=self.threshold_mode)

    def _lower_rates(self) -> None:
        for index, (rate, floor) in enumerate(zip(self._rates(), self.min_lrs, strict=True)):
            lower = max(rate * self.factor, floor)
            if rate - lower > self.eps:
                self._change(index, lower)
        if any(rate > floor for rate, floor in zip(self._rates(), self.min_lrs, strict=True)):
            return
        self.reset_start -= 1
        if self.reset_start <= 0:
            for index, rate in enumerate(self._init_lrs):
                self._change(index, rate)
            self._forget()

    def _raise_rates(self) -> None:
        for index, (rate, ceiling) in enumerate(zip(self._rates(), self.max_lrs, strict=True)):
            higher = min(rate / self.factor, ceiling)
            if higher - rate > self.eps:
                self._change(index, higher)
        self.reset_start = self.reset_start_original

    def _change(self, index: int, rate: float) -> None:
        self._set(index, rate)
        if self.verbose:
            logger.info("Observation %d: learning rate of group %d is now %.4e.", self.last_epoch, index, rate)

    def _plain_names(self) -> list[str]:
        """Returns the names of all options and counters."""
        return [name for name in vars(self) if not name.startswith("_") and name not in OF_SUBCLASSES]

    def export(self) -> dict[str, Any]:
        """Returns every option and counter as plain values."""
        state: dict[str, Any] = {key: getattr(self, key) for key in self._plain_names()}
        state.update({key: list(getattr(self, key)) for key in LISTS})
        if self.smooth:
            window = {"window_size": self.window_size, "values": list(self._window), "sum": self._sum}
            state["_streaming_avg"] = window
        return state

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state and sets its learning rates.

        Raises:
            ValueError: the numbers of parameter groups differ.
        """
        rates = list(state.get("_last_lr", self._last_lr))
        if len(rates) != len(self._rates()):
            raise ValueError(
                f"the saved scheduler has {len(rates)} parameter groups, this optimizer {len(self._rates())}"
            )
        for key in self._plain_names():
            if key in state:
                setattr(self, key, state[key])
        for key in ("min_lrs", "max_lrs", "_init_lrs"):
            setattr(self, key, list(state.get(key, getattr(self, key))))
        window = state.get("_streaming_avg", {"values": [], "sum": 0.0})
        self._window, self._sum = deque(window["values"]), float(window["sum"])
        self._last_lr = rates
        for index, rate in enumerate(rates):
            self._set(index, float(rate))


def _per_group(option: str, value: float | Sequence[float], num_groups: int) -> list[float]:
    if isinstance(value, (int, float)):
        return [value] * num_groups
    if len(value) != num_groups:
        raise ValueError(f"{option} has {len(value)} values for {num_groups} parameter groups")
    return list(value)
