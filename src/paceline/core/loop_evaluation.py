"""The evaluations that the training loop makes, which a signal may interrupt and a resumed run completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from paceline.core.contracts import Stateful
from paceline.core.metrics import jsonable
from paceline.core.signals import Interrupted


class LoopEvaluation:
    """The evaluation that the loop makes: if a signal interrupts it, a resumed run completes it.

    Datasets that were finished keep their rows and their effect on callbacks, and are not evaluated again. The one in
    progress is evaluated anew, from the state that it began with.

    Attributes:
        finished: the metrics of each finished dataset of several, by the prefix of their names.
        ends_run: the training ends with this evaluation; by a callback if datasets were finished, else by the signal.
    """

    def __init__(self) -> None:
        self.finished: dict[str, dict[str, Any]] = {}
        self.ends_run = self._is_interrupted = False
        self._restored: dict[str, dict[str, Any]] = {}  # datasets that were finished before the run was resumed
        self._effects: Stateful | None = None  # while an evaluation is in progress
        self._before: dict[str, Any] = {}

    @contextmanager
    def in_progress(self, effects: Stateful) -> Iterator[None]:
        """Returns the context of an evaluation.

        Args:
            effects: the state that evaluating a dataset changes, such as random generators; restored if a signal
                interrupts it.
        """
        self._effects, self._before, self._is_interrupted = effects, effects.state_dict(), False
        try:
            yield
        except Interrupted:
            effects.load_state_dict(self._before)
            self._is_interrupted = True
            raise
        finally:
            self._effects = None
        self.finished, self._restored, self.ends_run = {}, {}, False

    def evaluate(self, prefix: str, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns the metrics of one dataset of several, evaluated now or before an interruption.

        Args:
            prefix: the prefix of their names.
            evaluate: evaluates the dataset.
        """
        if self._effects is None:
            return evaluate()
        metrics: dict[str, float] = self._restored.pop(prefix) if prefix in self._restored else evaluate()
        self.finished[prefix] = jsonable(dict(metrics))
        self._before = self._effects.state_dict()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns what an interrupted evaluation has finished, JSON-serializable; empty if none was interrupted."""
        if not self._is_interrupted:
            return {}
        finished = {**self._restored, **self.finished}
        return {"finished": finished, "ends_run": self.ends_run and bool(finished)}  # else the signal has ended it

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what the run before has finished.

        Raises:
            ValueError: there is anything else.
        """
        finished = state.get("finished") or {}
        if not isinstance(finished, dict) or not all(isinstance(metrics, dict) for metrics in finished.values()):
            raise ValueError("the metrics of an interrupted evaluation are not those of datasets by name")
        self._restored, self.ends_run = dict(finished), state.get("ends_run") is True


class Run(Protocol):
    """A run in progress."""

    @property
    def evaluation(self) -> LoopEvaluation:
        """Returns the evaluation that its loop makes."""
        ...


def evaluate_each(
    run: Run | None, datasets: Mapping[str, Any], prefix: str, evaluate: Callable[..., dict[str, float]]
) -> dict[str, float]:
    """Evaluates several datasets and returns all metrics.

    Args:
        run: the run in progress, or None.
        datasets: the datasets by name.
        prefix: prefix of all metrics; the name of a dataset follows.
        evaluate: `(dataset, metric_key_prefix=...) -> metrics`.
    """
    metrics: dict[str, float] = {}
    for name, dataset in datasets.items():
        own = f"{prefix}_{name}"
        call = partial(evaluate, dataset, metric_key_prefix=own)
        metrics.update(call() if run is None else run.evaluation.evaluate(own, call))
    return metrics
