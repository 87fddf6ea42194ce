"""Losses and metrics of a compiled Keras model, with Keras' own reduction.

Keras' own code computes a compiled loss, so that dtypes, ranks, masks, weights of samples and of losses, `add_loss` and
regularizers are as in `fit` and `evaluate`. The loss is split into a sum and Keras' divisor, so that the parts of a
batch (micro-batches, replicas) add up to Keras' loss of the whole batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.optional import require
from paceline.tensorflow.data.batches import map_leaves, to_array
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)

SUMS = ("sum", None, "none")  # reductions without a divisor


@dataclass(frozen=True)
class Part:
    """One compiled loss of a batch, or of a replica's part of it.

    Attributes:
        total: the sum of the weighted entries, times the loss weight; a float32 scalar.
        divisor: Keras' divisor of that sum; a float32 scalar.
        is_summed: Keras differentiates the sum, without dividing it.
        is_mean_shown: Keras shows the mean in its progress bar and `evaluate`, as it does for unreduced losses.
    """

    total: Any
    divisor: Any
    is_summed: bool
    is_mean_shown: bool


class CompiledModel:
    """The compiled losses and metrics of a Keras 3 model, or its own `compute_loss`.

    Args:
        model: a Keras 3 model.

    Attributes:
        has_own_loss: the model's class overrides `compute_loss`, whose value is used unchanged.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
        self.loss = getattr(model, "_compile_loss", None)
        self.metrics = getattr(model, "_compile_metrics", None)
        self._is_built = False
        self._is_updated = False  # a function was traced that updates the metrics

    @property
    def has_loss(self) -> bool:
        """True if the model has a compiled loss, or a layer adds one; the latter is known once the model was called."""
        return self.has_own_loss or self.loss is not None or bool(self.model.losses)

    def opaque_losses(self) -> list[str]:
        """Returns the names of user-defined methods that reduce a loss themselves, so that its divisor is unknown."""
        if self.has_own_loss:
            return [f"{type(self.model).__name__}.compute_loss"]
        kinds = {type(one.loss) for one in getattr(self.loss, "_flat_losses", None) or ()}
        return [f"{kind.__name__}.__call__" for kind in kinds if kind.__call__ is not keras.Loss.__call__]

    def build(self, call: Callable[[Any], Any], features: Any, labels: Any) -> None:
        """Lets Keras match losses and metrics with the outputs, and create the variables of its metrics.

        Args:
            call: features -> outputs of the model.
            features, labels: a batch on the host; only its structure, shapes and dtypes matter.
        """
        if self._is_built or labels is None:
            return
        self._is_built = True
        parts = (self.loss, self.metrics)
        if all(part is None or part.built for part in parts):
            return
        compute_spec = require("keras.src.backend", "tf").compute_output_spec
        features, labels = map_leaves(spec_of, features), map_leaves(spec_of, labels)
        outputs = compute_spec(call, features)
        if self.loss is not None and not self.loss.built:
            compute_spec(self.loss, labels, outputs)
        if self.metrics is not None and not self.metrics.built:
            compute_spec(self.model.compute_metrics, features, labels, outputs)

    # ---- the loss, traced

    def parts(
        self, labels: object, outputs: object, sample_weight: object, num_samples: object, training: bool
    ) -> list[Part]:
        """Returns the compiled losses of a batch, without `add_loss` and regularizers.

        Args:
            labels, outputs, sample_weight: as Keras takes them.
            num_samples: a float32 scalar.
            training: False in an evaluation, which on one replica also updates the metrics of each output's loss.
        """
        found: list[Part] = []
        if self.loss is None or labels is None:
            return found
        if not self.loss.built:
            raise ValueError("The model's losses are not matched with its outputs: `build` comes before `parts`.")
        is_shown = not training and bool(self.loss.metrics) and num_replicas() == 1
        taken = twin(self.loss)
        taken._metrics = [None] * len(self.loss._flat_losses)  # zipped with the losses
        taken._flat_losses = [
            one._replace(loss=Taking(one.loss, one.loss_weights, num_samples, found, metric), loss_weights=None)
            for one, metric in zip(
                self.loss._flat_losses, self.loss.metrics if is_shown else taken._metrics, strict=True
            )
        ]
        taken(labels, outputs, sample_weight)
        return found

    def own_loss(self, features: Any, labels: Any, outputs: Any, sample_weight: Any, training: bool) -> Any:
        """Returns the value of the model's own `compute_loss`, a float32 scalar."""
        loss = self.model._compute_loss(
            x=features, y=labels, y_pred=outputs, sample_weight=sample_weight, training=training
        )
        return tf.reduce_mean(tf.cast(loss, tf.float32))

    # ---- metrics

    def reset_metrics(self) -> None:
        """Resets the model's metrics."""
        self.model.reset_metrics()

    def update_metrics(self, features: Any, labels: Any, outputs: Any, sample_weight: Any) -> None:
        """Adds a batch to the compiled metrics; traced.

        They stay empty on several replicas, where a batch may hold filler samples that Keras' metrics would count.
        """
        if num_replicas() == 1:
            self._is_updated = True
            self.model.compute_metrics(features, labels, outputs, sample_weight=sample_weight)
        elif self.metrics is not None:
            logger.warning("Metrics of compile() are left out on several replicas: pass compute_metrics.")

    def read_metrics(self, has_labels: bool = True) -> dict[str, Any]:
        """Returns the model's metrics since their reset, including the losses of several outputs, by Keras' names.

        Args:
            has_labels: a batch since the reset had labels. Without any, or with a `run_model` that does not update the
                metrics, only those are returned that layers have updated: the others are 0 since the reset.
        """
        if has_labels and self._is_updated:
            results: Mapping[str, Any] = self.model.get_metrics_result()
        else:
            updated = [each for each in self.model.metrics if any(np.any(to_array(value)) for value in each.variables)]
            results = {each.name: each.result() for each in updated}
        return {name: to_array(value) for name, value in results.items() if name != "loss"}


class Taking:
    """Replaces one loss in a compiled loss: computes it and records its sum and its divisor.

    Args:
        loss: a `keras.Loss`.
        weight: factor of the loss; None means 1.
        num_samples: number of samples in the batch, a float32 scalar.
        found: receives the `Part`.
        metric: receives the loss, weighted by the number of samples; None if it is not shown.
    """

    def __init__(self, loss: Any, weight: float | None, num_samples: Any, found: list[Part], metric: Any) -> None:
        self.loss = loss
        self.weight = weight
        self.num_samples = num_samples
        self.found = found
        self.metric = metric

    def __call__(self, labels: Any, outputs: Any, sample_weight: Any = None) -> Any:
        """Returns the reduced loss, without its weight."""
        total, divisor = self.take(labels, outputs, sample_weight)
        reduction = self.loss.reduction
        value = total if reduction == "sum" else tf.math.divide_no_nan(total, divisor)
        if self.metric is not None:
            self.metric.update_state(value, sample_weight=self.num_samples)
        weighted = total if self.weight is None else total * self.weight
        self.found.append(Part(weighted, divisor, reduction in SUMS, reduction in (None, "none")))
        return value

    def take(self, labels: Any, outputs: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns the sum of the weighted entries and Keras' divisor of that sum: float32 scalars.

        Keras computes the unreduced entries. The divisor is found by letting Keras reduce ones in their place.
        """
        if type(self.loss).__call__ is not keras.Loss.__call__:  # the loss reduces itself, presumably to a mean
            return self._as_mean(self.loss(labels, outputs, sample_weight))
        seen: list[Any] = []

        def entries(labels: Any, outputs: Any) -> Any:
            seen.append(self.loss.call(labels, outputs))
            return seen[0]

        def ones(labels: object, outputs: object) -> Any:
            one = tf.ones_like(seen[0])
            if getattr(seen[0], "_keras_mask", None) is not None:
                one._keras_mask = seen[0]._keras_mask
            return one

        weighted = twin(self.loss, call=entries, reduction=None)(labels, outputs, sample_weight)
        if seen[0].shape.rank == 0:  # the loss function itself has reduced
            return self._as_mean(tf.reduce_mean(weighted))
        total = tf.cast(tf.reduce_sum(weighted), tf.float32)
        if self.loss.reduction in SUMS:
            return total, tf.cast(tf.size(weighted), tf.float32)
        weights = sample_weight if self.loss.reduction == "mean_with_sample_weight" else None
        number = tf.reduce_sum(twin(self.loss, call=ones, reduction=None)(labels, outputs, weights))
        one = twin(self.loss, call=ones)(labels, outputs, weights)
        one *= num_replicas()  # undoes Keras' division by the number of replicas
        return total, tf.cast(tf.math.divide_no_nan(number, one), tf.float32)

    def _as_mean(self, value: object) -> tuple[Any, Any]:
        return tf.cast(value, tf.float32) * self.num_samples, self.num_samples


def compiled_model(model: object) -> CompiledModel | None:
    """Returns the compiled losses and metrics of a Keras 3 model; None for others, and for models without compile()."""
    if not isinstance(model, keras.Model):
        return None
    found = CompiledModel(model)
    return found if found.has_own_loss or model.compiled else None


def num_replicas() -> int:
    """Returns the number of replicas of the current strategy."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def twin(item: object, **changes: Any) -> Any:
    """Returns a shallow copy of an object with some attributes replaced."""
    copy = object.__new__(type(item))
    copy.__dict__.update(vars(item), **changes)
    return copy


def spec_of(leaf: object) -> Any:
    """Returns the shape and dtype of a leaf as a `KerasTensor`."""
    array = to_array(leaf)
    return keras.KerasTensor(array.shape, keras.backend.standardize_dtype(array.dtype))
