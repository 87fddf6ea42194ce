"""TFTrainer computes the numbers of Keras: `evaluate` and one optimizer step of compiled models, kind by kind.

Keras runs each case operation by operation (`run_eagerly`), which takes no tracing; TFTrainer runs it compiled. Every
pair of kinds occurs.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import make_trainer

from paceline.tensorflow.framework import keras

SIZE, FEATURES, LENGTH, WORDS = 12, 4, 5, 7
CHOICE = np.random.default_rng(0)
INPUTS = CHOICE.normal(size=(SIZE, FEATURES)).astype(np.float32)
TOKENS = CHOICE.integers(0, WORDS, (SIZE, LENGTH))  # 0 is masked
TOKENS[:, 0] = 1
WEIGHTS = CHOICE.uniform(0.2, 2, SIZE)


def dense(units: int, name: str | None = None, **options: Any) -> Any:
    return keras.layers.Dense(units, name=name, **options)


# ---- architectures: units of the head -> model


def sequential(units: int) -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), dense(6, activation="tanh"), dense(units)])


def nested(units: int) -> Any:
    """In the inner model the layer that is made last is a gate, whose numbers are no probabilities."""
    inputs = keras.Input((FEATURES,))
    values = dense(units)(inputs)
    gate = dense(units, activation="softmax" if units > 1 else "sigmoid")(inputs)
    inner = keras.Model(inputs, keras.layers.Multiply()([values, gate]))
    return keras.Sequential([keras.Input((FEATURES,)), dense(FEATURES, activation="relu"), inner])


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, units: int) -> None:
        super().__init__()
        self.wide, self.head = dense(6, activation="tanh"), dense(units)

    def call(self, x: Any) -> Any:
        return self.head(self.wide(x))


def subclassed(units: int) -> Any:
    model = Subclassed(units)
    model(INPUTS)
    return model


def several(units: int) -> Any:
    """Inputs and outputs in lists."""
    inputs = [keras.Input((FEATURES,)), keras.Input((FEATURES,))]
    joined = keras.layers.concatenate(inputs)
    return keras.Model(inputs, [dense(units, "first")(joined), dense(units, "second")(joined)])


def named(units: int) -> Any:
    """Inputs and outputs in dicts; the inputs have the names of parameters of `call`."""
    inputs = {name: keras.Input((FEATURES,), name=name) for name in ("inputs", "mask")}
    joined = keras.layers.concatenate(list(inputs.values()))
    return keras.Model(inputs, {name: dense(units, name)(joined) for name in ("first", "second")})


def masked(units: int) -> Any:
    embedding = keras.layers.Embedding(WORDS, 6, mask_zero=True)
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), embedding, dense(units)])


def regularised(units: int) -> Any:
    """And normalized over the batch."""
    layers = [dense(6, activity_regularizer="l1"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, dense(units, kernel_regularizer="l2")])


FEATURES_OF = {
    "masked": TOKENS,
    "several": [INPUTS, INPUTS[::-1].copy()],
    "named": {"inputs": INPUTS, "mask": INPUTS[::-1].copy()},
}


# ---- losses: name -> (units of the head, labels by the number of rows, loss by its reduction)


def classes(shape: tuple[int, ...]) -> Any:
    return np.arange(np.prod(shape)).reshape(shape) * 7 % 3


def some_ignored(shape: tuple[int, ...]) -> Any:
    return np.where(np.arange(np.prod(shape)).reshape(shape) % 4 == 1, -100, classes(shape))


def numbers(shape: tuple[int, ...]) -> Any:
    return np.sin(np.arange(np.prod(shape))).reshape(shape)  # float64


class Scaled(keras.losses.Loss):  # type: ignore[misc]
    """A loss of one's own, with a `call`."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1) * 3


LOSSES: dict[str, tuple[int, Callable[[tuple[int, ...]], Any], Callable[[Any], Any]]] = {
    "squares": (1, numbers, lambda reduction: keras.losses.MeanSquaredError(reduction=reduction)),
    "name": (1, lambda shape: classes(shape) % 2, lambda reduction: "binary_crossentropy"),
    "classes": (3, classes, lambda r: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=r)),
    "ignoring": (
        3,
        some_ignored,
        lambda r: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100, reduction=r),
    ),
    "one-hot": (
        3,
        lambda shape: np.eye(3)[classes(shape)],
        lambda r: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction=r),
    ),
    "own": (1, numbers, lambda reduction: Scaled(reduction=reduction)),
}
ARCHITECTURES = {make.__name__: make for make in (sequential, nested, subclassed, several, named, masked, regularised)}
AXES: dict[str, list[Any]] = {
    "architecture": list(ARCHITECTURES),
    "loss": list(LOSSES),
    "reduction": ["sum_over_batch_size", "sum", "mean_with_sample_weight", None],
    "column": [False, True],
    "weighted": [False, True],
    "policy": ["float32", "mixed_bfloat16", "mixed_float16"],
    "micro_batches": [1, 3],
}
Case = tuple[Any, ...]


def is_possible(case: Case) -> bool:
    """True if Keras can compute the case, and its micro-batches are parts of it."""
    given = dict(zip(AXES, case, strict=True))
    architecture, loss, reduction, column = list(given.values())[:4]
    if loss == "name" and reduction != "sum_over_batch_size":
        return False  # Keras reduces it itself
    if architecture == "regularised" and (reduction is None or given["policy"] != "float32"):
        return False  # Keras adds up no vectors, and no numbers of several types
    if architecture == "regularised" and given["micro_batches"] > 1:
        return False  # each has a mean and variance of its own
    if loss == "one-hot":
        return not column
    if loss == "own":
        return column  # nothing squeezes its labels
    return column or architecture != "masked" or loss not in ("squares", "name")


def covering(cases: list[Case]) -> list[Case]:
    """Returns few of the cases, among them every pair of values that occurs."""
    draw = np.random.default_rng(1)
    groups_of = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*groups_of.values())
    order, chosen = sorted(missing, key=repr), []
    for group in order:
        if group not in missing:
            continue
        fitting = [case for case in cases if group in groups_of[case]]
        sample = [fitting[place] for place in draw.integers(0, len(fitting), 60)]
        chosen.append(max(sample, key=lambda case: len(missing & groups_of[case])))
        missing -= groups_of[chosen[-1]]
    return chosen


EVERY = [case for case in itertools.product(*AXES.values()) if is_possible(case)]


def build(case: Case, run_eagerly: bool) -> tuple[Any, Any]:
    """The model of a case, compiled, and its (features, labels[, weights of samples])."""
    given = dict(zip(AXES, case, strict=True))
    units, make_labels, make_loss = LOSSES[given["loss"]]
    architecture = given["architecture"]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(given["policy"])
    try:
        model = ARCHITECTURES[architecture](units)
    finally:
        keras.config.set_dtype_policy("float32")
    shape = (SIZE, LENGTH) if architecture == "masked" else (SIZE,)
    labels = make_labels((*shape, 1) if given["column"] else shape)
    weights = WEIGHTS[:, None] if architecture == "masked" else WEIGHTS
    loss: Any = make_loss(given["reduction"])
    options: dict[str, Any] = {}
    if architecture in ("several", "named"):
        loss, labels = [loss, make_loss(given["reduction"])], [labels, labels[::-1].copy()]
        options["loss_weights"] = [0.3, 2.0]
    if architecture == "named":
        parts = (loss, labels, options["loss_weights"])
        loss, labels, options["loss_weights"] = ({"first": part[0], "second": part[1]} for part in parts)
    optimizer = keras.optimizers.SGD(0.1)
    if given["policy"] == "mixed_float16":  # so small a scale that neither the whole nor a part of it overflows
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(optimizer, loss, run_eagerly=run_eagerly, **options)
    features = FEATURES_OF.get(architecture, INPUTS)
    return model, (features, labels, weights) if given["weighted"] else (features, labels)


def differences(case: Case, folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """(what, ours, theirs)."""
    given = dict(zip(AXES, case, strict=True))
    theirs, data = build(case, run_eagerly=True)
    ours, _ = build(case, run_eagerly=False)
    trainer = make_trainer(
        folder,
        ours,
        data,
        learning_rate=5e-5,
        max_grad_norm=0.0,
        max_steps=1,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=SIZE // given["micro_batches"],
        gradient_accumulation_steps=given["micro_batches"],
        per_device_eval_batch_size=6,
    )
    weights = {"sample_weight": data[2]} if given["weighted"] else {}
    yield (
        "evaluate",
        trainer.evaluate(data)["eval_loss"],
        theirs.evaluate(*data[:2], batch_size=6, verbose=0, return_dict=True, **weights)["loss"],
    )
    trainer.train()
    loss = theirs.train_on_batch(*data[:2], return_dict=True, **weights)["loss"]
    yield "loss of the update", trainer.state.log_history[0]["loss"], loss
    for own, their in zip(ours.weights, theirs.weights, strict=True):
        yield own.path, np.asarray(own), np.asarray(their)


def check(cases: list[Case], folder: Path) -> None:
    wrong = []
    for number, case in enumerate(cases):
        is_single = "float32" in case
        for what, ours, theirs in differences(case, folder / str(number)):
            tolerance = 1e-6 if is_single else 1e-2
            if not np.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
                wrong.append(f"{case}: {what}: ours {np.ravel(ours)[:3]}, Keras' {np.ravel(theirs)[:3]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_pair(tmp_path: Path) -> None:
    """The whole product, 2,440 cases, takes twenty minutes, and every triple two and a half."""
    check(covering(EVERY), tmp_path)
