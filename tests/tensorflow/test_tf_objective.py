"""A `compute_loss_func` with TensorFlow: whether it divides by the count that it is given, ignores it, or cannot be
called without one, and options that do not apply to it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import CLASSES, FEATURES, Linear, losses, make_data, make_model, make_trainer, weights

from paceline import TFTrainer
from paceline.tensorflow.framework import keras, tf

SIZE = 16
FEATURES_OF_ALL, LABELS = make_data(SIZE)
LABELS[[0, 1, 2, 3, 9]] = -100  # no target on the first of two replicas, nor in the first micro-batches
DATA = FEATURES_OF_ALL, LABELS
PLAIN: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.3,
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": 8,
    "train_sampling_strategy": "sequential",
    "per_device_eval_batch_size": 5,
}


def sums(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """The sum of the cross-entropies of all targets other than -100, and their number."""
    kept = tf.cast(labels != -100, tf.float32)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), outputs)
    return tf.reduce_sum(each * kept), tf.reduce_sum(kept)


def divides(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    return sums(outputs, labels)[0] / num_items_in_batch


def divides_or_means(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    total, number = sums(outputs, labels)
    return total / (number if num_items_in_batch is None else num_items_in_batch)


def ignores(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    total, number = sums(outputs, labels)
    return total / tf.maximum(number, 1.0)


FUNCTIONS = [divides, divides_or_means, ignores]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("weight", [None, "scaled"])
def test_the_loss_of_an_evaluation_is_a_mean(tmp_path: Path, function: Any, weight: str | None) -> None:
    expected = make_trainer(tmp_path, make_model(), None, **PLAIN).evaluate(DATA)["eval_loss"]
    trainer = make_trainer(tmp_path, make_model(), None, compute_loss_func=function, loss_weight=weight, **PLAIN)
    assert trainer.evaluate(DATA)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def train(folder: Path, strategy: Any = None, make: Callable[[], Any] = Linear, **options: Any) -> list[Any]:
    """Losses, weights, and the loss of an evaluation, of a run of two optimizer steps of 8 samples."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
    trainer = make_trainer(folder, model, DATA, strategy=strategy, **{**PLAIN, **options})
    trainer.train()
    assert trainer.state.global_step == 2
    return [losses(trainer), weights(model), trainer.evaluate(DATA)["eval_loss"]]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for value, other in zip(found, expected, strict=True):
        assert np.allclose(value, other, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_micro_batches_add_up_to_their_step(tmp_path: Path, function: Any) -> None:
    expected = train(tmp_path / "expected")
    for accumulation in (1, 4):
        cut = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
        assert_same(train(tmp_path / str(accumulation), compute_loss_func=function, **cut), expected)


@pytest.mark.parametrize("function", [divides, ignores])
def test_replicas_add_up_to_their_step(tmp_path: Path, mirrored: Any, function: Any) -> None:
    expected = train(tmp_path / "expected")
    for size in (4, 2):
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        assert_same(train(tmp_path / str(size), mirrored, compute_loss_func=function, **cut), expected)


def normalized() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def test_a_layer_that_waits_for_other_replicas_leaves_each_its_count(tmp_path: Path, mirrored: Any) -> None:
    """The halves of a step have 0 and 4 targets, then 3 and 4."""
    options = {"per_device_train_batch_size": 4, "make": normalized}
    expected = train(tmp_path / "expected", mirrored, **options)
    assert_same(train(tmp_path / "found", mirrored, compute_loss_func=divides, **options), expected)


def test_a_layer_that_waits_for_other_replicas_leaves_each_its_weights(tmp_path: Path, mirrored: Any) -> None:
    data = (*make_data(8), np.arange(8, dtype=np.float32))
    found = []
    for strategy, size in ((None, 8), (mirrored, 4)):
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = normalized()
        options = {**PLAIN, "per_device_train_batch_size": size, "strategy": strategy}
        trainer = make_trainer(tmp_path / str(size), model, data, **options)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def of_step(outputs: Any, labels: Any, num_items_in_batch: Any = 8.0) -> Any:
    """A sum over at least 6: no mean of any part of a step, which has 4 targets or 7."""
    return sums(outputs, labels)[0] / tf.maximum(num_items_in_batch, 6.0)


def test_a_loss_that_is_declared_scaled_gets_the_count_of_the_step(tmp_path: Path) -> None:
    one = train(tmp_path / "one", compute_loss_func=of_step, loss_weight="scaled")
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    four = train(tmp_path / "four", compute_loss_func=of_step, loss_weight="scaled", **cut)
    assert_same(four[:2], one[:2])


class OwnStep(TFTrainer):
    """Takes the gradients of the loss as it is, as a function that divides for the whole step allows."""

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, _ = self.run_model(features, labels, True)
        return tape.gradient(loss, list(self.model.trainable_variables))


def test_an_own_training_step_gets_the_count_of_the_step(tmp_path: Path) -> None:
    expected = train(tmp_path / "expected")
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    found = train(tmp_path / "found", compute_loss_func=divides, kind=OwnStep, **cut)
    assert_same(found[1:], expected[1:])  # the loss of such a step is not known


@pytest.mark.parametrize("function", [divides_or_means, ignores])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, function: Any) -> None:
    options: dict[str, Any] = {**PLAIN, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    options |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "compute_loss_func": function}
    found = []
    for number in range(2):
        trainer = make_trainer(tmp_path, make_model(0.2), DATA, **options)
        trainer.train(resume_from_checkpoint=bool(number))
        found.append((losses(trainer), weights(trainer.model)))
        shutil.rmtree(tmp_path / "checkpoint-4")
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def mean_over_positives(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), outputs)
    kept = tf.cast(labels > 0, each.dtype)
    return tf.reduce_sum(each * kept) / tf.reduce_sum(kept)


def test_a_mean_over_something_else_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the function takes a count; functions that are right with one are not warned of."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 1}
    for function in (*FUNCTIONS, mean_over_positives):
        caplog.clear()
        trainer = make_trainer(tmp_path, make_model(), make_data(16), compute_loss_func=function, **options)
        trainer.train()
        assert ("couples the samples of a batch" in caplog.text) == (function is mean_over_positives)


class Labelled(keras.Model):  # type: ignore[misc]
    """Takes the labels and computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(CLASSES)

    def call(self, x: Any, labels: Any = None) -> Any:
        outputs = self.layer(x)
        return outputs if labels is None else (sums(outputs, labels)[0], outputs)


def test_label_smoothing_of_another_loss_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 1}
    with pytest.raises(ValueError, match=r"^label_smoothing_factor=0\.1: with compute_loss_func the loss is that"):
        make_trainer(tmp_path, Linear(), DATA, compute_loss_func=ignores, **options)
    model = Labelled()
    model(FEATURES_OF_ALL)
    trainer = make_trainer(tmp_path, model, DATA, **options)
    for run in (lambda: trainer.evaluate(DATA), trainer.train):
        with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1: the model takes `labels` and returns"):
            run()
    assert trainer.predict(FEATURES_OF_ALL).predictions.shape == (SIZE, CLASSES)
