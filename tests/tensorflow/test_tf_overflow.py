"""`debug="underflow_overflow"`: the first layer, weight or feature that is not finite is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import Linear, losses, make_data, make_model, make_trainer, weights

from paceline import TFTrainer, TFTrainingArguments, UnsupportedOption
from paceline.tensorflow.framework import keras, tf

X, Y = make_data(12)
WATCHED: dict[str, Any] = {"debug": "underflow_overflow", "train_sampling_strategy": "sequential"}


class Logarithm(keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return tf.math.log(x)


class Layers(tf.Module):  # type: ignore[misc]
    """A module of modules, in a loop too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(8, 8), Linear(8, 3)
        self.first.weight.assign(tf.eye(8))

    def __call__(self, x: Any) -> Any:
        for _ in tf.range(2):
            x = self.first(x)
        return self.second(tf.sqrt(x))


@pytest.mark.slow
def test_numbers_and_traces_stay(tmp_path: Path) -> None:
    kinds = [keras.layers.Dense, keras.Sequential]
    before = [kind.__call__ for kind in kinds]
    plain = make_trainer(tmp_path / "plain", make_model(), (X, Y), eval_dataset=(X[:8], Y[:8]))
    watched = make_trainer(
        tmp_path / "watched", make_model(), (X, Y), eval_dataset=(X[:8], Y[:8]), debug="underflow_overflow"
    )
    for trainer in (plain, watched):
        trainer.train()
        trainer.evaluate()
        assert trainer.engine is not None
        assert (trainer.engine.num_traces, trainer.predictor.num_traces) == (1, 1)
    assert losses(watched) == pytest.approx(losses(plain), abs=1e-6)
    assert np.allclose(weights(watched.model), weights(plain.model), atol=1e-6)
    assert before == [kind.__call__ for kind in kinds]
    assert not any("__call__" in vars(kind) for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_layer_is_named(tmp_path: Path, accumulation: int) -> None:
    layers = [keras.Input((8,)), keras.layers.Dense(4, name="wide"), Logarithm(name="log"), keras.layers.Dense(3)]
    trainer = make_trainer(
        tmp_path, keras.Sequential(layers), (X, Y), gradient_accumulation_steps=accumulation, **WATCHED
    )
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=r"inf or NaN in the output of \S*log \(Logarithm\)") as caught:
        trainer.train()
    lines = str(caught.value).splitlines()
    assert lines[-2].endswith("wide (Dense)")
    assert float(lines[-2].split()[1]) < 100
    assert np.array_equal(weights(trainer.model), before)  # nothing of that update was applied


@pytest.mark.slow
def test_modules_weights_features_and_losses_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inf or NaN in the output of linear \(Linear\)"):
        make_trainer(tmp_path, Layers(), (X, Y), **WATCHED).train()
    bad = X.copy()
    bad[5, 2] = np.nan
    with pytest.raises(ValueError, match="inf or NaN in the features"):
        make_trainer(tmp_path, make_model(), (bad, Y), **WATCHED).train()
    model = make_model()
    model.layers[1].kernel.assign(np.full((16, 3), np.inf))
    with pytest.raises(ValueError, match=r"inf or NaN in the weight .*kernel"):
        make_trainer(tmp_path, model, (X, Y), **WATCHED).train()
    options = {"compute_loss_func": lambda outputs, labels: tf.reduce_mean(outputs) / 0.0, **WATCHED}
    with pytest.raises(ValueError, match="inf or NaN in the loss"):
        make_trainer(tmp_path, make_model(), (X, Y), **options).train()


@pytest.mark.slow
def test_gradients_are_named(tmp_path: Path) -> None:
    """The square root of 0 is finite, its slope is not."""

    def root(outputs: Any, labels: Any) -> Any:
        return tf.reduce_sum(tf.sqrt(tf.nn.relu(outputs)))

    model = make_model()
    for layer in model.layers:
        layer.kernel.assign(tf.zeros_like(layer.kernel))
    with pytest.raises(ValueError, match=r"inf or NaN in the gradient of \S*dense_\d+/bias") as caught:
        make_trainer(tmp_path, model, (X, Y), compute_loss_func=root, **WATCHED).train()
    assert "The last 1 up to it" in str(caught.value)


@pytest.mark.slow
def test_on_two_replicas(tmp_path: Path, mirrored: Any) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), Logarithm(name="log")])
    with pytest.raises(ValueError, match=r"inf or NaN in the output of \S*log \(Logarithm\)"):
        make_trainer(tmp_path, model, (X, Y), strategy=mirrored, **WATCHED).train()


def test_where_it_cannot_look(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="debug='underflow_overflow' is not supported with xla=True"):
        TFTrainingArguments(str(tmp_path), debug="underflow_overflow", xla=True)
    with pytest.raises(UnsupportedOption, match=r"debug=\['tpu_metrics_debug'\].*leave tpu_metrics_debug out"):
        TFTrainingArguments(str(tmp_path), debug="tpu_metrics_debug")


def test_an_update_of_ones_own_that_cannot_be_watched(tmp_path: Path) -> None:
    class Own(TFTrainer):
        def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.model(features) ** 2)
            return list(tape.gradient(loss, self.model.trainable_variables))

    trainer = make_trainer(tmp_path, make_model(), (X, Y), kind=Own, **WATCHED)
    with pytest.raises(UnsupportedOption, match=r"debug='underflow_overflow' .* call super\(\), or leave debug out"):
        trainer.train()
