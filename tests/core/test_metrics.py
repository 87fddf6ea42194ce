import enum
import json
import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.metrics import (
    MetricNotFound,
    best_metric_value,
    default_compute_objective,
    format_metrics,
    is_better,
    jsonable,
    prefix_metrics,
    speed_metrics,
)


def test_speed_metrics(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 12.0)
    assert speed_metrics("train", 10.0, num_samples=5, num_steps=3, num_tokens=1000) == {
        "train_runtime": 2.0,
        "train_samples_per_second": 2.5,
        "train_steps_per_second": 1.5,
        "train_tokens_per_second": 500.0,
    }
    assert speed_metrics("eval", 12.0, num_samples=5) == {"eval_runtime": 0.0}
    assert list(speed_metrics("eval", 10.0, num_steps=0)) == ["eval_runtime", "eval_steps_per_second"]


def test_prefix_metrics():
    assert list(prefix_metrics({"f1": 1, "eval_loss": 2, "evaluation": 3}, "eval").items()) == [
        ("eval_f1", 1),
        ("eval_loss", 2),
        ("eval_evaluation", 3),
    ]


@dataclass
class Point:
    x: float
    y: float


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(2.0), 2.0),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([1, 2]), [1, 2]),
        ({"a": (np.float32(1), {2})}, {"a": [1.0, [2]]}),
        ({Colour.RED: Colour.RED}, {"red": "red"}),
        ([Point(np.float32(1), 2)], [{"x": 1.0, "y": 2}]),
        (Point, f"<class '{__name__}.Point'>"),
        (object, "<class 'object'>"),
        (True, True),
        (None, None),
    ],
)
def test_jsonable(value, expected):
    plain = jsonable(value)
    assert plain == expected
    assert type(plain) is type(expected)
    assert json.loads(json.dumps(plain)) == expected


def test_best_metric_value():
    metrics = {"eval_loss": np.float32(0.5), "eval_f1": 1, "accuracy": 0.25}
    assert best_metric_value(metrics, "loss") == best_metric_value(metrics, "eval_loss") == 0.5
    assert best_metric_value(metrics, "accuracy") == 0.25
    assert type(best_metric_value(metrics, "f1")) is float


def test_a_missing_metric_lists_those_that_are_there():
    with pytest.raises(MetricNotFound, match=r"'eval_bleu'\. It gave: eval_f1, eval_loss") as caught:
        best_metric_value({"eval_loss": 1.0, "eval_f1": 0.5}, "bleu")
    assert isinstance(caught.value, KeyError)
    assert not str(caught.value).startswith(('"', "'"))


@pytest.mark.parametrize("value", ["high", [1.0], None, True])
def test_a_metric_that_is_no_number(value):
    with pytest.raises(TypeError, match="eval_f1 must be a number"):
        best_metric_value({"eval_f1": value}, "f1")


number = st.floats(allow_nan=True)


@given(number, number, st.booleans())
def test_at_most_one_of_two_is_better(first, second, greater_is_better):
    assert not (is_better(first, second, greater_is_better) and is_better(second, first, greater_is_better))
    if not math.isnan(first) and not math.isnan(second):
        assert is_better(first, second, True) == (first > second) == is_better(second, first, False)


def test_any_number_beats_none_and_nan():
    assert is_better(1.0, None, True)
    assert is_better(1.0, math.nan, False)
    assert not is_better(math.nan, None, True)
    assert not is_better(math.nan, 1.0, True)


def test_default_compute_objective():
    speed = {"eval_runtime": 9.0, "eval_samples_per_second": 9.0, "eval_model_preparation_time": 9.0, "epoch": 9}
    assert default_compute_objective({"eval_loss": 0.5, **speed}) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_f1": 1.0, "eval_acc": 2.0, **speed}) == 3.0
    with pytest.raises(MetricNotFound):
        default_compute_objective(speed)


def test_format_metrics():
    assert format_metrics(
        {
            "train_mem_cpu_peaked_delta": 5 << 20,
            "train_runtime": 3723.456,
            "total_flos": float(7 << 30),
            "train_loss": 0.123456,
            "epoch": 3,
            "name": "x",
        }
    ) == {
        "train_mem_cpu_peaked_delta": "5MB",
        "train_runtime": "1:02:03.45",
        "total_flos": "7GF",
        "train_loss": 0.1235,
        "epoch": 3,
        "name": "x",
    }
