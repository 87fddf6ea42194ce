"""An evaluation of several datasets that a signal interrupts, once or twice, and what a resumed run makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.loop_evaluation import LoopEvaluation, evaluate_each
from paceline.core.signals import Interrupted


class Draws:
    """A generator whose state is the number of draws."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.count = state["count"]


def run(evaluation: LoopEvaluation, draws: Draws, stops_in: str | None = None) -> tuple[list[str], dict[str, float]]:
    """Evaluates a, b and c; each draws two numbers, of which an interrupted one has drawn the first."""
    evaluated: list[str] = []

    def evaluate(dataset: str, metric_key_prefix: str) -> dict[str, float]:
        draws.count += 1
        if dataset == stops_in:
            raise Interrupted
        draws.count += 1
        evaluated.append(dataset)
        return {f"{metric_key_prefix}_loss": float(draws.count)}

    metrics: dict[str, float] = {}
    try:
        with evaluation.in_progress(draws):
            names = {name: name for name in "abc"}
            metrics = evaluate_each(SimpleNamespace(evaluation=evaluation), names, "eval", evaluate)
    except Interrupted:
        assert stops_in is not None
    return evaluated, metrics


def resumed(evaluation: LoopEvaluation) -> LoopEvaluation:
    again = LoopEvaluation()
    again.load_state_dict(json.loads(json.dumps(evaluation.state_dict())))
    return again


def test_the_finished_datasets_are_not_evaluated_again() -> None:
    whole = run(LoopEvaluation(), Draws())
    draws, first = Draws(), LoopEvaluation()
    assert run(first, draws, stops_in="b") == (["a"], {})
    assert draws.count == 2
    second = resumed(first)
    assert run(second, draws, stops_in="c") == (["b"], {})
    third = resumed(second)
    assert run(third, draws) == (["c"], whole[1])
    assert whole[1] == {"eval_a_loss": 2.0, "eval_b_loss": 4.0, "eval_c_loss": 6.0}
    assert run(third, Draws()) == whole  # the evaluation after it is one of all datasets


def test_a_second_signal_before_the_first_batch_loses_nothing() -> None:
    draws, first = Draws(), LoopEvaluation()
    run(first, draws, stops_in="c")
    second = resumed(first)
    with pytest.raises(Interrupted), second.in_progress(draws):
        raise Interrupted
    assert second.state_dict()["finished"] == first.state_dict()["finished"]


@pytest.mark.parametrize(("stops_in", "ends"), [("a", False), ("b", True)])
def test_a_callback_ends_the_resumed_run_after_a_dataset_and_a_signal_does_not(stops_in: str, ends: bool) -> None:
    evaluation = LoopEvaluation()
    run(evaluation, Draws(), stops_in)
    evaluation.ends_run = True  # set by the loop, which stops for either
    assert resumed(evaluation).ends_run == ends


def test_a_checkpoint_within_an_evaluation_holds_nothing_of_it() -> None:
    """A callback may write one; the run that is resumed from it evaluates at a later step."""
    evaluation, saved = LoopEvaluation(), []

    def evaluate(dataset: str, metric_key_prefix: str) -> dict[str, float]:
        saved.append(evaluation.state_dict())
        return {f"{metric_key_prefix}_loss": 1.0}

    with evaluation.in_progress(Draws()):
        evaluate_each(SimpleNamespace(evaluation=evaluation), {"a": 1, "b": 2}, "eval", evaluate)
    assert [*saved, evaluation.state_dict()] == [{}, {}, {}]


def test_evaluations_outside_of_the_loop_are_made() -> None:
    first = LoopEvaluation()
    run(first, Draws(), stops_in="b")
    evaluation, called = resumed(first), []

    def evaluate(dataset: str, metric_key_prefix: str) -> dict[str, float]:
        called.append(dataset)
        return {}

    for place in (SimpleNamespace(evaluation=evaluation), None):
        evaluate_each(place, {"a": "a"}, "eval", evaluate)
    assert called == ["a", "a"]


@pytest.mark.parametrize("finished", [["eval_a"], {"eval_a": 1.0}])
def test_another_state_is_refused(finished: Any) -> None:
    with pytest.raises(ValueError, match="interrupted evaluation"):
        LoopEvaluation().load_state_dict({"finished": finished})
