import logging
import math
from types import SimpleNamespace

import pytest

from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core.metrics import is_better
from paceline.core.state import TrainerControl, TrainerState


def arguments(**changes):
    values = {
        "metric_for_best_model": "loss",
        "greater_is_better": None,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
    }
    return SimpleNamespace(**{**values, **changes})


def evaluations_until_stop(values, args=None, **options):
    """Returns the number of evaluations of a run whose metric goes through `values`, tracked as in the loop."""
    args = args or arguments()
    callback, state, control = EarlyStoppingCallback(**options), TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(args, state, control, metrics={"eval_loss": value, "eval_f1": value})
        if control.should_training_stop:
            return number
        if is_better(value, state.best_metric, bool(args.greater_is_better) or args.metric_for_best_model == "f1"):
            state.best_metric = value
    return None


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([3, 2, 1], {}, None),
        ([3, 2, 2], {}, 3),
        ([3, 2, 4, 1, 5, 5], {"early_stopping_patience": 2}, 6),
        ([3, 2.95, 2.9], {"early_stopping_threshold": 0.1}, 2),
        ([3, 2.5, 2], {"early_stopping_threshold": 0.1}, None),
        ([3, 2, 2], {"early_stopping_threshold": None}, 3),
        ([math.nan], {}, 1),
        ([3, math.nan, 2], {"early_stopping_patience": 2}, None),
    ],
)
def test_stops_after_patience_evaluations_in_vain(values, options, expected):
    assert evaluations_until_stop(values, **options) == expected


@pytest.mark.parametrize(
    "args", [arguments(metric_for_best_model="f1"), arguments(metric_for_best_model="eval_f1", greater_is_better=True)]
)
def test_greater_may_be_better(args):
    assert evaluations_until_stop([1, 2, 3, 2], args) == 4


def test_a_missing_metric_is_told_of_once(caplog):
    callback, state, control = EarlyStoppingCallback(), TrainerState(), TrainerControl()
    callback.on_train_begin(arguments(), state, control)
    for _ in range(3):
        callback.on_evaluate(arguments(), state, control, metrics={"eval_b_loss": 1.0})
    assert len(caplog.records) == 1
    assert "eval_loss" in caplog.text
    assert "eval_b_loss" in caplog.text
    assert not control.should_training_stop


def test_needs_evaluations_and_a_metric():
    callback, state, control = EarlyStoppingCallback(), TrainerState(), TrainerControl()
    with pytest.raises(ValueError, match='eval_strategy="steps"'):
        callback.on_train_begin(arguments(eval_strategy="no"), state, control)
    with pytest.raises(ValueError, match='metric_for_best_model="loss"'):
        callback.on_train_begin(arguments(metric_for_best_model=None, load_best_model_at_end=False), state, control)
    callback.on_train_begin(arguments(metric_for_best_model=None), state, control)


def test_says_that_the_last_model_is_kept(caplog):
    with caplog.at_level(logging.WARNING):
        EarlyStoppingCallback().on_train_begin(arguments(), TrainerState(), TrainerControl())
        assert not caplog.records
        EarlyStoppingCallback().on_train_begin(
            arguments(load_best_model_at_end=False), TrainerState(), TrainerControl()
        )
    assert "load_best_model_at_end" in caplog.text


def test_state_round_trip():
    callback = EarlyStoppingCallback(3, 0.5)
    callback.early_stopping_patience_counter = 2
    again = EarlyStoppingCallback.from_state(callback.state())
    assert again.state() == callback.state()
