"""Adapters that let the loop use the objects of Keras users: callbacks of `fit` and tf.summary writers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState
from paceline.tensorflow.data.batches import to_array
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)

# methods of Keras' callbacks for which the loop has no event
UNHEARD = (
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
)
BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class ModelView:
    """The model as `fit` presents it to a Keras callback: with the run's optimizer and `stop_training`."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        vars(self).update(_model=model, optimizer=optimizer, stop_training=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("optimizer", "stop_training"):
            vars(self)[name] = value
        else:
            setattr(self._model, name, value)


class KerasCallbacks(TrainerCallback):
    """Calls Keras callbacks as `fit` would, with epoch and batch numbers, and with `loss` and `val_*` as logs.

    An optimizer step counts as one Keras batch. The `loss` of an epoch is the mean over its optimizer steps. If an
    epoch ends with an evaluation, its end is reported after the evaluation, with the metrics; the prefix `eval_`
    becomes `val_`. Setting `model.stop_training` stops the run.

    Args:
        callbacks: instances of `keras.callbacks.Callback`.
    """

    wants = frozenset({"loss"})

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = list(callbacks)
        self.view: ModelView | None = None  # set during a run
        self.epoch = self.batch = 0
        self.is_waiting = False  # the epoch has ended, and its evaluation has not
        self.losses: list[Any] = []  # of the epoch's steps, on the device
        self.metrics: dict[str, float] = {}  # of the epoch's last evaluation
        for callback in self.callbacks:
            unheard = [name for name in UNHEARD if overrides(callback, name) and not is_of_keras(type(callback))]
            if unheard:
                logger.warning("%s of %s will not be called.", " and ".join(unheard), type(callback).__name__)
        self.hearers = [callback for callback in self.callbacks if any(overrides(callback, name) for name in BATCHES)]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.view = ModelView(kwargs["model"], kwargs["optimizer"])
        for callback in self.callbacks:
            callback.set_model(self.view)
            callback.set_params({"verbose": 0, "epochs": int(args.num_train_epochs), "steps": None})
            callback.on_train_begin()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.epoch, self.batch, self.is_waiting = int(state.epoch or 0), 0, False
        self.losses, self.metrics = [], {}
        for callback in self.callbacks:
            callback.on_epoch_begin(self.epoch)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for callback in self.hearers:
            callback.on_train_batch_begin(self.batch)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = kwargs.get("loss")
        if loss is not None:
            self.losses.append(loss)
        if self.hearers:
            logs = {} if loss is None else {"loss": float(loss)}
            for callback in self.hearers:
                callback.on_train_batch_end(self.batch, logs)
            self._heed(control)
        self.batch += 1

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_waiting = bool(control.should_evaluate)
        if not self.is_waiting:
            self._end_epoch(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **kwargs: Any,
    ) -> None:
        if self.view is None:
            return
        self.metrics = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
        for callback in self.callbacks:
            callback.on_test_begin()
            callback.on_test_end(self.metrics)
        if self.is_waiting:
            self._end_epoch(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for callback in self.callbacks:
            callback.on_train_end()
        self.view = None

    def _end_epoch(self, control: TrainerControl) -> None:
        self.is_waiting = False
        logs = {f"val_{name}": value for name, value in self.metrics.items()}
        if self.losses:
            logs["loss"] = float(to_array(tf.reduce_mean(tf.stack(self.losses))))
        for callback in self.callbacks:
            callback.on_epoch_end(self.epoch, logs)
        self._heed(control)

    def _heed(self, control: TrainerControl) -> None:
        if self.view is not None and self.view.stop_training:
            control.should_training_stop = True


def overrides(callback: object, name: str) -> bool:
    """True if a Keras callback's class overrides the method, or the instance has its own."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)


class SummaryWriter:
    """Wraps a tf.summary writer in the interface of tensorboard's SummaryWriter.

    Args:
        writer: a result of `tf.summary.create_file_writer`.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def add_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Writes a scalar."""
        with self.writer.as_default():
            tf.summary.scalar(name, value, step=step or 0)

    def add_text(self, name: str, text: str, step: int | None = None) -> None:
        """Writes a text."""
        with self.writer.as_default():
            tf.summary.text(name, text, step=step or 0)

    def flush(self) -> None:
        """Flushes everything to disk."""
        self.writer.flush()

    def close(self) -> None:
        """Closes the writer."""
        self.writer.close()


def is_of_keras(kind: type) -> bool:
    """True if a class is defined by Keras."""
    return kind.__module__.partition(".")[0] in ("keras", "tf_keras")


def adapt_callbacks(callbacks: object) -> Any:
    """Returns the callbacks with those of Keras wrapped in a single Trainer callback; anything but a list unchanged."""
    if not isinstance(callbacks, Sequence):
        return callbacks
    made = [callback() if is_keras_class(callback) else callback for callback in callbacks]
    of_keras = [callback for callback in made if isinstance(callback, keras.callbacks.Callback)]
    others = [callback for callback in made if not isinstance(callback, keras.callbacks.Callback)]
    return [*others, KerasCallbacks(of_keras)] if of_keras else others


def is_keras_class(callback: object) -> bool:
    """True if `callback` is a class of Keras callbacks."""
    return isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback)


def adapt_writer(writer: object) -> Any:
    """Returns a writer for the TensorBoard reporter.

    Raises:
        TypeError: the writer cannot write scalars.
    """
    if isinstance(writer, tf.summary.SummaryWriter):
        return SummaryWriter(writer)
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"tb_writer is a {type(writer).__name__}: expected a writer of tf.summary.create_file_writer, or one "
            "with add_scalar, add_text, flush and close."
        )
    return writer
