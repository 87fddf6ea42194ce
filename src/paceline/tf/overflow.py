"""Finding where infinities and NaN come from in TensorFlow: what goes through a model in an update, in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.tf.batches import Array, leaves
from paceline.tf.framework import plain, tf
from paceline.tf.optimizers import name_of

MAX_ROWS = 21  # that a report shows
HEADER = f"{'abs min':8} {'abs max':8}"


class Watch:
    """Looks at weights, features, the outputs of every layer, the loss and the gradients in each pass of an update.

    At the first of them that holds inf or NaN the update ends, before its gradients are applied. Gradients of a scaled
    loss may overflow, and are let pass. The layers are those of Keras, or the modules below a `tf.Module`; those in a
    loop (the cells of an RNN) are left out, what the loop returns is not. They are watched while an update is traced:
    the model, and what is compiled for evaluations, stay as they are. The extremes are computed on the device and read
    twice for each pass.

    Args:
        model: to be watched.

    Attributes:
        is_used: an update went through it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_used = False
        self._report: str | None = None
        self._seen = threading.local()  # of the pass being traced: replicas are traced in threads of their own

    # ---- while an update is traced

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, what is traced notes the outputs of all layers."""
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

    def through(self, run_model: Callable[..., Any]) -> Callable[..., Any]:
        """A `run_model` whose loss is there only when all that was noted on the way to it is finite."""

        def run(features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
            self.is_used = True
            self._begin(features)
            loss, outputs = run_model(features, labels, training)
            return self._end(loss, outputs), outputs

        return run

    def _begin(self, features: Any) -> None:
        self._seen.graph = tf.compat.v1.get_default_graph()
        self._seen.names, self._seen.rows = [], []
        for variable in self.model.variables:
            if plain(variable).dtype.is_floating:
                self._add(f"the weight {name_of(variable)}", tf.convert_to_tensor(plain(variable)))
        self._add("the features", features, is_input=True)

    def _note(self, layer: Any, outputs: Any) -> None:
        if tf.compat.v1.get_default_graph() is getattr(self._seen, "graph", None):
            self._add(f"the output of {place_of(layer)} ({type(layer).__name__})", outputs)

    def _add(self, name: str, nest: Any, is_input: bool = False) -> None:
        for leaf in leaves(nest):
            if tf.is_tensor(leaf) and isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
                self._seen.names.append(name)
                self._seen.rows.append(extremes(leaf, is_input))

    def _end(self, loss: Any, outputs: Any) -> Any:
        if loss is None:
            return None
        self._add("the model's outputs", outputs)
        self._add("the loss", tf.convert_to_tensor(loss))
        self._seen.graph = None
        return loss * tf.cast(self._one(), loss.dtype)

    def gradients(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of variables, which are there only when all are finite; the last layer's are looked at first.

        Those of a scaled loss may overflow, and are not to be looked at.
        """
        self._seen.names, self._seen.rows = [], []
        found = [None if value is None else tf.convert_to_tensor(value) for value in values]
        for value, variable in reversed(list(zip(found, variables, strict=True))):
            self._add(f"the gradient of {name_of(variable)}", value)
        one = self._one()
        return [None if value is None else value * tf.cast(one, value.dtype) for value in found]

    def _one(self) -> Any:
        """A factor of 1 for what is to wait until the host has looked at all that was noted."""
        if not self._seen.rows:
            return tf.constant(1.0)
        one = tf.numpy_function(partial(self._look, self._seen.names), [tf.stack(self._seen.rows)], tf.float32)
        return tf.stop_gradient(tf.reshape(one, []))

    def check_used(self) -> None:
        """To be called when an update was made.

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
        """1; or the error, of which TensorFlow makes one of its own."""
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
        """An update that ends because of what was seen ends with its report.

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


def layers_of(model: Any) -> list[Any]:
    """A model and all layers of Keras in it, or the modules below a `tf.Module`."""
    flatten = getattr(model, "_flatten_layers", None)
    return [model, *(flatten() if callable(flatten) else getattr(model, "submodules", ()))]


def place_of(layer: Any) -> str:
    """Where in its model a layer is, as the names of its weights say; its own name where they do not."""
    path = getattr(layer, "path", None)  # of Keras 3
    folders = [name_of(weight).split("/")[:-1] for weight in getattr(layer, "weights", ())]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return str(path or "/".join(parts[0] for parts in shared) or getattr(layer, "name", ""))


def noting(own: Any, note: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """A `__call__` that does what `own` does, and notes what it returned."""
    quiet = tf.autograph.experimental.do_not_convert(note)

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = own.__get__(layer, type(layer))(*args, **kwargs)
        quiet(layer, outputs)
        return outputs

    return call


def extremes(value: Any, is_input: bool) -> Any:
    """(smallest absolute value, largest, 1 where inf or NaN is in it); -inf in an input is a mask's, and let pass."""
    size = tf.cast(tf.stop_gradient(value), tf.float64)
    is_fine = tf.math.is_finite(size)
    if is_input:
        is_fine = tf.logical_or(is_fine, size == -np.inf)
    size = tf.abs(size)
    bad = tf.cast(tf.reduce_any(~is_fine), tf.float64)
    return tf.stack([tf.reduce_min(size), tf.reduce_max(size), bad])
