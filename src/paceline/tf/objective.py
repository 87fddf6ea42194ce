"""From a batch to a loss: how a model is called, what its loss is, and what share of an update it makes.

One rule, as on the torch side: an update's loss is a sum over its samples (or targets) divided by their number, over
all micro-batches and replicas. A loss with an entry per sample or target is summed; a scalar is taken for a mean and
multiplied by what it is a mean over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.tf.batches import IGNORE_INDEX, Array, main_labels, size_of, to_array
from paceline.tf.framework import keras, tf

SAMPLES, TOKENS, SHIFTED, ROWS = range(4)
BY_NAME = {"samples": SAMPLES, "tokens": TOKENS, "shifted_tokens": SHIFTED}
NUM_COUNTS = 4


NO_IGNORE_INDEX = (
    "A label is -100, and the loss counts it: none of Keras or TensorFlow leaves labels out by itself. Compile the "
    "model with keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100), or without a loss "
    "(the default one leaves -100 out), or pass a compute_loss_func that does. Where -100 is a number to be met, give "
    "labels of floating point."
)


def count(features: Any, labels: Any) -> Array:
    """What a batch can weigh, float64 of shape (4,): samples, targets, targets but the first of each row, rows.

    Targets are labels other than -100; rows are all but the last dimension of the labels.
    """
    size = size_of(features)
    found = main_labels(labels)
    if found is None:
        return np.full(NUM_COUNTS, size, dtype=np.float64)
    array = to_array(found)
    num_rows = size if array.ndim < 2 else array.size // max(array.shape[-1], 1)
    if array.dtype.kind not in "iu":
        return np.array([size, array.size, array.size, num_rows], dtype=np.float64)
    num_targets = np.count_nonzero(array != IGNORE_INDEX)
    num_shifted = num_targets if array.ndim < 2 else np.count_nonzero(array[:, 1:] != IGNORE_INDEX)
    return np.array([size, num_targets, num_shifted, num_rows], dtype=np.float64)


class Objective:
    """Calls a model and makes a loss of what it returns.

    Args:
        model: a Keras model (3, or tf_keras), a TF model of transformers, or any callable `tf.Module`.
        compute_loss_func: `(outputs, labels[, num_items_in_batch]) -> loss`, instead of the model's own.
        loss_weight: what a scalar loss is a mean over, as in the arguments; None: its targets.
        label_smoothing: share of the target spread over all classes, for the default loss.

    Attributes:
        kind: which count the loss is divided by, known when it has been traced.
    """

    def __init__(
        self,
        model: Any,
        *,
        compute_loss_func: Callable[..., Any] | None = None,
        loss_weight: str | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.model, self.compute_loss_func, self.loss_weight = model, compute_loss_func, loss_weight
        self.label_smoothing = label_smoothing
        self.kind = TOKENS
        self.counts_ignored = False  # the model was compiled with a loss that leaves no label out
        self.parameters = parameters_of(model.call if hasattr(model, "call") else model.__call__)
        self.takes_labels = "labels" in self.parameters
        self.takes_count = compute_loss_func is not None and "num_items_in_batch" in parameters_of(compute_loss_func)

    # ---- calling the model

    def run(self, features: Any, labels: Any, training: bool, num_items: Any = None) -> tuple[Any, Any]:
        """(loss, outputs) of a batch; the loss is None without labels where the model makes none itself."""
        wanted = self.takes_labels and self.compute_loss_func is None
        given = {}
        if wanted and labels is not None:
            given = dict(labels) if isinstance(labels, Mapping) else {"labels": labels}
        outputs = self.call(features, training, given)
        if wanted and given:
            return read_outputs(outputs)
        if labels is None:
            return None, predictions_of(outputs)
        return self.loss_of(outputs, labels, num_items), predictions_of(outputs)

    def call(self, features: Any, training: bool, given: Mapping[str, Any]) -> Any:
        """The model's outputs for features, which go by name where its parameters have their names."""
        options = {**given, **({"training": training} if "training" in self.parameters else {})}
        if isinstance(features, Mapping):
            if set(features) <= set(self.parameters):
                return self.model(**features, **options)
            if len(features) == 1 and not takes_names(self.model):
                return self.model(next(iter(features.values())), **options)
        return self.model(features, **options)

    def loss_of(self, outputs: Any, labels: Any, num_items: Any) -> Any:
        """The loss by `compute_loss_func`, by what the model was compiled with, or by what the labels are."""
        if self.compute_loss_func is not None:
            if self.takes_count:
                return self.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
            return self.compute_loss_func(outputs, labels)
        compiled = getattr(self.model, "loss", None)
        if compiled is not None and not callable(getattr(compiled, "numpy", None)):
            self.counts_ignored = counts_ignored(compiled)
            return compiled_loss(compiled, outputs, labels, self.label_smoothing)
        return default_loss(predictions_of(outputs), main_labels(labels), self.model, self.label_smoothing)

    def check_labels(self, labels: Any) -> None:
        """Refuse -100 where the loss would count it; known when the model has been traced.

        Raises:
            ValueError: there is one.
        """
        found = main_labels(labels) if self.counts_ignored else None
        if found is None:
            return
        array = to_array(found)
        if array.dtype.kind == "i" and np.any(array == IGNORE_INDEX):
            raise ValueError(NO_IGNORE_INDEX)

    # ---- weighing the loss

    def weigh(self, loss: Any, labels: Any, own: Any, totals: Any) -> Any:
        """What a loss adds to that of its update, a float32 scalar.

        Args:
            loss: a scalar, or with an entry per sample, target or row.
            labels: of the same batch.
            own: float32 (4,), the counts of this batch; all 0 for one that is there only to fill a replica.
            totals: float32 (4,), those of the update.

        Raises:
            ValueError: the loss has another shape.
        """
        loss = tf.cast(loss, tf.float32)
        is_scalar = loss.shape.rank == 0 or loss.shape.as_list() == [1]
        self.kind, mask = self.kind_of(loss, labels, is_scalar)
        if is_scalar:
            mean = tf.reshape(loss, [])
            is_scaled = self.loss_weight == "scaled" or (self.loss_weight is None and self.takes_count)
            part = mean if is_scaled else tf.math.divide_no_nan(mean * own[self.kind], totals[self.kind])
            # an own batch without targets has a mean of nothing, which may be NaN
            return tf.where(own[self.kind] > 0, part, tf.zeros_like(part))
        if mask is not None:
            loss = tf.where(mask, loss, tf.zeros_like(loss))
        total = tf.math.divide_no_nan(tf.reduce_sum(loss), totals[self.kind])
        return tf.where(own[SAMPLES] > 0, total, tf.zeros_like(total))

    def kind_of(self, loss: Any, labels: Any, is_scalar: bool) -> tuple[int, Any]:
        """Which count a loss is divided by, and which of its entries count (None: all)."""
        targets = main_labels(labels)
        if self.loss_weight in BY_NAME and is_scalar:
            return BY_NAME[str(self.loss_weight)], None
        if targets is None:
            return SAMPLES, None
        rank, of_labels = loss.shape.rank, targets.shape.rank
        is_own = callable(getattr(self.model, "hf_compute_loss", None)) and self.compute_loss_func is None
        if is_scalar or (is_own and rank == 1 and of_labels > 1):
            return (SHIFTED if is_own and shifts(self.model) else TOKENS), None
        if rank == of_labels:
            return TOKENS, is_target(targets) if targets.dtype.is_integer else None
        if rank == of_labels - 1:
            return ROWS, None
        if rank == 1:
            return SAMPLES, None
        raise ValueError(
            f"The loss has shape {loss.shape} for labels of shape {targets.shape}: return a scalar (a mean), or one "
            "entry per sample or per target."
        )


def is_target(labels: Any) -> Any:
    """Which labels count. In a type without negative numbers all do: -100 would be taken for 156."""
    return tf.cast(labels, tf.int64) != IGNORE_INDEX


def check_model(model: Any) -> None:
    """Refuse what is no model of TensorFlow; None passes.

    Raises:
        TypeError: it cannot be called, or has no variables to train.
    """
    if model is not None and not (callable(model) and hasattr(type(model), "trainable_variables")):
        raise TypeError(
            f"`model` is {type(model).__name__}; a Keras model or a callable tf.Module is needed (for a module of "
            "torch: paceline.Trainer, with TrainingArguments)."
        )


def build_by_itself(model: Any) -> None:
    """Make the variables of a TF model of transformers, which knows its inputs, under the names that it loads by."""
    build = getattr(model, "build_in_name_scope", None)
    if callable(build) and not model.built:
        build()


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; none where it does not tell."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def takes_names(model: Any) -> bool:
    """Whether a Keras model's inputs are a dict."""
    return isinstance(getattr(model, "input", None) if is_functional(model) else None, Mapping)


def is_functional(model: Any) -> bool:
    """Whether a model knows its inputs: a functional or sequential one."""
    try:
        return getattr(model, "input", None) is not None
    except (AttributeError, ValueError):  # Keras raises where a model has not been called yet
        return False


def shifts(model: Any) -> bool:
    """Whether a TF model of transformers compares each output with the next label: causal language models."""
    names = {kind.__name__ for kind in type(model).__mro__}
    return "TFCausalLanguageModelingLoss" in names and not getattr(model.config, "is_encoder_decoder", False)


def read_outputs(outputs: Any) -> tuple[Any, Any]:
    """(loss, predictions) of a model that was given labels."""
    if isinstance(outputs, Mapping):
        return outputs["loss"], predictions_of({name: value for name, value in outputs.items() if name != "loss"})
    if isinstance(outputs, tuple | list) and len(outputs) > 1:
        return outputs[0], outputs[1]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs, None


def predictions_of(outputs: Any) -> Any:
    """What of a model's outputs are predictions: the logits where they have that name, else all."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", dict(outputs))
    return outputs


def compiled_loss(loss: Any, outputs: Any, labels: Any, label_smoothing: float) -> Any:
    """The loss that a Keras model was compiled with, one entry per sample or row.

    Raises:
        ValueError: there are several outputs, or a smoothing that belongs into the loss.
    """
    if isinstance(loss, Mapping | list | tuple):
        raise ValueError("A model compiled with several losses: pass compute_loss_func=(outputs, labels) -> loss.")
    if label_smoothing:
        raise ValueError(
            f"label_smoothing_factor={label_smoothing}: the model was compiled with its own loss; set label_smoothing "
            "there, or leave one of them out."
        )
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    return (function.call if hasattr(function, "call") else function)(main_labels(labels), predictions_of(outputs))


def counts_ignored(loss: Any) -> bool:
    """Whether a loss that a model was compiled with is one of Keras that counts labels of -100; one's own may not."""
    if not isinstance(loss, str) and not (getattr(loss, "__module__", None) or "").startswith(("keras.", "tf_keras.")):
        return False
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return bool(config.get("ignore_class") != IGNORE_INDEX)


def default_loss(outputs: Any, labels: Any, model: Any, label_smoothing: float) -> Any:
    """Cross-entropy of integer labels, squared error of others; one entry per target, 0 where the label is -100.

    Raises:
        ValueError: outputs and labels do not fit each other so.
    """
    if not hasattr(outputs, "shape") or labels is None:
        raise ValueError("The model returns several outputs: pass compute_loss_func=(outputs, labels) -> loss.")
    outputs = tf.cast(outputs, tf.float32)
    if labels.dtype.is_integer:
        labels = tf.cast(labels, tf.int64)  # those of images often are uint8, which knows no -100
        classes, is_probability = outputs.shape[-1] if outputs.shape.rank else 1, is_activated(model, "softmax")
        if classes != 1 and outputs.shape.rank == labels.shape.rank + 1:
            return cross_entropy(outputs, labels, label_smoothing, is_probability)
        if classes != 1 and outputs.shape.rank == labels.shape.rank and labels.shape[-1] == 1:  # a column of classes
            return cross_entropy(outputs, tf.squeeze(labels, -1), label_smoothing, is_probability)[..., None]
    if outputs.shape.rank == labels.shape.rank + 1 and outputs.shape[-1] == 1:
        outputs = tf.squeeze(outputs, -1)
    # shapes that differ would be stretched to each other
    if not outputs.shape.is_compatible_with(labels.shape) or label_smoothing:
        raise ValueError(
            f"No default loss for outputs of shape {outputs.shape} and {labels.dtype.name} labels of shape "
            f"{labels.shape}: compile the model with a loss, or pass compute_loss_func=(outputs, labels) -> loss."
        )
    if labels.dtype.is_integer:
        targets = tf.cast(labels, tf.float32)
        if is_activated(model, "sigmoid"):
            return keras.losses.binary_crossentropy(targets[..., None], outputs[..., None])
        return tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
    return tf.math.squared_difference(outputs, tf.cast(labels, tf.float32))


def cross_entropy(logits: Any, labels: Any, smoothing: float, is_probability: bool) -> Any:
    """Cross-entropy per target in nats; with smoothing, that share of it is the mean over all classes."""
    counted = labels != IGNORE_INDEX
    safe = tf.where(counted, labels, tf.zeros_like(labels))
    log_probabilities = tf.math.log(tf.maximum(logits, 1e-7)) if is_probability else tf.nn.log_softmax(logits)
    if is_probability or smoothing:
        losses = -tf.gather(log_probabilities, tf.cast(safe, tf.int64), batch_dims=labels.shape.rank)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(safe, logits)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * tf.reduce_mean(log_probabilities, axis=-1)
    return tf.where(counted, losses, tf.zeros_like(losses))


def is_activated(model: Any, name: str) -> bool:
    """Whether the last layer of a Keras model ends in this activation, so that its outputs are no logits."""
    layers = getattr(model, "layers", None)
    if not layers:
        return False
    kinds = {item.__name__.lower() for item in type(layers[-1]).__mro__}  # keras.layers.Softmax is one by itself
    # tf.nn.softmax calls itself softmax_v2
    activation = getattr(getattr(layers[-1], "activation", None), "__name__", "").removesuffix("_v2")
    return name in kinds or activation == name
