"""The default loss of a model without a loss, chosen by its outputs, the operation that made them, and the labels.

| labels | outputs | loss |
|---|---|---|
| integers, one per target | one per class and target | cross-entropy |
| 0 and 1 (or booleans), of the outputs' shape | one per target | binary cross-entropy |
| the same | several per sample | binary cross-entropy of each; refused if every row holds a single 1 |
| floating point, of the outputs' shape | any | squared error |

Outputs are logits unless the operation that made them is a softmax or a sigmoid. Labels of -100 are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.tensorflow.data.batches import IGNORE_INDEX, main_labels, to_array
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)

REMEDY = "compile the model with a loss, or pass compute_loss_func=(outputs, labels) -> loss"
# graph operations that do not change values, which are skipped when looking for a softmax or sigmoid
PASSING = ("Identity", "Reshape", "Squeeze", "ExpandDims", "Cast", "StopGradient", "EnsureShape")
SMALLEST = 1e-7  # probabilities are clipped to this before taking the logarithm


class DefaultLoss:
    """Chooses a loss when a model is traced, logs the choice, and checks the labels of every batch.

    Args:
        label_smoothing: share of the target that is spread over all classes, for the cross-entropy of classes.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.taken: str | None = None  # description of the loss that was logged
        self._check: Callable[[Any], None] | None = None  # checks a batch's labels on the host
        self._is_multi_label = False  # a row that is not one-hot was seen

    def __call__(self, outputs: Any, labels: Any) -> Any:
        """Returns the loss, with one entry per target, which is 0 if the label is -100.

        Raises:
            ValueError: outputs and labels fit no loss, or there are several outputs or labels.
        """
        labels = the_only(labels)
        if not hasattr(outputs, "shape") or labels is None:
            raise ValueError(f"The model returns several outputs and names no loss: {REMEDY}.")
        if labels.dtype == tf.bool or labels.dtype.is_integer:
            # cast because image labels are often uint8, which cannot hold -100
            return self._of_whole_numbers(outputs, tf.cast(labels, tf.int64), labels.dtype.name)
        outputs = tf.cast(outputs, tf.float32)
        outputs = self._fitting(outputs, labels, labels.dtype.name)
        self._say("the squared error, as the labels are of floating point")
        return tf.math.squared_difference(outputs, tf.cast(labels, tf.float32))

    def _of_whole_numbers(self, outputs: Any, labels: Any, kind: str) -> Any:
        """Returns the cross-entropy of classes, or of binary targets."""
        activation, outputs, is_probability = logits_of(outputs)
        num_outputs = outputs.shape[-1] if outputs.shape.rank else 1
        is_column = outputs.shape.rank == labels.shape.rank and labels.shape[-1] == 1
        if num_outputs != 1 and (outputs.shape.rank == labels.shape.rank + 1 or is_column):
            if activation == "sigmoid":
                raise ValueError(
                    f"A sigmoid makes each of the {num_outputs} outputs, and the labels are numbers of classes: no "
                    f"default loss fits both. End the model in logits or a softmax, or {REMEDY}."
                )
            self._say(f"the cross-entropy of {num_outputs} classes, of {said(activation)}")
            classes = tf.squeeze(labels, -1) if is_column else labels
            losses = cross_entropy(tf.cast(outputs, tf.float32), classes, self.label_smoothing, is_probability)
            return losses[..., None] if is_column else losses
        fitting = self._fitting(outputs, labels, kind)
        if activation == "softmax":
            raise ValueError(
                f"A softmax makes the outputs, and the labels, of shape {labels.shape}, are not numbers of classes: "
                f"give these (labels.argmax(-1)), or {REMEDY}."
            )
        may_be_classes = num_outputs != 1 and outputs.shape.rank == labels.shape.rank and activation != "sigmoid"
        self._check = self._check_rows if may_be_classes else self._check_binary
        self._say(f"the binary cross-entropy, of {said(activation)}")
        return binary_cross_entropy(fitting, labels, is_probability)

    def _fitting(self, outputs: Any, labels: Any, kind: str) -> Any:
        """Returns the outputs in the shape of the labels, since different shapes would be broadcast.

        Raises:
            ValueError: the shapes do not fit, or label smoothing is requested.
        """
        outputs = tf.cast(outputs, tf.float32)
        if outputs.shape.rank == labels.shape.rank + 1 and outputs.shape[-1] == 1:
            outputs = tf.squeeze(outputs, -1)
        if not outputs.shape.is_compatible_with(labels.shape) or self.label_smoothing:
            raise ValueError(
                f"No default loss for outputs of shape {outputs.shape} and {kind} labels of shape {labels.shape}"
                f"{f' with label_smoothing_factor={self.label_smoothing}' if self.label_smoothing else ''}: {REMEDY}."
            )
        return outputs

    def _say(self, taken: str) -> None:
        if self.taken != taken:
            self.taken = taken
            logger.warning("The model has no loss: using %s. For another one, %s.", taken, REMEDY)

    # ---- labels on the host

    def check(self, labels: object) -> None:
        """Checks the labels of a batch, once the loss is known.

        Raises:
            ValueError: the labels fit no loss, or two.
        """
        if self._check is not None:
            self._check(to_array(main_labels(labels)))

    def _check_binary(self, labels: Any) -> None:
        wrong = labels[(labels != 0) & (labels != 1) & (labels != IGNORE_INDEX)]
        if wrong.size:
            raise ValueError(
                f"A label is {wrong.flat[0]}, and the model gives one number for it: a default loss for that takes 0 "
                "and 1. For squared error give labels of floating point (labels.astype('float32')), for classes a "
                f"model with an output for each; or {REMEDY}."
            )

    def _check_rows(self, labels: Any) -> None:
        self._check_binary(labels)
        if not self._is_multi_label:
            self._is_multi_label = bool(np.any((labels == 1).sum(-1) != 1))
        if not self._is_multi_label:
            raise ValueError(
                "Every row of the labels holds a single 1: they may be classes (give their numbers, labels.argmax(-1), "
                "or compile with loss='categorical_crossentropy'), or several yes-or-no answers (compile with "
                "loss=keras.losses.BinaryCrossentropy(from_logits=True))."
            )


def the_only(labels: object) -> Any:
    """Returns the only labels of a batch, or those named `labels`.

    Raises:
        ValueError: there are several, none of which is named `labels`.
    """
    is_named = isinstance(labels, Mapping)
    if isinstance(labels, Mapping | tuple | list) and len(labels) > 1 and not (is_named and "labels" in labels):
        names = ", ".join(map(repr, labels)) if is_named else f"{len(labels)} of them"
        raise ValueError(f"There are several labels ({names}), and no default loss takes more than one: {REMEDY}.")
    return main_labels(labels)


def said(activation: str) -> str:
    """Returns a description of the outputs: logits, or the input of an activation."""
    return f"what goes into the model's {activation}" if activation else "logits: no softmax or sigmoid ends the model"


def logits_of(outputs: Any) -> tuple[str, Any, bool]:
    """Finds the operation that made a model's outputs in the traced graph, skipping changes of shape and dtype.

    Returns: "softmax", "sigmoid" or "" for another operation; the logits, or the outputs if a change of shape or dtype
        follows the activation; True if the returned tensor holds probabilities.
    """
    tensor, is_direct = outputs, True
    while tf.inside_function():
        operation = tensor.op
        if operation.type in ("Softmax", "Sigmoid"):
            return operation.type.lower(), operation.inputs[0] if is_direct else outputs, not is_direct
        if operation.type not in PASSING:
            break
        is_direct &= operation.type in ("Identity", "StopGradient")
        tensor = operation.inputs[0]
    return "", outputs, False


def cross_entropy(outputs: object, labels: Any, smoothing: float, is_probability: bool) -> Any:
    """Returns the cross-entropy per target in nats, 0 if the label is -100.

    Smoothing mixes in the mean over all classes.
    """
    counted = labels != IGNORE_INDEX
    safe = tf.where(counted, labels, tf.zeros_like(labels))
    log_probabilities = tf.math.log(tf.maximum(outputs, SMALLEST)) if is_probability else tf.nn.log_softmax(outputs)
    if is_probability or smoothing:
        losses = -tf.gather(log_probabilities, tf.cast(safe, tf.int64), batch_dims=labels.shape.rank)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(safe, outputs)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * tf.reduce_mean(log_probabilities, axis=-1)
    return tf.where(counted, losses, tf.zeros_like(losses))


def binary_cross_entropy(outputs: Any, labels: object, is_probability: bool) -> Any:
    """Returns the binary cross-entropy per target in nats, 0 if the label is -100."""
    targets = tf.cast(labels, tf.float32)
    if is_probability:
        losses = keras.losses.binary_crossentropy(targets[..., None], outputs[..., None])
    else:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
    return tf.where(labels == IGNORE_INDEX, tf.zeros_like(losses), losses)
