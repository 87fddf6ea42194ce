"""A trial of several processes: rank 0 queries the backend, and all ranks get its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SharedTrial:
    """The optuna trial that `hp_space`, `model_init` and `hp_name` are given if several processes train.

    All ranks must call the same `suggest_*` methods in the same order, which they do if they run the same code.

    Args:
        trial: optuna's trial on rank 0, None on the others.
        share: returns the value of rank 0 on all ranks.
        number: the number of the trial.
    """

    def __init__(self, trial: Any, share: Callable[[Any], Any], number: int) -> None:
        self._trial, self._share = trial, share
        self.number = number
        self.params: dict[str, Any] = {}

    def suggest_float(self, name: str, low: float, high: float, **options: Any) -> float:
        """Returns a number between two bounds; see optuna.trial.Trial, as for the methods below."""
        return float(self._ask("suggest_float", name, low, high, **options))

    def suggest_int(self, name: str, low: int, high: int, **options: Any) -> int:
        """Returns a whole number between two bounds."""
        return int(self._ask("suggest_int", name, low, high, **options))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Returns one of several values."""
        return self._ask("suggest_categorical", name, choices)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Stores a value with the trial."""
        if self._trial is not None:
            self._trial.set_user_attr(key, value)

    def _ask(self, method: str, name: str, *values: Any, **options: Any) -> Any:
        """Returns the answer of rank 0's trial.

        Raises: its error: unchanged on rank 0, as a RuntimeError of the same text on the others.
        """
        answer, error = None, None
        if self._trial is not None:
            try:
                answer = getattr(self._trial, method)(name, *values, **options)
            except Exception as raised:
                error = raised
        answer, text = self._share((answer, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if text is not None:
            raise RuntimeError(text)
        self.params[name] = answer
        return answer
