"""Keras callbacks in a run: their state in checkpoints, evaluation sets, and the count of epochs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import CLASSES, FEATURES, make_data, make_trainer, weights

from paceline import TFTrainer, TrainerCallback
from paceline.tensorflow.adapters import KerasCallbacks
from paceline.tensorflow.callback_state import CallbackAttributes
from paceline.tensorflow.framework import keras, tf

DATA = make_data(24)


class Stop(TrainerCallback):
    """Saves after an optimizer step, and ends the run; with `only_epoch`, ends the epoch alone, and saves nothing."""

    def __init__(self, step: int, only_epoch: bool = False, heard: Any = ()) -> None:
        self.step, self.only_epoch, self.heard = step, only_epoch, heard
        self.num_heard = 0  # at the save: what is heard after it is not part of the checkpoint

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_heard = len(self.heard)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = not self.only_epoch
            control.should_epoch_stop = self.only_epoch


class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes down what it hears, in a place of its own."""

    def __init__(self, heard: list[Any]) -> None:
        super().__init__()
        self.note = heard.append

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note(("begin", epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        values = {name: value for name, value in (logs or {}).items() if name.endswith("loss")}
        self.note((epoch, sorted(values), values["loss"]))


def linear() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])


def train(folder: Path, callbacks: list[Any], data: Any = DATA, **options: Any) -> TFTrainer:
    optimizers = (keras.optimizers.SGD(0.1), None)
    trainer = make_trainer(folder, linear(), data, callbacks=callbacks, optimizers=optimizers, **options)
    trainer.train()
    return trainer


def test_early_stopping_and_plateaus_go_on_after_a_resume(tmp_path: Path) -> None:
    """No epoch is better than the first: the rate is halved after two more, and the run ends after three."""
    ended = []
    for folder, step in (("whole", None), ("parts", 13), ("parts", None)):
        stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, min_delta=1e3)
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=2, min_delta=1e3, factor=0.5)
        callbacks = [stopping, plateau, *([] if step is None else [Stop(step)])]
        options = {"eval_dataset": DATA, "eval_strategy": "epoch", "num_train_epochs": 9}
        trainer = train(tmp_path / folder, callbacks, **options)
        rate = float(trainer.optimizer.learning_rate)
        ended.append((trainer.state.global_step, rate, stopping.wait, plateau.wait, stopping.min_delta))
    assert ended[0] == (24, pytest.approx(0.05), 3, 1, -1e3)
    assert ended[1][0] == 13
    assert ended[2] == ended[0]


@pytest.mark.parametrize("step", [9, 6])
def test_an_epoch_goes_on_after_a_resume(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, and after its last step: batches, the loss, and a rate that an epoch's start sets."""
    heard: list[list[Any]] = [[], []]
    runs = [(0, None), (1, step), (1, None)]
    trainers = []
    for number, stop in runs:
        decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        stopping = [] if stop is None else [Stop(stop, heard=heard[number])]
        trainers.append(train(tmp_path / str(number), [decay, Recorder(heard[number]), *stopping], num_train_epochs=3))
        if stopping:
            del heard[number][stopping[0].num_heard :]
    begun = ("begin", step // 7)
    assert heard[1].count(begun) == 2  # in each process
    heard[1].remove(begun)
    assert sorted(map(str, heard[1])) == sorted(map(str, heard[0]))
    assert [each for each in heard[1] if each != begun] == [each for each in heard[0] if each != begun]
    assert np.array_equal(weights(trainers[2].model), weights(trainers[0].model))
    assert float(trainers[2].optimizer.learning_rate) == pytest.approx(0.1 / 8)


def test_an_epoch_ends_after_all_evaluation_sets(tmp_path: Path) -> None:
    heard: list[Any] = []
    options = {"eval_dataset": {"a": DATA, "b": DATA}, "eval_strategy": "epoch", "num_train_epochs": 2}
    stopping = keras.callbacks.EarlyStopping(monitor="val_b_loss", mode="min", patience=1, min_delta=1e3)
    train(tmp_path, [Recorder(heard), stopping], **options)
    ends = [each[:2] for each in heard if isinstance(each, tuple) and isinstance(each[0], int)]
    names = ["loss", "val_a_loss", "val_b_loss"]
    assert ends == [(0, names), (1, names)]
    assert stopping.stopped_epoch == 1


def test_epochs_are_counted_one_by_one(tmp_path: Path) -> None:
    """Data of unknown length, and an epoch that a callback ends."""
    unknown = tf.data.Dataset.from_tensor_slices(DATA).filter(lambda x, y: True)
    cases: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
        "unknown": (unknown, {"max_steps": 18}, []),
        "ended": (DATA, {"num_train_epochs": 3}, [Stop(2, only_epoch=True)]),
    }
    for name, (data, options, callbacks) in cases.items():
        heard: list[Any] = []
        train(tmp_path / name, [Recorder(heard), *callbacks], data, train_sampling_strategy="sequential", **options)
        assert [each[1] for each in heard if isinstance(each, tuple) and each[0] == "begin"] == [0, 1, 2], name
        assert [each[0] for each in heard if isinstance(each, tuple) and each[0] != "begin"] == [0, 1, 2], name


def test_an_epoch_that_was_left_before_its_evaluation_ends_with_it(tmp_path: Path) -> None:
    """As after a signal in the evaluation: the resumed run makes it, and the callbacks hear the end then."""
    heard: list[Any] = []
    first = KerasCallbacks([Recorder(heard)])
    trainer = make_trainer(tmp_path, linear(), DATA)
    optimizer = keras.optimizers.SGD(0.1)
    given = {"model": trainer.model, "optimizer": optimizer}

    def call(callbacks: KerasCallbacks, event: str, **more: Any) -> None:
        getattr(callbacks, event)(trainer.args, trainer.state, trainer.control, **given, **more)

    for event in ("on_train_begin", "on_epoch_begin"):
        call(first, event)
    call(first, "on_step_end", loss=tf.constant(2.0))
    trainer.control.should_evaluate = True
    call(first, "on_epoch_end")
    assert heard == [("begin", 0), 0]
    saved = json.loads(json.dumps(first.state_dict()))
    second = KerasCallbacks([Recorder(heard)])
    second.load_state_dict(saved)
    trainer.state.global_step = 1
    call(second, "on_train_begin")
    call(second, "on_evaluate", metrics={"eval_loss": 1.0})
    call(second, "on_sets_evaluated")
    call(second, "on_epoch_begin")
    assert heard[2:] == [(0, ["loss", "val_loss"], 2.0), ("begin", 1)]
    for name, wrong in (("epoch", -1), ("callbacks", {"Recorder": 3}), ("metrics", None)):
        with pytest.raises(ValueError, match="is damaged"):
            second.load_state_dict({**saved, name: wrong})


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Matrix(keras.callbacks.Callback):  # type: ignore[misc]
        """Its figure is no number; its counts are, and no list."""

        def __init__(self) -> None:
            super().__init__()
            self.figure: Any = None
            self.counts: Any = None
            self.epochs = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.figure, self.counts, self.epochs = object(), np.eye(2), self.epochs + 1

    class Own(Matrix):
        def state_dict(self) -> dict[str, Any]:
            return {"counts": self.counts.tolist()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.counts = np.array(state["counts"])

    own, matrix = Own(), Matrix()
    options = {"eval_dataset": DATA, "eval_strategy": "epoch", "num_train_epochs": 2, "save_strategy": "epoch"}
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True)
    train(tmp_path, [own, matrix, stopping], **options)
    told = [record.getMessage() for record in caplog.records if "of the callback" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("counts of the callback Matrix are not saved with checkpoints: a resumed run starts")
    assert "Give Matrix the methods state_dict() and load_state_dict(state)" in told[0]
    assert told[1].startswith("best_weights of the callback EarlyStopping are not saved with checkpoints")
    assert "load_best_model_at_end=True" in told[1]
    caplog.clear()
    own, matrix = Own(), Matrix()
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True)
    train(tmp_path, [own, matrix, stopping], **{**options, "num_train_epochs": 3})
    assert np.array_equal(own.counts, np.eye(2))
    assert matrix.epochs == 3
    assert caplog.text.count("were not saved with checkpoints") == 2


def test_what_had_not_changed_goes_back_too() -> None:
    """As in a rollback, whose callbacks are those that heard what is undone."""
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=3, min_delta=0.5)
    stopping.on_train_begin()
    attributes = CallbackAttributes(stopping)
    attributes.begin()
    early = attributes.state_dict()
    assert early == {"attributes": {}, "unsaved": []}
    for epoch in range(2):
        stopping.on_epoch_end(epoch, {"loss": np.float32(1.0)})
    late = json.loads(json.dumps(attributes.state_dict()))
    assert late["attributes"] == {"wait": 1, "best": 1.0}
    stopping.patience = 7  # an option of this run
    attributes.load_state_dict(early)
    assert (stopping.wait, stopping.best, stopping.patience) == (0, None, 7)
    attributes.load_state_dict(late)
    assert (stopping.wait, stopping.best, stopping.patience) == (1, 1.0, 7)
    stopping.on_epoch_end(2, {"loss": 1.0})
    assert (stopping.wait, stopping.min_delta) == (2, -0.5)  # its sign is set once
