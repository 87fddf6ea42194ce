"""Calibration, decisions and tests: against formulas, simulations, and real data."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.optional import is_installed
from paceline.predictions.calibration import Calibrator, fit_calibration
from paceline.predictions.decisions import f1, fit_conformal, fit_thresholds
from paceline.predictions.reliability import expected_calibration_error, reliability_table, write_diagram
from paceline.predictions.significance import mcnemar, paired_bootstrap
from paceline.predictions.weights import log_softmax

with_sklearn = pytest.mark.skipif(not is_installed("sklearn"), reason="scikit-learn is not installed")
METHODS = ["temperature", "vector", pytest.param("isotonic", marks=with_sklearn)]


def simulate(seed: int, number: int = 3000, factor: float = 3.0) -> tuple[Any, Any]:
    """Returns logits that are `factor` times those that the labels are drawn from, and the labels."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(number, 4)) * 1.5
    labels = (np.exp(log_softmax(true)).cumsum(1) < rng.random((number, 1))).sum(1).clip(max=3)
    return true * factor, labels


@pytest.mark.parametrize("method", METHODS)
def test_overconfidence_is_removed_on_other_samples(method: str, tmp_path: Path) -> None:
    fitted = fit_calibration(*simulate(0), method)
    logits, labels = simulate(1)
    before = expected_calibration_error(np.exp(log_softmax(logits)), labels)
    probabilities = fitted(logits)
    assert before > 0.15
    assert expected_calibration_error(probabilities, labels) < 0.04
    np.testing.assert_allclose(probabilities.sum(1), 1)
    fitted.save(tmp_path)
    np.testing.assert_array_equal(Calibrator.load(tmp_path)(logits), probabilities)


def test_the_temperature_is_found() -> None:
    fitted = fit_calibration(*simulate(0, 20_000))
    assert 1 / fitted.parameters["scale"][0] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_temperature_keeps_the_predicted_classes_and_lowers_the_loss(seed: int) -> None:
    logits, labels = simulate(seed, 50, 0.2 + seed)
    probabilities = fit_calibration(logits, labels)(logits)
    np.testing.assert_array_equal(probabilities.argmax(1), logits.argmax(1))
    rows = np.arange(50)
    assert -np.log(probabilities[rows, labels]).mean() <= -log_softmax(logits)[rows, labels].mean() + 1e-9


def test_separable_and_hostile_samples_have_a_finite_calibration() -> None:
    logits = np.eye(3)[[0, 1, 2]] * 5
    for method in ("temperature", "vector"):
        for labels in (np.array([0, 1, 2]), np.array([1, 2, 0])):
            assert np.isfinite(fit_calibration(logits, labels, method)(logits)).all()


@pytest.mark.parametrize(
    ("logits", "labels", "method", "message"),
    [
        (np.zeros((3, 2)), np.zeros(3, int), "platt", "method"),
        (np.zeros((3, 2)), np.zeros(2, int), "temperature", "do not fit"),
        (np.zeros((3, 2)), np.zeros(3), "temperature", "do not fit"),
        (np.zeros((3, 2)), np.full(3, 2), "temperature", "outside"),
        (np.zeros((3, 2)), np.full(3, -100), "temperature", "no labels"),
        (np.full((3, 2), np.nan), np.zeros(3, int), "temperature", "not finite"),
    ],
)
def test_wrong_samples_are_refused(logits: Any, labels: Any, method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_calibration(logits, labels, method)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"method": "eval", "num_classes": 2, "num_samples": 1, "parameters": {}}),
        json.dumps({"method": "vector", "num_classes": 2, "num_samples": 1, "parameters": {"scale": [1], "bias": [0]}}),
        '{"method": "vector", "num_classes": 1, "num_samples": 1, "parameters": {"scale": [NaN], "bias": [0]}}',
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(ValueError, match=r"calibration\.json"):
        Calibrator.load(tmp_path)


def test_another_number_of_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="4 classes"):
        fit_calibration(*simulate(0, 20))(np.zeros((2, 3)))


def test_the_table_counts_each_sample_once(tmp_path: Path) -> None:
    probabilities = np.array([[1.0, 0.0], [0.5, 0.5], [0.6, 0.4], [0.95, 0.05]])
    table = reliability_table(probabilities, np.array([0, 1, 0, 1]), 10)
    assert [each.num_samples for each in table] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 2]
    assert table[9].accuracy == 0.5
    expected = (abs(0 - 0.5) + abs(1 - 0.6) + 2 * abs(0.5 - 0.975)) / 4
    assert expected_calibration_error(probabilities, np.array([0, 1, 0, 1]), 10) == pytest.approx(expected)
    ElementTree.parse(write_diagram(table, tmp_path / "diagram.svg"))
    with pytest.raises(ValueError, match="softmax"):
        reliability_table(probabilities * 3, np.array([0, 1, 0, 1]))


@pytest.mark.parametrize("method", ["split", "aps"])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_the_coverage_is_that_stated_on_average(method: str, coverage: float) -> None:
    found = []
    for seed in range(60):
        logits, labels = simulate(seed, 400)
        probabilities = np.exp(log_softmax(logits))
        sets = fit_conformal(probabilities[:100], labels[:100], coverage, method)
        found.append(sets(probabilities[100:])[np.arange(300), labels[100:]].mean())
    assert coverage - 0.02 < np.mean(found)
    if method == "split":
        assert np.mean(found) < coverage + 0.03


def test_sets_of_logits_and_metrics_that_are_nan_are_refused() -> None:
    rows, labels = np.tile(np.float64([[0.5, 0.3, 0.2]]), (20, 1)), np.zeros(20, dtype=np.int64)
    sets = fit_conformal(rows, labels, 0.9)
    for wrong in (np.log(rows), np.full_like(rows, np.nan), rows[0]):
        with pytest.raises(ValueError, match="expected probabilities"):
            sets(wrong)
    with pytest.raises(ValueError, match="not finite for 10 of 10 resamples"):
        paired_bootstrap(labels, labels, labels, lambda predicted, true: float("nan"), num_resamples=10)
    with pytest.raises(ValueError, match="NaN for a threshold"):
        fit_thresholds(rows[:, 0], labels, lambda true, chosen: float("nan"))


def test_too_few_samples_for_a_coverage_are_refused() -> None:
    logits, labels = simulate(0, 18)
    with pytest.raises(ValueError, match="at least 19"):
        fit_conformal(np.exp(log_softmax(logits)), labels, 0.95)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (60, 3))
    scores = labels * 0.7 + rng.normal(size=(60, 3))
    thresholds, values = fit_thresholds(scores, labels)
    for column in range(3):
        true = labels[:, column] == 1
        assert f1(true, scores[:, column] >= thresholds[column]) == values[column]
        assert all(f1(true, scores[:, column] >= other) <= values[column] for other in rng.normal(size=50))


def test_mcnemar_is_the_binomial_test() -> None:
    labels = np.zeros(20, int)
    first, second = labels.copy(), labels.copy()
    second[:6] = 1
    first[6] = 1
    assert mcnemar(first, second, labels) == (6, 1, pytest.approx(2 * (1 + 7) / 2**7))
    assert mcnemar(first, first, labels).p_value == 1.0


def test_the_bootstrap_finds_a_difference_and_none_between_equals() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    good, bad = (np.where(rng.random(400) < share, 1 - labels, labels) for share in (0.1, 0.3))

    def accuracy(predictions: Any, truth: Any) -> float:
        return float((predictions == truth).mean())

    found = paired_bootstrap(bad, good, labels, accuracy, 500)
    assert 0.1 < found.low < found.difference < found.high < 0.3
    assert found.p_value < 0.01
    assert paired_bootstrap(good, good, labels, accuracy, 100).p_value == 1.0
    with pytest.raises(ValueError, match="same number"):
        paired_bootstrap(bad, good, labels[:3], accuracy)


@with_sklearn
def test_real_data() -> None:
    """Naive Bayes on breast cancer is overconfident; a temperature on held-out samples removes most of the error."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.naive_bayes import GaussianNB

    rows, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(rows))
    train, held_out, test = np.split(order, [200, 380])
    model = GaussianNB().fit(rows[train], labels[train])
    logits = model.predict_joint_log_proba(rows)
    fitted = fit_calibration(logits[held_out], labels[held_out])
    before = expected_calibration_error(np.exp(log_softmax(logits[test])), labels[test])
    after = expected_calibration_error(fitted(logits[test]), labels[test])
    assert after < 0.7 * before
    sets = fit_conformal(fitted(logits[held_out]), labels[held_out], 0.9)
    assert sets(fitted(logits[test]))[np.arange(len(test)), labels[test]].mean() > 0.85
