"""Finding the origin of inf and NaN in TensorFlow: the values in a model during an optimizer step, in order."""

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

MAX_ROWS = 21  # that a report shows
HEADER = f"{'abs min':8} {'abs max':8}"


class Watch:
    """Checks weights, features, the outputs of every layer, the loss and the gradients in each pass of an optimizer
    step.

    At the first of them that holds inf or NaN the optimizer step ends, before its gradients are applied. Gradients of a
    scaled loss may overflow, and are ignored. The layers are those of Keras, or the modules below a `tf.Module`; those
    in a loop (the cells of an RNN) are left out, the loop's outputs are not. They are watched while an optimizer step
    is traced: the model, and the functions for evaluations, are unchanged. The extremes are computed on the
    device and read twice for each pass.

    Args:
        model: to be watched.

    Attributes:
        is_used: an optimizer step went through it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_used = False
        self._report: str | None = None
        self._seen = threading.local()  # of the pass being traced: replicas are traced in separate threads

    # ---- while an optimizer step is traced

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, traced code records the outputs of all layers."""
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
        """Starts the checks of a pass, before the model is traced."""
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
        """Returns a factor of 1 for the loss, which is computed only if all recorded values before it are finite."""
        self._add("the model's outputs", outputs)
        self._add("the loss", tf.convert_to_tensor(loss))
        self._seen.graph = None
        return self._one()

    def gradients(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of variables, computed only if all are finite; the last layer's are checked first.

        Those of a scaled loss may overflow, and are not checked.
        """
        self._seen.names, self._seen.rows = [], []
        found = [None if value is None else tf.convert_to_tensor(value) for value in values]
        for value, variable in reversed(list(zip(found, variables, strict=True))):
            self._add(f"the gradient of {name_of(variable)}", value)
        one = self._one()
        return [None if value is None else value * tf.cast(one, value.dtype) for value in found]

    def _one(self) -> Any:
        """Returns a factor of 1 that waits until the host has checked all recorded values."""
        if not self._seen.rows:
            return tf.constant(1.0)
        one = tf.numpy_function(partial(self._look, self._seen.names), [tf.stack(self._seen.rows)], tf.float32)
        return tf.stop_gradient(tf.reshape(one, []))

    def check_used(self) -> None:
        """Checks, after an optimizer step, that it went through this watch.

        Raises:
            UnsupportedOption: it went another way, of a subclass.
        """
        if not self.is_used:
            raise UnsupportedOption(
                "debug='underflow_overflow' looks at what TFTrainer.training_step does, and this Trainer's own "
                "training_step, apply_gradients or distributed_training_steps does not lead there: call super(), or "
                "leave debug out."
            )

    # ---- in each pass

    def _look(self, names: Sequence[str], rows: Array) -> np.float32:
        """Returns 1, or raises; TensorFlow wraps the error in one of its own."""
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
            ValueError: inf or NaN came up.
        """
        try:
            yield
        except tf.errors.OpError:
            if self._report is None:
                raise
            report, self._report = self._report, None
            raise ValueError(report) from None


def layers_of(model: object) -> list[Any]:
    """Returns a model and all layers of Keras in it, or the modules below a `tf.Module`."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model, *(flatten() if callable(flatten) else getattr(model, "submodules", ()))]


def place_of(layer: object) -> str:
    """Returns a layer's path in its model from the names of its weights; its own name without any."""
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
    """Returns (smallest absolute value, largest, 1 if it holds inf or NaN); ignores -inf in an input, a mask's."""
    size = tf.cast(tf.stop_gradient(value), tf.float64)
    is_fine = tf.math.is_finite(size)
    if is_input:
        is_fine = tf.logical_or(is_fine, size == -np.inf)
    size = tf.abs(size)
    bad = tf.cast(tf.reduce_any(~is_fine), tf.float64)
    return tf.stack([tf.reduce_min(size), tf.reduce_max(size), bad])
