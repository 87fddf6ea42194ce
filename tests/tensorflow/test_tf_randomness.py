"""Random state of a run: every generator that a checkpoint can hold is resumed, and others are warned of."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import CLASSES, FEATURES, losses, make_data, make_model, make_trainer, values, weights

from paceline import TFTrainer, TrainerCallback
from paceline.core.loop import Loop
from paceline.tensorflow.checkpoint.variables import VARIABLES, restore_variables, undone
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.randomness import keras_state, random_variables, seed_everything

DATA = make_data(24)


class Stop(TrainerCallback):
    """Saves after an optimizer step, and ends the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Adds noise in training and in inference, from Keras' global generator or from its own."""

    def __init__(self, has_own: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1) if has_own else None

    def call(self, x: Any) -> Any:
        return x + 0.3 * keras.random.normal((4, FEATURES), seed=self.generator)


def noisy(has_own: bool, loss: str | None = None) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), Noise(has_own), keras.layers.Dense(CLASSES)])
    if loss is not None:
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Dropping(tf.Module):  # type: ignore[misc]
    """A module with dropout."""

    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones([FEATURES, CLASSES]))
        self.drop = drop

    @tf.function  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, training: bool = False) -> Any:
        return (self.drop(x) if training else x) @ self.weight


def whole_and_parts(folder: Path, make: Any, **options: Any) -> tuple[TFTrainer, TFTrainer]:
    """A run of 12 optimizer steps, and one that was stopped after 5 of them and resumed."""
    options = {"num_train_epochs": 2, "per_device_eval_batch_size": 4, **options}
    whole = make_trainer(folder / "whole", make(), DATA, callbacks=[Stop(12)], **options)
    whole.train()
    make_trainer(folder / "parts", make(), DATA, callbacks=[Stop(5)], **options).train()
    rest = make_trainer(folder / "parts", make(), DATA, **options)
    rest.train()
    assert rest.state.global_step == whole.state.global_step == 12
    return whole, rest


def check_same(whole: TFTrainer, rest: TFTrainer) -> None:
    assert losses(rest) == losses(whole)
    assert values(rest.state.log_history)[:-1] == values(whole.state.log_history)[:-1]
    assert np.array_equal(weights(rest.model), weights(whole.model))


def test_the_global_generator_of_keras_is_resumed(tmp_path: Path) -> None:
    check_same(*whole_and_parts(tmp_path, lambda: noisy(False)))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "num_train_epochs": 4}])
def test_the_passes_that_look_for_coupled_samples_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """They are made at other steps of a resumed run, and the model draws in inference too."""
    options = {"eval_dataset": DATA, "eval_strategy": "steps", "eval_steps": 3, **options}
    check_same(*whole_and_parts(tmp_path, lambda: noisy(True, "compiled"), **options))


def test_states_between_batches_are_resumed(tmp_path: Path) -> None:
    """Those of a recurrent layer, which evaluations move on too."""

    def make() -> Any:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        recurrent = layers.GRU(4, stateful=True)
        inputs = keras.Input((FEATURES,), batch_size=4)
        model = keras.Sequential([inputs, layers.Reshape((2, FEATURES // 2)), recurrent, layers.Dense(CLASSES)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    check_same(*whole_and_parts(tmp_path, make, eval_dataset=DATA, eval_strategy="steps", eval_steps=3))


def test_operations_that_keep_their_state_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the first save and at a resume; a draw whose state is saved is resumed without a word."""
    whole, rest = whole_and_parts(tmp_path / "tf", lambda: Dropping(lambda x: tf.nn.dropout(x, 0.5)))
    assert losses(rest) != losses(whole)  # why there is a warning
    assert caplog.text.count("dropout/random_uniform/RandomUniform") == 3  # one in each run
    assert "after a resume they are those of its first steps again" in caplog.text
    assert "keras.random.dropout(x, 0.1)" in caplog.text
    caplog.clear()
    check_same(*whole_and_parts(tmp_path / "keras", lambda: Dropping(lambda x: keras.random.dropout(x, 0.5))))
    assert "random numbers" not in caplog.text


def test_a_global_generator_of_tensorflow_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def drop(x: Any) -> Any:
        return x * tf.cast(tf.random.get_global_generator().uniform(tf.shape(x)) > 0.5, tf.float32)

    check_same(*whole_and_parts(tmp_path, lambda: Dropping(drop)))
    assert "random numbers" not in caplog.text


def test_a_rewind_draws_from_the_global_generator_of_keras_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back to the start, where nothing was drawn."""
    before: list[Any] = []
    keep = Loop.keep_snapshot

    def note(loop: Loop) -> None:
        before.append(keras_state().numpy())
        keep(loop)

    after: list[Any] = []

    class Seen(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after.append(keras_state().numpy())

    monkeypatch.setattr(Loop, "keep_snapshot", note)
    x, y = DATA
    bad = x.copy()
    bad[9, 1] = np.inf
    options = {"nonfinite_policy": "rollback", "logging_steps": 100, "train_sampling_strategy": "sequential"}
    make_trainer(tmp_path, noisy(False), (bad, y), callbacks=[Seen()], **options).train()
    assert len(after) == 2
    assert np.array_equal(after[1], before[0])


def test_a_checkpoint_without_the_generator_of_keras_is_read(tmp_path: Path) -> None:
    seed_everything(0)
    model, optimizer = make_model(dropout=0.2), keras.optimizers.AdamW()
    optimizer.build(model.trainable_variables)
    everything = [variable.value for variable in model.variables]
    older = tf.train.Checkpoint(model=model, optimizer=optimizer, weights=everything, random=random_variables(model))
    older.write(str(tmp_path / VARIABLES))
    before = weights(model)
    for variable in (*everything, keras_state()):
        variable.assign(variable + tf.ones_like(variable))
    state = keras_state().numpy()
    restore_variables(tmp_path, model, optimizer)
    assert np.array_equal(weights(model), before)
    assert np.array_equal(keras_state().numpy(), state)


def test_the_generator_of_keras_costs_no_number_of_pythons() -> None:
    keras.utils.set_random_seed(3)
    expected = random.getstate()
    assert keras_state() is keras_state()
    assert random.getstate() == expected


def test_a_call_is_undone(tmp_path: Path) -> None:
    """A recurrent layer that keeps its state, statistics, and generators; weights are not copied."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((2, FEATURES), batch_size=4),
        keras.layers.LSTM(3, stateful=True, return_sequences=True),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential(layers)
    model.layers[-1].trainable = False
    x = np.ones((4, 2, FEATURES), np.float32)
    states = [state.value for state in model.layers[0].states]
    variables = [*(variable.value for variable in model.variables), *states, keras_state()]
    before = [variable.numpy() for variable in variables]
    drawn, host = random.getstate(), np.random.get_state()
    with undone(model):
        model(x, training=True)
        keras.random.normal((2,))
        random.random()
        np.random.rand()
        changed = [not np.array_equal(*pair) for pair in zip([v.numpy() for v in variables], before, strict=True)]
        assert sum(changed) >= 6  # two states, two statistics, two generators
        model.layers[-1].kernel.assign(model.layers[-1].kernel + 1)
    after = [variable.numpy() for variable in variables]
    differing = [each.name for each, *pair in zip(variables, after, before, strict=True) if not np.array_equal(*pair)]
    assert len(differing) == 1  # the weight of a frozen layer, which no call of a layer changes
    assert random.getstate() == drawn
    assert all(np.array_equal(*pair) for pair in zip(np.random.get_state(), host, strict=True))
