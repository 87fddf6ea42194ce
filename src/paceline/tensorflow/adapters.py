"""Adapters that let the loop use the objects of Keras users: callbacks of `fit` and tf.summary writers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.core.counts import is_count
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState
from paceline.tensorflow.callback_state import CallbackAttributes, is_of_keras, numbered_names, plain_items
from paceline.tensorflow.data.batches import to_array
from paceline.tensorflow.engine import rate_of
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
    epoch ends with an evaluation, its end is reported after the evaluation of all sets, with the metrics; the prefix
    `eval_` becomes `val_`. Epochs are counted as they begin, whatever their length. Setting `model.stop_training` stops
    the run.

    A checkpoint holds the position within the epoch, and the state of each callback (`CallbackAttributes`).

    Args:
        callbacks: instances of `keras.callbacks.Callback`.
    """

    wants = frozenset({"loss"})

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = list(callbacks)
        self.view: ModelView | None = None  # set during a run
        self.epoch = self.batch = 0  # between two epochs: those of the next one
        self.is_open = False  # the epoch has begun
        self.is_waiting = False  # the epoch has ended, and its evaluation has not
        self.losses: list[Any] = []  # of the epoch's latest steps, on the device
        self.loss_sum, self.num_losses = 0.0, 0  # of the epoch's steps before these
        self.metrics: dict[str, Any] = {}  # of the epoch's last evaluations
        self.states = [CallbackAttributes(callback) for callback in self.callbacks]
        self._loaded: Mapping[str, Any] | None = None  # the state that the run resumes from, until it begins
        for callback in self.callbacks:
            unheard = [name for name in UNHEARD if overrides(callback, name) and not is_of_keras(type(callback))]
            if unheard:
                logger.warning("%s of %s will not be called.", " and ".join(unheard), type(callback).__name__)
        self.hearers = [callback for callback in self.callbacks if any(overrides(callback, name) for name in BATCHES)]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.view = ModelView(kwargs["model"], kwargs["optimizer"])
        self.epoch, self.is_open, self.is_waiting = int(state.epoch or 0), False, False
        self._begin_count()
        for callback in self.callbacks:
            callback.set_model(self.view)
            callback.set_params({"verbose": 0, "epochs": int(args.num_train_epochs), "steps": None})
            callback.on_train_begin()
        for each in self.states:
            each.begin()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and state.global_step:
            self._restore(loaded)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.is_waiting:  # its evaluation was not made
            self._end_epoch(control)
        if self.is_open:
            self._reopen_epoch()
            return
        self.is_open = True
        self._begin_count()
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
        found = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
        self.metrics.update(found)
        for callback in self.callbacks:
            callback.on_test_begin()
            callback.on_test_end(found)

    def on_sets_evaluated(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the epoch after its evaluation, which calls `on_evaluate` for each set."""
        if self.view is not None and self.is_waiting:
            self._end_epoch(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for callback in self.callbacks:
            callback.on_train_end()
        self.view = None

    # ---- the state in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns the position within the epoch and the states of the callbacks by name, JSON-serializable."""
        self._add_losses()
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "is_open": self.is_open,
            "is_waiting": self.is_waiting,
            "is_stopped": self.view is not None and bool(self.view.stop_training),
            "loss_sum": self.loss_sum,
            "num_losses": self.num_losses,
            "metrics": plain_items(self.metrics),
            "callbacks": {name: each.state_dict() for name, each in self._named_states()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state: within a run at once, else when the run has begun, as callbacks reset themselves then.

        Raises:
            ValueError: a number or a group of the state is damaged.
        """
        is_counted = all(is_count(state[name]) for name in ("epoch", "batch", "num_losses"))
        groups = (state["metrics"], state["callbacks"], *dict(state["callbacks"]).values())
        if not is_counted or not all(isinstance(group, Mapping) for group in groups):
            raise ValueError("the position within the epoch, or the state of a callback, is damaged")
        float(state["loss_sum"])
        if self.view is None:
            self._loaded = state
        else:
            self.view.stop_training = bool(state["is_stopped"])
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch, self.num_losses = state["epoch"], state["batch"], state["num_losses"]
        self.is_open, self.is_waiting = bool(state["is_open"]), bool(state["is_waiting"])
        self.loss_sum, self.losses, self.metrics = float(state["loss_sum"]), [], dict(state["metrics"])
        for name, each in self._named_states():
            if name in state["callbacks"]:
                each.load_state_dict(state["callbacks"][name])

    def _named_states(self) -> Iterable[tuple[str, CallbackAttributes]]:
        return zip(numbered_names(self.callbacks), self.states, strict=True)

    def _reopen_epoch(self) -> None:
        """Begins an epoch for the callbacks of which the run has made a part.

        Their state and the learning rate, which they may set when an epoch begins, are kept.
        """
        assert self.view is not None
        rate = float(rate_of(self.view.optimizer))
        kept = [each.state_dict() for each in self.states]
        for callback in self.callbacks:
            callback.on_epoch_begin(self.epoch)
        for each, state in zip(self.states, kept, strict=True):
            each.load_state_dict(state)
        if float(rate_of(self.view.optimizer)) != rate:
            self.view.optimizer.learning_rate = rate

    # ---- the epoch

    def _begin_count(self) -> None:
        self.batch, self.metrics = 0, {}
        self.losses, self.loss_sum, self.num_losses = [], 0.0, 0

    def _add_losses(self) -> None:
        """Reads the losses on the device; they are added one by one, so that the sum does not depend on the reads."""
        if self.losses:
            for loss in to_array(tf.stack(self.losses)).tolist():
                self.loss_sum += loss
            self.num_losses += len(self.losses)
            self.losses = []

    def _end_epoch(self, control: TrainerControl) -> None:
        self.is_waiting = self.is_open = False
        logs = {f"val_{name}": value for name, value in self.metrics.items()}
        self._add_losses()
        if self.num_losses:
            logs["loss"] = self.loss_sum / self.num_losses
        for callback in self.callbacks:
            callback.on_epoch_end(self.epoch, logs)
        self.epoch += 1
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
