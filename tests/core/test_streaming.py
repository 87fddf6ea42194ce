"""Streaming metrics: any split gives the same value, merging is associative, intervals cover what they claim."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.contracts import StreamingMetric
from paceline.core.intervals import percentiles, poisson_weights, wilson_interval
from paceline.core.outputs import EvalPrediction
from paceline.core.streaming import (
    F1,
    Accuracy,
    Mean,
    MetricGroup,
    Perplexity,
    Regression,
    SumMetric,
    is_streaming,
)

CLASSES = 5


def classified(count: int, seed: int = 0) -> EvalPrediction:
    random = np.random.default_rng(seed)
    return EvalPrediction(random.normal(size=(count, CLASSES)).astype(np.float32), random.integers(0, CLASSES, count))


def texts(count: int, seed: int = 0, width: int = 6) -> EvalPrediction:
    """Logits and targets of token sequences, with 0 to `width` targets each."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, (count, width))
    labels[np.arange(width) >= random.integers(0, width + 1, count)[:, None]] = -100
    return EvalPrediction(random.normal(size=(count, width, CLASSES)).astype(np.float32), labels)


def numbers(count: int, seed: int = 0, mean: float = 0.0) -> EvalPrediction:
    random = np.random.default_rng(seed)
    labels = random.normal(mean, 2.0, count)
    return EvalPrediction(labels + random.normal(0, 1, count), labels)


Make = Callable[[int, int], EvalPrediction]
KINDS: dict[str, tuple[Callable[[], Any], Make]] = {
    "mean": (lambda: Mean(lambda p: p.predictions[:, 0], replicates=40), classified),
    "weighted mean": (lambda: Mean(lambda p: (p.predictions[:, 0], p.label_ids), replicates=40), classified),
    "accuracy": (lambda: Accuracy(replicates=40), classified),
    "token accuracy": (lambda: Accuracy(shifted=True, replicates=40), texts),
    "perplexity": (lambda: Perplexity(replicates=40), texts),
    "f1": (lambda: F1(CLASSES, replicates=40), classified),
    "tags": (lambda: F1(CLASSES, "weighted", replicates=40), texts),
    "regression": (lambda: Regression(replicates=40), lambda count, seed: numbers(count, seed)),
    "group": (lambda: MetricGroup(Accuracy(replicates=40), F1(CLASSES, "micro", replicates=40)), classified),
}


def cut(data: EvalPrediction, start: int, stop: int) -> EvalPrediction:
    return EvalPrediction(data.predictions[start:stop], data.label_ids[start:stop])


def updated(metric: Any, data: EvalPrediction, sizes: list[int]) -> Any:
    start = 0
    for size in sizes:
        metric.update(cut(data, start, start + size))
        start += size
    return metric


def assert_close(left: dict[str, float], right: dict[str, float], rel: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert right[name] == pytest.approx(value, rel=rel, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 5))
def test_any_split_gives_the_same_values_and_intervals(kind: str, sizes: list[int], seed: int) -> None:
    make, data_of = KINDS[kind]
    data = data_of(sum(sizes), seed)
    whole = updated(make(), data, [sum(sizes)]).compute()
    assert_close(whole, updated(make(), data, sizes).compute())
    assert_close(whole, updated(make(), data, [1] * sum(sizes)).compute())


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
def test_merging_is_associative_and_gives_the_value_of_the_whole(kind: str, a: int, b: int, c: int) -> None:
    make, data_of = KINDS[kind]
    data = data_of(a + b + c, 3)
    parts = []
    for start, stop in ((0, a), (a, a + b), (a + b, a + b + c)):
        part = make()
        for metric in getattr(part, "metrics", (part,)):
            metric.reset(start)
        if stop > start:
            part.update(cut(data, start, stop))
        parts.append(part)
    left, right = copy.deepcopy(parts), copy.deepcopy(parts)
    left[0].merge(left[1])
    left[0].merge(left[2])
    right[1].merge(right[2])
    right[0].merge(right[1])
    whole = updated(make(), data, [a + b + c])
    assert_close(left[0].compute(), right[0].compute(), rel=1e-9)
    assert_close(whole.compute(), left[0].compute(), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_forgets_everything(kind: str) -> None:
    make, data_of = KINDS[kind]
    metric = make()
    assert metric.compute() == {}
    first = updated(metric, data_of(9, 1), [4, 5]).compute()
    metric.reset()
    assert metric.compute() == {}
    assert updated(metric, data_of(9, 1), [9]).compute() == pytest.approx(first, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_does_not_grow(kind: str) -> None:
    make, data_of = KINDS[kind]

    def size_of(value: Any) -> int:
        if isinstance(value, np.ndarray):
            return value.nbytes
        if hasattr(value, "__dict__"):
            return sum(map(size_of, vars(value).values()))
        return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0

    small, large = updated(make(), data_of(4, 0), [4]), updated(make(), data_of(400, 0), [4] * 100)
    assert size_of(small) == size_of(large) > 0


def test_values_are_those_of_numpy() -> None:
    data = classified(200)
    found = MetricGroup(Accuracy(), Mean(lambda p: p.predictions.max(1), name="top"))
    found.update(data)
    values = found.compute()
    assert values["accuracy"] == (data.predictions.argmax(-1) == data.label_ids).mean()
    assert values["top"] == pytest.approx(data.predictions.max(1).mean(dtype=np.float64))


def test_perplexity_is_exp_of_the_mean_over_all_tokens() -> None:
    data = texts(40)
    logits, labels = data.predictions[:, :-1].astype(np.float64), data.label_ids[:, 1:]
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = labels != -100
    picked = np.take_along_axis(log_probabilities, np.where(kept, labels, 0)[..., None], -1)[..., 0]
    found = updated(Perplexity(), data, [7, 33]).compute()
    assert found["perplexity"] == pytest.approx(math.exp(-picked[kept].mean()))
    assert found["perplexity_low"] < found["perplexity"] < found["perplexity_high"]
    right = (data.predictions[:, :-1].argmax(-1) == labels)[kept]
    assert updated(Accuracy(shifted=True), data, [40]).compute()["accuracy"] == pytest.approx(right.mean())


def test_perplexity_of_extreme_logits() -> None:
    logits = np.array([[[1e4, -1e4, 0.0]] * 2], np.float32)
    metric = updated(Perplexity(confidence=None), EvalPrediction(logits, np.array([[0, 0]])), [1])
    assert metric.compute() == {"perplexity": 1.0}
    metric.update(EvalPrediction(logits, np.array([[1, 1]])))
    assert metric.compute() == {"perplexity": math.inf}


@pytest.mark.parametrize("average", ["macro", "weighted", "micro", "binary"])
def test_f1_is_that_of_sklearn(average: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    data = classified(300)
    if average == "binary":
        data = EvalPrediction(data.predictions[:, :2], data.label_ids % 2)
    metric = updated(F1(2 if average == "binary" else CLASSES, average), data, [100, 200])
    values = metric.compute()
    classes = data.predictions.argmax(-1)
    expected = metrics.precision_recall_fscore_support(data.label_ids, classes, average=average, zero_division=0)
    assert [values["precision"], values["recall"], values["f1"]] == pytest.approx(expected[:3])
    assert metric.matrix.tolist() == metrics.confusion_matrix(data.label_ids, classes).tolist()
    assert values["f1_low"] < values["f1"] < values["f1_high"]


@pytest.mark.parametrize("mean", [0.0, 1e7])
def test_regression_is_that_of_sklearn_however_far_from_zero(mean: float) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    data = numbers(300, mean=mean)
    values = updated(Regression(), data, [100, 200]).compute()
    assert values["mse"] == pytest.approx(metrics.mean_squared_error(data.label_ids, data.predictions))
    assert values["mae"] == pytest.approx(metrics.mean_absolute_error(data.label_ids, data.predictions))
    assert values["r2"] == pytest.approx(metrics.r2_score(data.label_ids, data.predictions))
    assert values["rmse"] == pytest.approx(values["mse"] ** 0.5)
    assert values["pearson"] == pytest.approx(np.corrcoef(data.label_ids, data.predictions)[0, 1])


def test_predictions_may_be_columns_or_come_in_a_tuple() -> None:
    data = numbers(20)
    column = EvalPrediction((data.predictions[:, None], np.zeros(3)), data.label_ids)
    assert updated(Regression(), data, [20]).compute() == values_of_regression(column)


def test_what_weighs_nothing_need_not_be_a_number() -> None:
    metric = Mean(lambda p: (p.predictions, p.label_ids))
    values, weights = np.array([2.0, math.nan, 5.0, math.inf, -math.inf]), np.array([1.0, 0.0, 2.0, 0.0, 0.0])
    metric.update(EvalPrediction(values, weights))
    assert metric.compute()["mean"] == 4.0


def values_of_regression(data: EvalPrediction) -> dict[str, float]:
    metric = Regression()
    metric.update(data)
    return metric.compute()


# ---- intervals


def test_poisson_weights_belong_to_the_place_of_a_sample() -> None:
    whole = poisson_weights(0, 50, 37, seed=3)
    for first, count in ((0, 1), (7, 5), (49, 1), (20, 30)):
        assert (poisson_weights(first, count, 37, seed=3) == whole[first : first + count]).all()
    assert (poisson_weights(0, 50, 37, seed=4) != whole).any()
    many = poisson_weights(0, 4000, 50, seed=0).astype(float)
    assert many.mean() == pytest.approx(1, abs=0.01)
    assert many.var() == pytest.approx(1, abs=0.02)


def test_intervals_cover_what_they_claim() -> None:
    """The true mean lies inside nine of ten 90 % intervals, for texts whose tokens are anything but independent."""
    random = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        level = random.uniform(0.2, 0.8, (60, 1))
        right = random.uniform(size=(60, 20)) < level
        data = EvalPrediction(right.astype(int), np.ones((60, 20), int))
        values = updated(Accuracy(confidence=0.9, replicates=200, seed=trial), data, [60]).compute()
        hits += values["accuracy_low"] <= 0.5 <= values["accuracy_high"]
    assert 0.83 <= hits / 200 <= 0.96


def test_one_target_per_sample_has_wilsons_interval() -> None:
    data = EvalPrediction(np.ones(10, int), np.ones(10, int))
    values = updated(Accuracy(), data, [10]).compute()
    assert values["accuracy_high"] == 1.0
    assert values["accuracy_low"] == pytest.approx(0.7225, abs=1e-4)  # Wilson (1927) for 10 of 10
    low, high = wilson_interval(15, 50, 0.95)
    assert (low, high) == pytest.approx((0.1910, 0.4375), abs=1e-4)


def test_the_bootstrap_agrees_with_the_normal_interval_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(3, 2, 2000)
    metric = Mean(lambda p: p.predictions, replicates=2000)
    metric.update(EvalPrediction(values, values))
    found = metric.compute()
    half = 1.96 * values.std() / math.sqrt(2000)
    assert found["mean_low"] == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found["mean_high"] == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_no_intervals() -> None:
    for metric in (Accuracy(confidence=None), F1(CLASSES, confidence=None)):
        assert not any(name.endswith(("_low", "_high")) for name in updated(metric, classified(5), [5]).compute())
    assert all(map(math.isnan, percentiles(np.array([math.nan]), 0.9)))


# ---- errors, and metrics of one's own


def test_shards_that_count_from_the_same_place_are_refused() -> None:
    first, second = (updated(Accuracy(), classified(4, seed), [4]) for seed in (0, 1))
    with pytest.raises(ValueError, match="first_sample"):
        first.merge(second)
    plain = [updated(Accuracy(confidence=None), classified(4, seed), [4]) for seed in (0, 1)]
    plain[0].merge(plain[1])  # without intervals there is nothing to confuse


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Accuracy(), Accuracy(shifted=True)),
        (F1(2), F1(3)),
        (Mean(len, "a"), Mean(len, "b")),
        (Perplexity(), Accuracy()),
    ],
)
def test_other_settings_cannot_be_merged(first: Any, second: Any) -> None:
    with pytest.raises(ValueError, match="the same settings"):
        first.merge(second)


def test_groups_of_other_sizes_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="shorter"):
        MetricGroup(Accuracy(), F1(CLASSES)).merge(MetricGroup(Accuracy()))


@pytest.mark.parametrize(
    ("metric", "prediction", "message"),
    [
        (Accuracy(), EvalPrediction(None, np.zeros(2)), "no predictions"),
        (Accuracy(), EvalPrediction(np.zeros(2), None), "no labels"),
        (Accuracy(), EvalPrediction(np.zeros(2), np.zeros(2, int)), "class numbers"),
        (Accuracy(), EvalPrediction(np.zeros((3, 4)), np.zeros(2, int)), "class numbers"),
        (Perplexity(), EvalPrediction(np.zeros((2, 4), int), np.zeros((2, 4), int)), "needs logits"),
        (Regression(), EvalPrediction(np.zeros((2, 2)), np.zeros(2)), "as many predictions"),
        (F1(2), EvalPrediction(np.array([0, 1]), np.array([0, 2])), "a target of 2"),
        (F1(2), EvalPrediction(np.array([0, -1]), np.array([0, 1])), "predicted class of -1"),
    ],
)
def test_what_cannot_be_compared_is_an_error(metric: Any, prediction: EvalPrediction, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.update(prediction)


def test_settings_are_checked() -> None:
    for wrong in ({"confidence": 1.0}, {"confidence": 0.0}, {"replicates": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Accuracy(**wrong)
    with pytest.raises(ValueError, match="average"):
        F1(2, "mean")
    group = MetricGroup(Accuracy(), Accuracy())
    group.update(classified(3))
    with pytest.raises(ValueError, match="accuracy"):
        group.compute()


class Spread(SumMetric):
    """The standard deviation of the largest logit: a metric of one's own."""

    def rows(self, prediction: EvalPrediction) -> Any:
        top = prediction.predictions.max(1).astype(float)
        return np.stack([np.ones_like(top), top, top * top], 1)

    def values(self, sums: Any) -> dict[str, Any]:
        n, x, xx = np.moveaxis(sums, -1, 0)
        return {"spread": np.sqrt(xx / n - (x / n) ** 2)}


def test_a_metric_of_ones_own() -> None:
    data = classified(100)
    values = updated(Spread(), data, [30, 70]).compute()
    assert values["spread"] == pytest.approx(data.predictions.max(1).std(dtype=float))
    assert values["spread_low"] < values["spread"] < values["spread_high"]


def test_what_is_driven_batch_by_batch() -> None:
    class Own:
        def reset(self) -> None: ...

        def update(self, prediction: Any) -> None: ...

        def merge(self, other: Any) -> None: ...

        def compute(self) -> dict[str, float]:
            return {}

    class Called(Own):
        def __call__(self, prediction: Any) -> dict[str, float]:
            return {}

    class NoReset:
        def update(self, prediction: Any) -> None: ...

        def compute(self) -> None: ...

    for metric in (Own(), Accuracy(), F1(2), MetricGroup(Accuracy())):
        assert is_streaming(metric)
        assert isinstance(metric, StreamingMetric)
    assert not is_streaming(Called())
    assert not is_streaming(len)
    assert not is_streaming(None)
    with pytest.raises(TypeError, match="no `reset`"):
        is_streaming(NoReset())
