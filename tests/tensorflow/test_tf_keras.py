"""Objects of Keras users are used as Keras does, or refused by name with the remedy."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import CLASSES, FEATURES, Linear, losses, make_data, make_model, make_trainer, weights

from paceline import TFTrainer, TFTrainingArguments, TrainerCallback, UnsupportedOption
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.optim.optimizers import undecayed_variables
from paceline.tensorflow.optim.schedules import StepSchedule

pytestmark = pytest.mark.slow

X, CLASS = make_data(12)
Y = np.sin(X[:, :1])
# what an optimizer of compile() leaves room for
OWN: dict[str, Any] = {"learning_rate": 5e-5, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}


def dense(units: int = 1, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(units, **options)])


def compiled(loss: Any = "mse", units: int = 1, optimizer: Any = None, **options: Any) -> Any:
    model = dense(units)
    model.compile(keras.optimizers.SGD(0.1) if optimizer is None else optimizer, loss, **options)
    return model


def say(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(caplog.text.split())


# ---- compiled models


def test_metrics_and_the_losses_of_outputs_are_reported(tmp_path: Path) -> None:
    """Under the names that Keras gives them; each evaluation begins anew."""

    def make() -> Any:
        inputs = keras.Input((FEATURES,))
        keras.utils.set_random_seed(0)
        outputs = {"a": keras.layers.Dense(1, name="a")(inputs), "b": keras.layers.Dense(CLASSES, name="b")(inputs)}
        model = keras.Model(inputs, outputs)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics: dict[str, Any] = {"metrics": {"b": ["accuracy"]}, "weighted_metrics": {"a": "mae"}}
        model.compile("sgd", {"a": "mse", "b": cross_entropy}, **metrics)
        return model

    data = X, {"a": Y, "b": CLASS}
    model = make()
    model.run_eagerly = True  # else Keras weighs each batch of the losses of outputs the same, whatever its size
    expected = model.evaluate(*data, batch_size=5, verbose=0, return_dict=True)
    trainer = make_trainer(tmp_path, make(), data, per_device_eval_batch_size=5)
    for _ in range(2):
        found = trainer.evaluate(data)
        assert {name: found[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert trainer.predict(data).metrics["test_b_accuracy"] == pytest.approx(expected["b_accuracy"])


def test_batches_weigh_as_in_keras_where_masks_leave_out_different_numbers(tmp_path: Path) -> None:
    """An evaluation weighs its batches by their samples; an update of micro-batches is that of the whole."""

    def make() -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    tokens = np.tril(np.arange(72).reshape(12, 6) % 8 + 1, k=-1)  # rows of 0, 1, 2 ... words
    data = tokens, (tokens + 1) % CLASSES
    ours, theirs = make(), make()
    trainer = make_trainer(
        tmp_path, ours, data, max_steps=1, gradient_accumulation_steps=3, per_device_eval_batch_size=5, **OWN
    )
    expected = theirs.evaluate(*data, batch_size=5, verbose=0)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, abs=1e-6)
    trainer.train()
    assert losses(trainer) == pytest.approx([theirs.train_on_batch(*data)], abs=1e-6)
    assert np.allclose(weights(ours), weights(theirs), atol=1e-6)


class OwnLoss(keras.Model):  # type: ignore[misc]
    """Computes its loss itself, without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = keras.layers.Dense(2), keras.layers.Dense(FEATURES, kernel_regularizer="l2")

    def call(self, x: Any) -> Any:
        return self.wide(self.narrow(x))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return tf.reduce_mean(tf.abs(y_pred - x)) + sum(self.losses)


class OwnStep(OwnLoss):
    def train_step(self, data: Any) -> Any:
        raise AssertionError

    def test_step(self, data: Any) -> Any:
        raise AssertionError

    def predict_step(self, data: Any) -> Any:
        raise AssertionError


def test_an_own_compute_loss_is_called_and_own_steps_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(kind: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = kind()
        model(X)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    ours, theirs = make(OwnLoss), make(OwnLoss)
    trainer = make_trainer(tmp_path, ours, X, max_steps=2, gradient_accumulation_steps=3, **OWN)
    assert trainer.evaluate(X)["eval_loss"] == pytest.approx(theirs.evaluate(X, verbose=0), abs=1e-6)
    assert "test_loss" not in trainer.predict(X).metrics
    told = "OwnLoss.compute_loss of the model is treated as a mean over samples"
    assert told not in say(caplog)  # an evaluation weighs batches by their samples in any case
    trainer.train()
    expected = []
    for _ in range(2):
        theirs.reset_metrics()
        expected.append(theirs.train_on_batch(X))
    assert losses(trainer) == pytest.approx(expected, abs=1e-6)
    assert np.allclose(weights(ours), weights(theirs), atol=1e-6)
    assert say(caplog).count(f"{told}: the 3 micro-batches") == 1

    class Own(TFTrainer):
        def run_model(self, features: Any, labels: Any, training: bool) -> Any:
            outputs = self.model(features, training=training)
            return tf.reduce_mean(outputs**2), outputs

    trainer = make_trainer(tmp_path, make(OwnStep), X, **OWN)
    calls = {"train": trainer.train, "test": lambda: trainer.evaluate(X), "predict": lambda: trainer.predict(X)}
    for name, call in calls.items():
        with pytest.raises(UnsupportedOption, match=rf"^OwnStep\.{name}_step would never be called.*override"):
            call()
    make_trainer(tmp_path, make(OwnStep), X, kind=Own, **OWN).train()


def test_a_loss_that_reduces_itself_is_refused_on_replicas(tmp_path: Path, mirrored: Any) -> None:
    class Reducing(keras.losses.Loss):  # type: ignore[misc]
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return tf.reduce_mean(tf.abs(y_true - y_pred))

    with mirrored.scope():
        model = compiled(Reducing())
    with pytest.raises(UnsupportedOption, match=r"^Reducing\.__call__ of the model .* 2 replicas.*compute_loss_func"):
        make_trainer(tmp_path, model, (X, Y), **OWN).train()


@pytest.mark.slow
def test_replicas_add_up_to_the_batch(tmp_path: Path, mirrored: Any) -> None:
    """Losses of layers, weights of samples and reductions, in updates of 7 and 5 samples on two replicas."""
    for reduction in ("sum_over_batch_size", "sum", "mean_with_sample_weight"):
        found = []
        for strategy in (None, mirrored):
            with strategy.scope() if strategy is not None else tf.name_scope(""):
                model = dense(kernel_regularizer="l2", activity_regularizer="l1")
                model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction=reduction))
            trainer = make_trainer(
                tmp_path / reduction,
                model,
                (X[:11], Y[:11, 0], np.arange(1.0, 12.0)),
                per_device_train_batch_size=8 if strategy is None else 4,
                per_device_eval_batch_size=8 if strategy is None else 4,
                **OWN,
            )
            before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
            trainer.train()
            found.append([before, *losses(trainer), *weights(model)])
        assert np.allclose(*found, atol=1e-6), reduction


def test_a_function_that_returns_a_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Labels of float64 and whole numbers are given to it as Keras gives them."""

    def loss(labels: Any, outputs: Any) -> Any:
        return tf.reduce_mean((labels - outputs) ** 2)

    for labels in (Y.astype(np.float64), CLASS[:, None]):
        ours, theirs = compiled(loss), compiled(loss)
        trainer = make_trainer(
            tmp_path, ours, (X, labels), max_steps=1, gradient_accumulation_steps=3, per_device_eval_batch_size=5, **OWN
        )
        expected = theirs.evaluate(X, labels, batch_size=5, verbose=0)
        assert trainer.evaluate((X, labels))["eval_loss"] == pytest.approx(expected, abs=1e-6)
        trainer.train()
        assert losses(trainer) == pytest.approx([theirs.train_on_batch(X, labels)], abs=1e-6)
        assert np.allclose(weights(ours), weights(theirs), atol=1e-6)
    trainer = make_trainer(tmp_path, dense(), None, compute_loss_func=lambda outputs, labels: loss(labels, outputs))
    assert trainer.evaluate((X, Y.astype(np.float64)))["eval_loss"] > 0


class InBatch(keras.losses.Loss):  # type: ignore[misc]
    """Each sample's row of outputs is to point at the sample itself, among those of the batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        samples = keras.ops.arange(keras.ops.shape(y_pred)[0])
        scores = y_pred @ keras.ops.transpose(y_pred)
        return keras.losses.sparse_categorical_crossentropy(samples, scores, from_logits=True)


def mean_over_positives(labels: Any, outputs: Any) -> Any:
    """A mean over the labels above 0, whose number differs from batch to batch."""
    found = tf.cast(labels > 0, tf.float32)
    return tf.reduce_sum(found * (labels - outputs) ** 2) / tf.reduce_sum(found)


@pytest.mark.parametrize("make", [InBatch, keras.losses.Dice, lambda: mean_over_positives])
def test_a_loss_that_couples_samples_is_warned_of_where_a_step_has_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    labels = np.abs(Y) if make is keras.losses.Dice else Y
    for steps in (1, 3):
        make_trainer(
            tmp_path, compiled(make(), units=2), (X, labels), max_steps=1, gradient_accumulation_steps=steps, **OWN
        ).train()
        assert ("couples the samples of a batch" in say(caplog)) == (steps == 3)


def test_a_loss_function_of_the_trainer_that_couples_samples_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for loss, is_told in ((lambda o, y: tf.reduce_mean((o - y) ** 2), False), (mean_over_positives, True)):
        options: dict[str, Any] = {"compute_loss_func": loss, "max_steps": 1, "gradient_accumulation_steps": 3}
        make_trainer(tmp_path, dense(), (X, Y), learning_rate=0.1, **options).train()
        assert ("couples the samples of a batch" in say(caplog)) == is_told


def mean_over_targets(outputs: Any, labels: Any) -> Any:
    """The mean over samples of each one's mean over the targets that are not -100."""
    kept = tf.cast(labels != -100, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), outputs)
    return tf.reduce_mean(tf.reduce_sum(losses * kept, 1) / tf.reduce_sum(kept, 1))


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_looks_like_a_sum_in_the_first_steps_is_warned_of_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """All targets of the first optimizer step count, as do all of the first batch of the evaluation."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(12, 5, 3)).astype(np.float32), rng.integers(0, 4, (12, 5))
    labels[5::2, 2:] = -100
    for number, count in (("right", 4), ("wrong", 12)):
        trainer = make_trainer(
            tmp_path / number,
            keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(4)]),
            (inputs[:count], labels[:count]),
            eval_dataset=(inputs[:count], labels[:count]),
            compute_loss_func=mean_over_targets,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=4 * size,
            gradient_accumulation_steps=4 // size,
            train_sampling_strategy="sequential",
        )
        for run, told in ((trainer.train, "An optimizer step of"), (trainer.evaluate, "The loss of an evaluation of")):
            caplog.clear()
            run()
            assert (told in say(caplog)) == (number == "wrong")


class OverTargets(keras.Sequential):  # type: ignore[misc]
    """Its own loss is a mean over the targets that are not -100."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        kept = tf.cast(y != -100, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), y_pred)
        return tf.reduce_sum(losses * kept) / tf.reduce_sum(kept)


def test_an_own_loss_of_ragged_targets_is_warned_of_in_an_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(8, 5, 3)).astype(np.float32), rng.integers(0, 4, (8, 5))
    ragged = np.where(np.arange(5) > np.arange(8)[:, None] % 5, -100, labels)
    for targets, weight in ((labels, None), (ragged, None), (ragged, "tokens")):
        model = OverTargets([keras.Input((5, 3)), keras.layers.Dense(4)])
        data, options = (inputs, targets), {"per_device_eval_batch_size": 4, "loss_weight": weight}
        caplog.clear()
        make_trainer(tmp_path, model, data, eval_dataset=data, **options).evaluate()
        assert ("is treated as a mean over samples" in say(caplog)) == (targets is ragged and weight is None)


def test_losses_of_layers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With and without labels; `fit` and `evaluate` leave labels aside, too."""

    class Penalty(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(tf.reduce_mean(x**2))
            return x

    def make() -> Any:
        model = dense()
        model = keras.Sequential([keras.Input((FEATURES,)), *model.layers, Penalty()])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    for data in (X, (X, None), (X, Y)):
        ours, theirs = make(), make()
        trainer = make_trainer(tmp_path, ours, data, max_steps=1, gradient_accumulation_steps=3, **OWN)
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(X, verbose=0), abs=1e-6)
        trainer.train()
        assert losses(trainer) == pytest.approx([theirs.train_on_batch(X)], abs=1e-6)
        assert np.allclose(weights(ours), weights(theirs), atol=1e-6)
    assert "compile() names no loss: as in fit, only the losses of layers" in say(caplog)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_of_layers_against_a_tape_in_float64(tmp_path: Path, accumulation: int) -> None:
    """Of a model that names no loss: regularizers once, activities by samples, the default loss by targets."""
    keras.utils.set_random_seed(0)
    regularised = keras.layers.Dense(CLASSES, kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((FEATURES,)), regularised])
    labels = np.where(np.arange(12) % 5 == 2, -100, CLASS)
    kernel = tf.Variable(np.asarray(regularised.kernel, np.float64))
    with tf.GradientTape() as tape:
        logits = tf.matmul(tf.constant(X, tf.float64), kernel)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(np.maximum(labels, 0), logits)
        counted = tf.constant((labels != -100).astype(np.float64))
        loss = tf.reduce_sum(each * counted) / tf.reduce_sum(counted)
        loss += 0.01 * (tf.reduce_sum(kernel**2) + tf.reduce_sum(tf.abs(logits)) / 12)
    expected = kernel - 0.5 * tape.gradient(loss, kernel)
    trainer = make_trainer(
        tmp_path,
        model,
        (X, labels),
        optimizers=(keras.optimizers.SGD(0.5), None),
        max_grad_norm=0.0,
        per_device_train_batch_size=12 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    for size in (12, 5):
        trainer.args.per_device_eval_batch_size = size
        assert trainer.evaluate((X, labels))["eval_loss"] == pytest.approx(float(loss), abs=1e-6)
    trainer.train()
    assert losses(trainer) == pytest.approx([float(loss)], abs=1e-6)
    assert np.allclose(np.asarray(regularised.kernel), expected, atol=1e-6)


@pytest.mark.slow
def test_weights_of_samples(tmp_path: Path) -> None:
    """They are of Keras' mean over samples without a compiled loss too, or refused."""
    data = X, CLASS, np.linspace(0, 2, 12)
    each = keras.losses.sparse_categorical_crossentropy(CLASS, make_model()(X), from_logits=True)
    expected = float(np.mean(each * data[2]))
    assert make_trainer(tmp_path, make_model(), None).evaluate(data)["eval_loss"] == pytest.approx(expected, abs=1e-6)

    def weighted(outputs: Any, labels: Any, sample_weight: Any) -> Any:
        found = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
        return found * tf.cast(sample_weight, found.dtype)

    trainer = make_trainer(tmp_path, make_model(), data, compute_loss_func=weighted)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, abs=1e-6)
    trainer.train()
    trainer = make_trainer(tmp_path, make_model(), data, compute_loss_func=lambda outputs, labels: outputs[:, 0])
    for call in (trainer.train, lambda: trainer.evaluate(data)):
        with pytest.raises(ValueError, match=r"hold weights of samples.*give compute_loss_func a parameter"):
            call()
    with pytest.raises(ValueError, match="A batch of 4 parts"):
        make_trainer(tmp_path, make_model(), (*data, X)).train()


# ---- optimizers


def test_a_compiled_optimizer_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its averaged weights at the end (use_ema), as in `fit`; arguments that ask for another are refused."""
    ours, theirs = (compiled(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)) for _ in range(2))
    make_trainer(tmp_path, ours, (X, Y), per_device_train_batch_size=4, **OWN).train()
    theirs.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert np.allclose(weights(ours), weights(theirs), atol=1e-6)
    make_trainer(tmp_path, compiled(), (X, Y), **{**OWN, "max_grad_norm": 1.0}).train()
    assert "SGD. Its gradients are clipped to a norm of 1.0, as fit does not: max_grad_norm=0" in say(caplog)
    with pytest.raises(UnsupportedOption, match=r"optimizer=SGD.* request learning_rate=0\.05: .*optimizer=None"):
        make_trainer(tmp_path, compiled(), (X, Y)).train()
    model = dense()
    model.compile(loss="mse")
    trainer = make_trainer(tmp_path, model, (X, Y))
    trainer.train()
    assert type(trainer.optimizer).__name__ == "AdamW"
    assert "The optimizer of compile() is RMSprop as it is by default: taken is adamw" in say(caplog)


def test_a_compiled_optimizer_is_resumed(tmp_path: Path) -> None:
    options = {**OWN, "save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    runs = []
    for folder, last in (("whole", 6), ("parts", 3), ("parts", 6)):
        model = compiled(optimizer=keras.optimizers.Adam(0.1))
        trainer = make_trainer(tmp_path / folder, model, (X, Y), max_steps=last, **options)
        trainer.train()
        runs.append(weights(model))
    assert np.array_equal(runs[0], runs[2])
    assert not np.array_equal(runs[0], runs[1])


def test_what_is_not_of_keras_is_said(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"optimizers is a SGD: expected a pair \(optimizer, schedule\)"):
        make_trainer(tmp_path, dense(), None, optimizers=keras.optimizers.SGD())
    foreign = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.raises(TypeError, match=r"torch\.optim\.sgd\.SGD is no optimizer of Keras"):
        make_trainer(tmp_path, dense(), None, optimizers=(foreign, None))
    with pytest.raises(TypeError, match=r"the schedule 0\.1 cannot be called"):
        make_trainer(tmp_path, dense(), None, optimizers=(None, 0.1))
    loader = torch.utils.data.DataLoader(list(zip(X, Y, strict=True)), batch_size=2)
    trainer = make_trainer(tmp_path, dense(), loader)
    for call in (trainer.train, lambda: trainer.evaluate(loader)):
        with pytest.raises(TypeError, match=r"A torch DataLoader holds batches.*loader\.dataset"):
            call()
    with pytest.raises(TypeError, match=r"tb_writer is a int: .*create_file_writer"):
        make_trainer(tmp_path, dense(), None, tb_writer=1)

    class Own(TFTrainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            raise AssertionError

    with pytest.raises(UnsupportedOption, match=r"^Own\.compute_loss would never be called by TFTrainer: override run"):
        make_trainer(tmp_path, dense(), None, kind=Own)


def test_weight_decay_goes_by_the_name_of_a_variable() -> None:
    """Not by those of the layers and models that it is in."""
    inputs = keras.Input((FEATURES,))
    named = keras.layers.Dense(4, name="unbiased_norm")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="bias_head")(named), name="norm_bias")
    assert [variable.path for variable in undecayed_variables(model)] == ["unbiased_norm/bias", "bias_head/bias"]


# ---- callbacks, writers


def test_callbacks_of_keras_hear_what_fit_tells_them(tmp_path: Path) -> None:
    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.heard.append((epoch, logs["loss"], logs["val_loss"]))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.heard.append((batch, logs["loss"]))

        def on_train_end(self, logs: Any = None) -> None:
            self.heard.append(type(self.model.optimizer).__name__)

    recorder = Recorder()
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=0, min_delta=1e3)
    options: dict[str, Any] = {"eval_dataset": (X, Y), "eval_strategy": "epoch", "num_train_epochs": 5, **OWN}
    trainer = make_trainer(
        tmp_path, compiled(), (X, Y), callbacks=[recorder, stopping], per_device_train_batch_size=6, **options
    )
    trainer.train()
    rows = losses(trainer)
    evaluations = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluations) == 2  # the second was no better
    assert recorder.heard == [
        (0, pytest.approx(rows[0])), (1, pytest.approx(rows[1])), (0, pytest.approx(np.mean(rows[:2])), evaluations[0]),
        (0, pytest.approx(rows[2])), (1, pytest.approx(rows[3])), (1, pytest.approx(np.mean(rows[2:])), evaluations[1]),
        "SGD",
    ]  # fmt: skip
    plateau = keras.callbacks.ReduceLROnPlateau(min_delta=1e3, patience=0, factor=0.5)
    trainer = make_trainer(
        tmp_path, dense(), (X, Y), optimizers=(keras.optimizers.SGD(0.1), None), **{**options, "num_train_epochs": 3}
    )
    trainer.add_callback(plateau)
    trainer.train()
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.1 / 4)


def test_a_writer_of_tf_summary(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path / "events"))
    make_trainer(tmp_path, compiled(), (X, Y), tb_writer=writer, **OWN).train()
    events = [
        value.tag
        for path in (tmp_path / "events").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert "train/loss" in events


# ---- the default loss


def test_the_activation_is_that_of_what_is_connected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gate that is made last, a nested model, a layer without a graph, a module: each against its compiled loss."""
    inputs = keras.Input((FEATURES,))
    values = keras.layers.Dense(CLASSES)(inputs)
    gate = keras.layers.Dense(CLASSES, activation="softmax")(inputs)

    class Ending(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(CLASSES, activation="softmax")
            self.body = keras.layers.Dense(4)

        def call(self, x: Any) -> Any:
            return self.head(self.body(x))

    class Reshaped(Linear):
        def __call__(self, x: Any) -> Any:
            return tf.reshape(tf.nn.softmax(super().__call__(x)), [-1, CLASSES])

    ending = Ending()
    ending(X)
    models = {
        "logits": keras.Model(inputs, keras.layers.Multiply()([values, gate])),
        "nested": keras.Sequential([keras.Input((FEATURES,)), dense(CLASSES, activation="softmax")]),
        "subclassed": ending,
        "reshaped": Reshaped(),
    }
    for name, model in models.items():
        caplog.clear()
        expected = keras.losses.sparse_categorical_crossentropy(CLASS, model(X), from_logits=name == "logits")
        found = make_trainer(tmp_path, model, None).evaluate((X, CLASS))["eval_loss"]
        assert found == pytest.approx(float(np.mean(expected)), abs=1e-6), name
        taken = "logits: no softmax" if name == "logits" else "what goes into the model's softmax"
        assert f"using the cross-entropy of 3 classes, of {taken}" in say(caplog)
    sigmoid, answers = dense(activation="sigmoid"), CLASS > 0
    expected = keras.losses.binary_crossentropy(answers[:, None], sigmoid(X))
    for labels in (answers, answers.astype(np.int64), answers[:, None]):
        found = make_trainer(tmp_path, sigmoid, None).evaluate((X, labels))["eval_loss"]
        assert found == pytest.approx(float(np.mean(expected)), abs=1e-6)


def test_labels_that_fit_no_default_loss_are_refused(tmp_path: Path) -> None:
    one_hot, ages = np.eye(CLASSES, dtype=np.int64)[CLASS], np.arange(20, 32)
    cases: list[tuple[Any, Any, str]] = [
        (dense(), ages, r"A label is [23]\d, and the model gives one number for it.*labels\.astype"),
        (dense(CLASSES), one_hot, "Every row of the labels holds a single 1: .*categorical_crossentropy"),
        (dense(CLASSES, activation="softmax"), one_hot, r"A softmax makes the outputs.*labels\.argmax"),
        (dense(CLASSES, activation="sigmoid"), CLASS, "A sigmoid makes each of the 3 outputs"),
        (dense(), {"first": Y, "second": Y}, r"There are several labels \('first', 'second'\)"),
        (dense(), (Y, Y), r"There are several labels \(2 of them\)"),
    ]
    for model, labels, told in cases:
        trainer = make_trainer(tmp_path, model, (X, labels), max_steps=1)
        for call in (trainer.train, lambda trainer=trainer, labels=labels: trainer.evaluate((X, labels))):
            with pytest.raises(ValueError, match=told):
                call()
    assert make_trainer(tmp_path, dense(), None).evaluate((X, ages.astype(np.float64)))["eval_loss"] > 100
    several = one_hot.copy()
    several[0] = 1
    trainer = make_trainer(tmp_path, dense(CLASSES), None, per_device_eval_batch_size=4)
    expected = keras.losses.binary_crossentropy(several, trainer.model(X), from_logits=True)
    assert trainer.evaluate((X, several))["eval_loss"] == pytest.approx(float(np.mean(expected)), abs=1e-6)


# ---- the length of things


def test_an_evaluation_without_end_is_refused(tmp_path: Path) -> None:
    class Endless(keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = None

        def __getitem__(self, index: int) -> Any:
            return X[:4], Y[:4]

    trainer = make_trainer(tmp_path, compiled(), Endless(), max_steps=5, **OWN)
    trainer.train()
    assert trainer.state.global_step == 5
    samples = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
    for data in (samples, Endless()):
        for call in (trainer.evaluate, trainer.predict):
            with pytest.raises(ValueError, match=r"repeats without end: leave repeat\(\) out.*take"):
                call(data)
    assert trainer.evaluate(samples.take(5))["eval_loss"] > 0


def test_the_rates_of_a_long_run_are_asked_one_by_one(tmp_path: Path) -> None:
    steps = 20_000_000
    begin = time.process_time()
    schedule = StepSchedule("cosine", 0.1, steps, 1000)
    assert time.process_time() - begin < 1
    assert schedule.rates is None
    look = tf.function(schedule)
    for step in (0, 500, steps // 3, steps, 2 * steps):
        assert float(look(tf.constant(step, tf.int64))) == pytest.approx(schedule.rate(min(step, steps)), rel=1e-6)

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = make_trainer(tmp_path, dense(), (X, Y), max_steps=steps, warmup_steps=10, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.0


def test_the_training_loss_of_broken_weights_and_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = X.copy()
    broken[-1] = np.nan
    options = {**OWN, "logging_steps": 100, "per_device_train_batch_size": 1}
    output = make_trainer(tmp_path / "broken", compiled(), (broken, Y), **options).train()
    assert math.isnan(output.training_loss)
    assert "The weights hold inf or NaN: the training loss is given as NaN." in say(caplog)
    options = {**OWN, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    make_trainer(tmp_path / "run", compiled(), (X, Y), max_steps=2, **options).train()
    trainer = make_trainer(tmp_path / "run", compiled(), (X, Y), max_steps=4, **options)
    output = trainer.train()
    assert output.training_loss == pytest.approx(np.mean(losses(trainer)[2:]))
    assert "is the mean over the 2 optimizer steps since the resume at step 2" in say(caplog)


def test_ragged_predictions_are_padded(tmp_path: Path) -> None:
    class Ragged(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.factor = tf.Variable(2.0)

        def __call__(self, x: Any) -> Any:
            return tf.RaggedTensor.from_tensor(x, lengths=tf.range(tf.shape(x)[0]) % 3 + 1) * self.factor

    args = TFTrainingArguments(str(tmp_path), per_device_eval_batch_size=5, disable_tqdm=True)
    rows = TFTrainer(Ragged(), args).predict(X).predictions
    assert rows.shape == (12, 3)
    for number, row in enumerate(rows):
        length = number % 5 % 3 + 1
        assert np.array_equal(row[:length], 2 * X[number, :length])
        assert (row[length:] == -100).all()
