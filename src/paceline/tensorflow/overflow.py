"""Finds the origin of inf and NaN in TensorFlow, by checking a model's values in order during an optimizer step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.tensorflow.data.batches import Array, leaves
from paceline.tensorflow.framework import plain, tf
from paceline.tensorflow.optim.optimizers import name_of

MAX_ROWS = 21  # rows in a report
HEADER = f"{'abs min':8} {'abs max':8}"


class Watch:
    """Checks weights, features, layer outputs, loss and gradients in each pass of an optimizer step.

    The first of them that holds inf or NaN ends the optimizer step, before its gradients are applied. Gradients of a
    scaled loss may overflow, and are not checked. The layers are those of Keras, or the submodules of a `tf.Module`.
    Layers inside a loop (the cells of an RNN) are not checked; the loop's outputs are. Checks are added only while an
    optimizer step is traced, so that the model and the functions for evaluations are unchanged. The extremes are
    computed on the device, and the host reads them twice per pass.

    Args:
        model: the model to check.

    Attributes:
        is_used: an optimizer step was traced with checks.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_used = False
        self._report: str | None = None
        self._seen = threading.local()  # records of the pass being traced; replicas are traced in separate threads

    # ---- while an optimizer step is traced

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context in which traced code records the outputs of all layers."""
        kinds = {type(layer): type(layer).__call__ for layer in layers_of(self.model)}
        before = {kind: vars(kind).get("__call__") for kind in kinds}
        try:
            for kind, own in kinds.items():
                kind.__call__ = noting(own, self._note)
            yield
        finally:
            for kind, own in before.items():
                if own is None and "__call__" in vars(kind):
                    del kind.__call__
                elif own is not None:
                    kind.__call__ = own

    def begin(self, features: Any) -> None:
        """Starts the records of a pass with weights and features, before the model is traced."""
        self.is_used = True
        self._seen.graph = tf.compat.v1.get_default_graph()
        self._seen.names, self._seen.rows = [], []
        for variable in self.model.variables:
            if plain(variable).dtype.is_floating:
                self._add(f"the weight {name_of(variable)}", tf.convert_to_tensor(plain(variable)))
        self._add("the features", features, is_input=True)

    def _note(self, layer: object, outputs: object) -> None:
        if tf.compat.v1.get_default_graph() is getattr(self._seen, "graph", None):
            self._add(f"the output of {place_of(layer)} ({type(layer).__name__})", outputs)

    def _add(self, name: str, nest: object, is_input: bool = False) -> None:
        for leaf in leaves(nest):
            if tf.is_tensor(leaf) and isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
                self._seen.names.append(name)
                self._seen.rows.append(extremes(leaf, is_input))

    def end(self, loss: object, outputs: object) -> Any:
        """Returns a factor of 1 for the loss, whose computation fails unless all recorded values are finite."""
        self._add("the model's outputs", outputs)
        self._add("the loss", tf.convert_to_tensor(loss))
        self._seen.graph = None
        return self._one()

    def gradients(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of variables, multiplied by a factor of 1 that fails to compute unless all are finite.

        The gradients of the last layer are checked first.
        """
        self._seen.names, self._seen.rows = [], []
        found = [None if value is None else tf.convert_to_tensor(value) for value in values]
        for value, variable in reversed(list(zip(found, variables, strict=True))):
            self._add(f"the gradient of {name_of(variable)}", value)
        one = self._one()
        return [None if value is None else value * tf.cast(one, value.dtype) for value in found]

    def _one(self) -> Any:
        """Returns a factor of 1 that is computed by the host's check of all recorded values."""
        if not self._seen.rows:
            return tf.constant(1.0)
        one = tf.numpy_function(partial(self._look, self._seen.names), [tf.stack(self._seen.rows)], tf.float32)
        return tf.stop_gradient(tf.reshape(one, []))

    def check_used(self) -> None:
        """Checks, after an optimizer step, that the step was traced with checks.

        Raises:
            UnsupportedOption: a subclass's method bypassed `TFTrainer.training_step`.
        """
        if not self.is_used:
            raise UnsupportedOption(
                "debug='underflow_overflow' looks at what TFTrainer.training_step does, and this Trainer's own "
                "training_step, apply_gradients or distributed_training_steps does not lead there: call super(), or "
                "leave debug out."
            )

    # ---- in each pass

    def _look(self, names: Sequence[str], rows: Array) -> np.float32:
        """Returns 1 if all values are finite; else raises ValueError, which TensorFlow wraps in an OpError."""
        bad = np.flatnonzero(rows[:, 2])
        if len(bad) == 0:
            return np.float32(1.0)
        first = int(bad[0])
        lines = [f"{rows[i, 0]:8.2e} {rows[i, 1]:8.2e} {names[i]}" for i in range(first + 1)][-MAX_ROWS:]
        self._report = (
            f"debug='underflow_overflow': inf or NaN in {names[first]}. The last {len(lines)} up to it:\n{HEADER}\n"
            + "\n".join(lines)
        )
        raise ValueError(self._report)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Replaces the error of a failed optimizer step with its report.

        Raises:
            ValueError: inf or NaN was found.
        """
        try:
            yield
        except tf.errors.OpError:
            if self._report is None:
                raise
            report, self._report = self._report, None
            raise ValueError(report) from None


def layers_of(model: object) -> list[Any]:
    """Returns a model with all its Keras layers, or with the submodules of a `tf.Module`."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model, *(flatten() if callable(flatten) else getattr(model, "submodules", ()))]


def place_of(layer: object) -> str:
    """Returns a layer's path in its model, from the names of its weights if needed; else the layer's own name."""
    path = getattr(layer, "path", None)  # of Keras 3
    folders = [name_of(weight).split("/")[:-1] for weight in getattr(layer, "weights", ())]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return str(path or "/".join(parts[0] for parts in shared) or getattr(layer, "name", ""))


def noting(own: Any, note: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Returns a `__call__` that calls `own` and records its result."""
    quiet = tf.autograph.experimental.do_not_convert(note)

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = own.__get__(layer, type(layer))(*args, **kwargs)
        quiet(layer, outputs)
        return outputs

    return call


def extremes(value: object, is_input: bool) -> Any:
    """Returns (smallest absolute value, largest, 1 if there is inf or NaN); allows -inf in inputs, as in masks."""
    size = tf.cast(tf.stop_gradient(value), tf.float64)
    is_fine = tf.math.is_finite(size)
    if is_input:
        is_fine = tf.logical_or(is_fine, size == -np.inf)
    size = tf.abs(size)
    bad = tf.cast(tf.reduce_any(~is_fine), tf.float64)
    return tf.stack([tf.reduce_min(size), tf.reduce_max(size), bad])
