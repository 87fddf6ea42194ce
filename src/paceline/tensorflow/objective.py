"""The loss of a batch: the call of the model, its loss, and the batch's contribution to an optimizer step.

As on the torch side, the loss of an optimizer step is the sum over its samples (or targets) in all micro-batches and
replicas, divided by their number. A loss with an entry per sample or target is summed; a scalar is treated as a mean
and multiplied by its number of samples or targets. A compiled loss of Keras 3 is split into its sum and Keras' divisor,
so that an optimizer step equals Keras' step on all its samples as one batch.

A `compute_loss_func` with a parameter `num_items_in_batch` gets the number of targets in the labels that it is called
with, not that of the optimizer step. A function that divides its sum by the number and one that ignores it and returns
a mean then return the same, and both are weighted as means. `loss_weight="scaled"` declares a function that has to
divide by the number of the whole step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.tensorflow.compiled import Part, compiled_model
from paceline.tensorflow.data.batches import (
    IGNORE_INDEX,
    Array,
    leaves,
    main_labels,
    map_leaves,
    size_of,
    split_weights,
    to_array,
)
from paceline.tensorflow.default_loss import DefaultLoss
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)

SAMPLES, TOKENS, SHIFTED, ROWS = range(4)
BY_NAME = {"samples": SAMPLES, "tokens": TOKENS, "shifted_tokens": SHIFTED}
NUM_COUNTS = 4


NO_IGNORE_INDEX = (
    "A label is -100, and the loss counts it: no loss of Keras or TensorFlow ignores labels by default. Compile the "
    "model with keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100), or without a loss "
    "(the default one leaves -100 out), or pass a compute_loss_func that does. Where -100 is a number to be met, give "
    "labels of floating point."
)


def count(features: object, labels: object) -> Array:
    """Returns the counts of a batch, float64 (4,): samples, targets, targets except in the first column, rows.

    Targets are labels other than -100; the number of rows is the product of all label dimensions except the last.
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


class Share(NamedTuple):
    """The share of a replica's batch in its optimizer step, as tensors.

    Attributes:
        own: float32 (4,), the counts of this batch; all 0 for a dummy batch that only fills a replica.
        totals: float32 (4,), the counts of the optimizer step.
        sample_weight: as Keras takes it; None weights all samples equally.
        divisors: float32 (number of compiled losses,), of the optimizer step; None if this batch is the whole step.
    """

    own: Any
    totals: Any
    sample_weight: Any = None
    divisors: Any = None


@dataclass(eq=False)
class Objective:
    """Calls a model and computes the loss of its outputs.

    Args:
        model: a Keras model (3, or tf_keras), a TF model of transformers, or any callable `tf.Module`.
        compute_loss_func: `(outputs, labels[, num_items_in_batch]) -> loss`, used instead of the model's own loss.
        loss_weight: the unit over which a scalar loss is a mean, as in the arguments; None: targets. "scaled": that of
            a training is divided for the whole optimizer step, that of an evaluation is a mean.
        label_smoothing: share of the target that is spread over all classes, for the default loss.

    Attributes:
        kind: index of the count that divides the loss; known once the loss was traced.
        compiled: the losses and metrics of a compiled Keras 3 model; None if they do not define the loss.
        has_layer_losses: `add_loss` and regularizers are added to the loss; known once the loss was traced.

    Raises:
        ValueError: `loss_weight` is not supported, or there is no loss that `label_smoothing` could be applied to.
    """

    model: Any
    _: KW_ONLY
    compute_loss_func: Callable[..., Any] | None = None
    loss_weight: str | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if callable(self.loss_weight):
            raise ValueError("loss_weight cannot be a function with TensorFlow: give a name, or compute_loss_func.")
        if self.loss_weight == "sum":
            raise ValueError("loss_weight='sum' is not known with TensorFlow: give compute_loss_func, with a mean.")
        if self.label_smoothing and self.compute_loss_func is not None:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing}: with compute_loss_func the loss is that function's; "
                "smooth the targets there, and set label_smoothing_factor=0."
            )
        self.compiled = compiled_model(self.model) if self.compute_loss_func is None else None
        self.default_loss = DefaultLoss(self.label_smoothing)
        self.kind = TOKENS
        self.has_layer_losses = True
        self.counts_ignored = False  # the model was compiled with a loss that does not ignore labels of -100
        self.parameters = parameters_of(self.model.call if hasattr(self.model, "call") else self.model.__call__)
        has_loss = self.compiled is not None and (self.compiled.has_own_loss or self.compiled.loss is not None)
        self.takes_labels = "labels" in self.parameters and not has_loss
        own = () if self.compute_loss_func is None else parameters_of(self.compute_loss_func)
        self.takes_count = "num_items_in_batch" in own
        self.takes_weights = "sample_weight" in own
        # state of the pass that is being traced
        self._share: Share | None = None
        self._is_of_step = False
        self._is_prediction = False
        self._is_weighted = False
        self._taken: tuple[Any, list[Part]] | None = None

    def prepare(self, batch: tuple[Any, Any]) -> None:
        """Prepares a compiled model before it is traced, given an example batch on the host."""
        if self.compiled is not None:
            features, labels = batch
            self.compiled.build(lambda given: self.call(given, False, {}), features, split_weights(labels)[0])
            self.counts_ignored = counts_ignored(self.model.loss)

    def check_replicas(self, num_replicas: int, num_batches: int) -> None:
        """Checks a compiled loss with an unknown divisor, if an optimizer step consists of several parts.

        Raises:
            UnsupportedOption: there are several replicas, by whose number the loss may or may not be divided.
        """
        names = [] if self.compiled is None else self.compiled.opaque_losses()
        if names and num_replicas > 1:
            raise UnsupportedOption(
                f"{' and '.join(names)} of the model cannot be distributed over {num_replicas} replicas: its divisor "
                "is unknown. Pass compute_loss_func=(outputs, labels) -> loss, or compile a keras.losses.Loss "
                "that overrides call alone."
            )
        if names and num_batches > 1 and self.loss_weight is None:
            logger.warning(
                "%s of the model is treated as a mean over samples: the %d micro-batches of a step are weighted by "
                "their number of samples.",
                " and ".join(names),
                num_batches,
            )

    # ---- calling the model

    def begin(self, share: Share, is_prediction: bool = False, is_of_step: bool = False) -> None:
        """Sets the share of the batch before `run` is traced.

        Args:
            share: the batch's share of the optimizer step.
            is_prediction: without labels no loss is computed.
            is_of_step: nothing weights the loss, so `compute_loss_func` has to divide it for the whole optimizer step.
        """
        self._share = share
        self._is_prediction = is_prediction
        self._is_of_step = is_of_step
        self._is_weighted = False
        self._taken = None
        self.has_layer_losses = True

    def end(self) -> None:
        """Forgets the share: the loss of a call of `run` that no `begin` precedes has no counts or weights of it."""
        self._share = None

    def run(self, features: object, labels: object, training: bool, num_items: object = None) -> tuple[Any, Any]:
        """Returns (loss, outputs) of a batch; the loss is None without labels, unless the model computes one itself.

        The loss excludes `add_loss` and regularizers, unless a model's own `compute_loss` includes them.

        Args:
            features, labels: the batch, without sample weights.
            training: the mode of the model.
            num_items: targets of the whole optimizer step, for a `compute_loss_func` that has to divide by them.

        Raises:
            ValueError: an option cannot be applied to the loss of this model.
        """
        wanted = self.takes_labels and self.compute_loss_func is None
        given = {}
        if wanted and labels is not None:
            given = dict(labels) if isinstance(labels, Mapping) else {"labels": labels}
            self._refuse_smoothing()
        share = self._share
        outputs = self.call(features, training, given)
        self._share = share  # replicas share this object, and a layer that waits for the others lets them begin
        if wanted and given:
            return read_outputs(outputs)
        if self.compiled is not None and self.compiled.has_loss:
            return self._compiled_loss(features, labels, outputs, training), predictions_of(outputs)
        if labels is None:
            is_alone = training and getattr(self.model, "losses", None)
            return tf.constant(0.0) if is_alone else None, predictions_of(outputs)
        if self.compiled is not None and not training:  # with metrics and no loss
            weights = None if self._share is None else self._share.sample_weight
            self.compiled.update_metrics(features, labels, outputs, weights)
        return self.loss_of(outputs, labels, num_items), predictions_of(outputs)

    def _refuse_smoothing(self) -> None:
        if self.label_smoothing:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing}: the model takes `labels` and returns a loss of its "
                "own; smooth the targets there, or in a compute_loss_func, and set label_smoothing_factor=0."
            )

    def call(self, features: Any, training: bool, given: Mapping[str, Any]) -> Any:
        """Returns the model's outputs; a dict of features is passed as keywords if `call` has such parameters."""
        options = {**given, **({"training": training} if "training" in self.parameters else {})}
        if isinstance(features, Mapping):
            if set(features) <= set(self.parameters) and not is_functional(self.model):
                return self.model(**features, **options)
            if len(features) == 1 and not takes_names(self.model):
                return self.model(next(iter(features.values())), **options)
        return self.model(features, **options)

    def _compiled_loss(self, features: object, labels: object, outputs: object, training: bool) -> Any:
        """Returns Keras' loss of a batch, as a scalar; None if there is nothing to compute it from."""
        compiled, share = self.compiled, self._share
        assert compiled is not None
        assert share is not None
        if labels is None and (self._is_prediction or (compiled.loss is not None and not compiled.has_own_loss)):
            return None
        self._refuse_options()
        self._is_weighted = True
        if not training and labels is not None:
            compiled.update_metrics(features, labels, outputs, share.sample_weight)
        if compiled.loss is None and not compiled.has_own_loss and labels is not None:
            logger.warning(
                "compile() names no loss: as in fit, only the losses of layers (add_loss, regularizers) are minimized."
            )
        if compiled.has_own_loss:
            self.has_layer_losses = False
            return compiled.own_loss(features, labels, outputs, share.sample_weight, training)
        parts = compiled.parts(labels, outputs, share.sample_weight, share.own[SAMPLES], training)
        loss = tf.add_n([shown(part.total, part.divisor, part) for part in parts]) if parts else tf.constant(0.0)
        self._taken = loss, parts
        return loss

    def _refuse_options(self) -> None:
        if self.label_smoothing:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing}: the model was compiled with its own loss; set "
                "label_smoothing there, or leave one of them out."
            )
        assert self.compiled is not None
        if self.loss_weight is not None and not self.compiled.has_own_loss:
            raise ValueError(
                f"loss_weight={self.loss_weight!r}: the model was compiled with its own loss, which is divided as its "
                "reduction says. Leave loss_weight out."
            )

    def loss_of(self, outputs: object, labels: object, num_items: object) -> Any:
        """Returns the loss by `compute_loss_func`, by the compiled loss of a tf_keras model, or the default loss."""
        if self.compute_loss_func is not None:
            options = {"num_items_in_batch": self._count_to_divide_by(num_items)} if self.takes_count else {}
            if self.takes_weights:
                self._is_weighted = True
                options["sample_weight"] = None if self._share is None else self._share.sample_weight
            return self.compute_loss_func(outputs, single_precision(labels, outputs), **options)
        compiled = None if isinstance(self.model, keras.Model) else getattr(self.model, "loss", None)
        if compiled is not None and not callable(getattr(compiled, "numpy", None)):
            self.counts_ignored = counts_ignored(compiled)
            if self.label_smoothing:
                raise ValueError(f"label_smoothing_factor={self.label_smoothing}: set it in the compiled loss instead.")
            return foreign_loss(compiled, outputs, labels)
        return self._weighted(self.default_loss(predictions_of(outputs), labels))

    def _count_to_divide_by(self, num_items: object) -> Any:
        """Returns the `num_items_in_batch` of `compute_loss_func`.

        It is that of the batch, at least 1 (a batch without targets has no weight, and must not give NaN), so that the
        result is a mean whether the function divides by it or not. It is that of the optimizer step, `num_items`, if
        the loss is not weighted afterwards.
        """
        is_of_step = self._is_of_step or self.loss_weight == "scaled"
        if self._share is None or (is_of_step and num_items is not None):
            return num_items
        return tf.maximum(self._share.own[TOKENS], 1.0)

    def _weighted(self, losses: Any) -> Any:
        """Returns losses with an entry per target, multiplied by the sample weights."""
        weights = None if self._share is None else self._share.sample_weight
        if weights is None:
            return losses
        self._is_weighted = True
        weights = tf.cast(weights, losses.dtype)
        if weights.shape.rank > losses.shape.rank:
            weights = tf.squeeze(weights, -1)
        while weights.shape.rank < losses.shape.rank:
            weights = weights[..., None]
        return losses * weights

    def check_labels(self, labels: object) -> None:
        """Checks for labels that the loss would misinterpret; has an effect once the model was traced.

        Raises:
            ValueError: there is such a label.
        """
        self.default_loss.check(labels)
        if not self.counts_ignored:
            return
        for leaf in leaves(split_weights(labels)[0]):
            array = to_array(leaf)
            if array.dtype.kind == "i" and np.any(array == IGNORE_INDEX):
                raise ValueError(NO_IGNORE_INDEX)

    # ---- weighting the loss

    def divisors(self, features: object, labels: object, share: Share) -> Any:
        """Returns Keras' divisors of the compiled losses of a batch, float32 (number of losses,); traced."""
        assert self.compiled is not None
        outputs = self.call(features, False, {})
        parts = self.compiled.parts(labels, outputs, share.sample_weight, share.own[SAMPLES], True)
        if not parts:
            return tf.zeros([0])
        return tf.where(share.own[SAMPLES] > 0, tf.stack([part.divisor for part in parts]), 0.0)

    def take(self, loss: object, labels: object, share: Share) -> tuple[Any, Any]:
        """Returns a loss's contribution to its optimizer step as (value to differentiate, value to log), float32
        scalars.

        Args:
            loss: the result of `run`, or a custom loss: a scalar, or with an entry per sample, target or row.
            labels: the labels of the same batch.
            share: the batch's share of the optimizer step.

        Raises:
            ValueError: the loss has another shape, or ignores the batch's sample weights.
        """
        self.check_weights(share)
        if self._taken is None or loss is not self._taken[0]:
            part = self.weigh(loss, labels, share.own, share.totals, is_scaled=self.loss_weight == "scaled")
            return self.with_layers(part, part, share)
        totals = [part.divisor for part in self._taken[1]] if share.divisors is None else tf.unstack(share.divisors)
        pairs = list(zip(self._taken[1], totals, strict=True))
        there = share.own[SAMPLES] > 0
        derived = [part.total if part.is_summed else tf.math.divide_no_nan(part.total, total) for part, total in pairs]
        seen = [shown(part.total, total, part) for part, total in pairs]
        none = tf.constant(0.0)
        return self.with_layers(
            tf.where(there, sum(derived, none), none), tf.where(there, sum(seen, none), none), share
        )

    def with_layers(self, derived: object, seen: object, share: Share) -> tuple[Any, Any]:
        """Adds the layers' losses to both values, weighted by this batch's share of the optimizer step's samples."""
        extra = self.layer_losses()
        if extra is None:
            return derived, seen
        extra *= tf.math.divide_no_nan(share.own[SAMPLES], share.totals[SAMPLES])
        return derived + extra, seen + extra

    def layer_losses(self) -> Any:
        """Returns `add_loss` and regularizers of the traced pass, a float32 scalar; None without any."""
        found = getattr(self.model, "losses", None) if self.has_layer_losses else None
        return tf.add_n([tf.reduce_sum(tf.cast(item, tf.float32)) for item in found]) if found else None

    def check_weights(self, share: Share) -> None:
        """Checks that sample weights of the batch were used.

        Raises:
            ValueError: they were not.
        """
        if share.sample_weight is not None and not self._is_weighted:
            raise ValueError(
                "The batches hold weights of samples, (features, labels, sample_weight), which this loss does not use: "
                "compile the model with its loss, or give compute_loss_func a parameter `sample_weight`."
            )

    def measure(self, loss: object, labels: object, share: Share) -> dict[str, Any]:
        """Returns the sums over a replica's batch in an evaluation, as tensors for `mean_of`."""
        self.check_weights(share)
        found: dict[str, Any] = {}
        extra = self.layer_losses()
        if extra is not None:
            found["layers"] = extra * share.own[SAMPLES]
        if self._taken is None or loss is not self._taken[0]:
            found["sum"] = self.weigh(loss, labels, share.own, tf.ones([NUM_COUNTS]))
            return found
        for place, part in enumerate(self._taken[1]):
            form = "sum" if part.is_summed and not part.is_mean_shown else "mean"
            values = tf.stack([part.total, part.divisor])
            found[f"{form} {place}"] = tf.where(share.own[SAMPLES] > 0, values, tf.zeros_like(values))
        return found

    def weigh(self, loss: Any, labels: object, own: Any, totals: Any, is_scaled: bool = False) -> Any:
        """Returns a loss's contribution to its optimizer step, a float32 scalar.

        Args:
            loss: a scalar, or with an entry per sample, target or row.
            labels: the labels of the same batch.
            own: float32 (4,), the counts of this batch; all 0 for a dummy batch that only fills a replica.
            totals: float32 (4,), the counts of the optimizer step.
            is_scaled: a scalar is divided for the whole optimizer step already; otherwise it is a mean.

        Raises:
            ValueError: the loss has another shape.
        """
        loss = tf.cast(loss, tf.float32)
        is_scalar = loss.shape.rank == 0 or loss.shape.as_list() == [1]
        self.kind, mask = self.kind_of(loss, labels, is_scalar)
        if is_scalar:
            mean = tf.reshape(loss, [])
            part = mean if is_scaled else tf.math.divide_no_nan(mean * own[self.kind], totals[self.kind])
            # the mean over a batch without targets may be NaN
            return tf.where(own[self.kind] > 0, part, tf.zeros_like(part))
        if mask is not None:
            loss = tf.where(mask, loss, tf.zeros_like(loss))
        total = tf.math.divide_no_nan(tf.reduce_sum(loss), totals[self.kind])
        return tf.where(own[SAMPLES] > 0, total, tf.zeros_like(total))

    def kind_of(self, loss: Any, labels: Any, is_scalar: bool) -> tuple[int, Any]:
        """Returns the index of the count that divides a loss, and the mask of its entries that count (None: all).

        Raises:
            ValueError: the loss has an unsupported shape.
        """
        targets = main_labels(labels)
        if self.loss_weight in BY_NAME and is_scalar:
            return BY_NAME[str(self.loss_weight)], None
        if targets is None or (is_scalar and self.compiled is not None and self.compiled.has_own_loss):
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


def shown(total: object, divisor: object, part: Part) -> Any:
    """Returns the value of a compiled loss that Keras displays."""
    return total if part.is_summed and not part.is_mean_shown else tf.math.divide_no_nan(total, divisor)


def mean_of(replicas: Sequence[Mapping[str, Any]], own: float, size: int) -> tuple[float, float, float]:
    """Returns the loss of a batch in an evaluation, and its weight.

    Args:
        replicas: the results of `Objective.measure` on each replica, as numbers or arrays.
        own: the count of the batch in the unit over which its loss is a mean.
        size: samples in the batch.

    Returns: the mean without the layers' losses, its weight, and the layers' losses, which are weighted by samples.
    """
    added = {name: sum(replica[name] for replica in replicas) for name in replicas[0]}
    layers = float(added.pop("layers", 0.0)) / size
    if "sum" in added:
        return (float(added["sum"]) / own if own else 0.0), own, layers
    mean = 0.0
    for name, (total, divisor) in added.items():
        if name.startswith("sum"):
            mean += float(total)
        elif divisor:
            mean += float(total) / float(divisor)
    return mean, float(size), layers


def single_precision(labels: object, outputs: object) -> Any:
    """Returns float64 labels as float32, unless the model computes in float64."""
    if any(getattr(leaf, "dtype", None) == tf.float64 for leaf in tf.nest.flatten(outputs)):
        return labels
    return map_leaves(lambda leaf: tf.cast(leaf, tf.float32) if leaf.dtype == tf.float64 else leaf, labels)


def is_target(labels: object) -> Any:
    """Returns the mask of labels other than -100. The cast keeps 156 in uint8 labels from being taken for -100."""
    return tf.cast(labels, tf.int64) != IGNORE_INDEX


def check_model(model: object) -> None:
    """Checks that `model` is a TensorFlow model; None passes.

    Raises:
        TypeError: the object cannot be called, or its class has no `trainable_variables`.
    """
    if model is not None and not (callable(model) and hasattr(type(model), "trainable_variables")):
        raise TypeError(
            f"`model` is {type(model).__name__}; a Keras model or a callable tf.Module is needed (for a module of "
            "torch: paceline.Trainer, with TrainingArguments)."
        )


def build_by_itself(model: Any) -> None:
    """Creates the variables of a TF model of transformers, under the names that its checkpoints use."""
    build = getattr(model, "build_in_name_scope", None)
    if callable(build) and not model.built:
        build()


def parameters_of(function: Any) -> tuple[str, ...]:
    """Returns the names of a function's parameters; empty if it has no readable signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def takes_names(model: object) -> bool:
    """True if a Keras model's inputs are a dict."""
    return isinstance(getattr(model, "input", None) if is_functional(model) else None, Mapping)


def is_functional(model: object) -> bool:
    """True if a model defines its inputs, as a functional or sequential model does."""
    try:
        return getattr(model, "input", None) is not None
    except (AttributeError, ValueError):  # Keras raises if a model has not been called yet
        return False


def shifts(model: Any) -> bool:
    """True if a TF model of transformers compares each output with the next label: causal language models."""
    names = {kind.__name__ for kind in type(model).__mro__}
    return "TFCausalLanguageModelingLoss" in names and not getattr(model.config, "is_encoder_decoder", False)


def read_outputs(outputs: object) -> tuple[Any, Any]:
    """Returns (loss, predictions) from the outputs of a model that was called with labels."""
    if isinstance(outputs, Mapping):
        return outputs["loss"], predictions_of({name: value for name, value in outputs.items() if name != "loss"})
    if isinstance(outputs, tuple | list) and len(outputs) > 1:
        return outputs[0], outputs[1]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs, None


def predictions_of(outputs: object) -> Any:
    """Returns the predictions among a model's outputs: the entry `logits` if there is one, else all outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", dict(outputs))
    return outputs


def foreign_loss(loss: Any, outputs: Any, labels: Any) -> Any:
    """Returns the value of a tf_keras model's compiled loss, with one entry per sample or row.

    Raises:
        ValueError: the model was compiled with several losses.
    """
    if isinstance(loss, Mapping | list | tuple):
        raise ValueError("A model compiled with several losses: pass compute_loss_func=(outputs, labels) -> loss.")
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    return (function.call if hasattr(function, "call") else function)(main_labels(labels), predictions_of(outputs))


def counts_ignored(loss: object) -> bool:
    """True if a compiled loss is one of Keras' own that counts labels of -100; a user's own loss gives False."""
    if isinstance(loss, Mapping | list | tuple):
        return any(map(counts_ignored, leaves(loss)))
    if not isinstance(loss, str) and not (getattr(loss, "__module__", None) or "").startswith(("keras.", "tf_keras.")):
        return False
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return bool(config.get("ignore_class") != IGNORE_INDEX)
