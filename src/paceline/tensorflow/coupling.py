"""A check that a loss is a sum over samples, before optimizer steps are split into several parts.

It detects in-batch negatives, Dice over a whole batch, or a mean over something else than samples. No weights make the
parts of such a batch add up to the loss of the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.tensorflow.checkpoint.variables import undone
from paceline.tensorflow.data.batches import map_leaves, rows, size_of, split_weights, to_array
from paceline.tensorflow.framework import tf
from paceline.tensorflow.objective import NUM_COUNTS, TOKENS, Objective, Share, count

logger = logging.getLogger(__name__)

# relative; far above the rounding error of a sum in float32, and in 16 bits
TOLERANCE, HALF_TOLERANCE = 2e-5, 3e-2


OF_STEP = (
    "An optimizer step of %d parts (micro-batches x replicas) is that of its parts, not of the whole batch. Use "
    "gradient_accumulation_steps=1 on one replica, or a loss with an entry per sample."
)
OF_EVALUATION = (
    "The loss of an evaluation of %d or more parts (batches x replicas) depends on the size of its batches. Use a loss "
    "with an entry per sample."
)


class CouplingCheck:
    """Checks batches 1, 2, 4, 8, ... of a run or an evaluation, until a warning: one without a target that is left out
    shows nothing.

    The passes that this takes change no variable and no random number of the run.

    Args:
        remedy: the end of the warning, with a place for the number of parts.
    """

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy
        self.num_seen = 0
        self._is_told = False

    def see(self, objective: Objective, batches: Sequence[Any], num_parts: int) -> None:
        """Checks the batches of an optimizer step, or of an evaluation so far, if their number is due.

        Args:
            objective: prepared for batches like these.
            batches: (features, labels) on the host.
            num_parts: micro-batches times replicas of an optimizer step.
        """
        self.num_seen += 1
        if self._is_told or self.num_seen & (self.num_seen - 1):
            return
        batch = choose(batches)
        if batch is not None:
            with undone(objective.model):  # a resumed run makes these passes at other steps
                self._is_told = is_coupled(objective, batch, num_parts, self.remedy)


def choose(batches: Sequence[Any]) -> Any:
    """Returns the batch of several samples with the fewest targets per sample; of single samples, two as one batch."""
    several = [batch for batch in batches if size_of(batch[0]) > 1]
    if several:
        return min(several, key=lambda batch: count(*batch)[TOKENS] / size_of(batch[0]))
    return join(*batches[:2]) if len(batches) > 1 else None


def join(first: Any, second: Any) -> Any:
    """Returns two batches as one; None if their shapes differ."""
    try:
        return tf.nest.map_structure(lambda *both: np.concatenate([to_array(leaf) for leaf in both]), first, second)
    except (ValueError, TypeError):
        return None


def is_coupled(objective: Objective, batch: tuple[Any, Any], num_parts: int, remedy: str) -> bool:
    """Warns, and returns True, if the loss of a batch differs from the sum over two parts of it.

    Costs one forward pass in inference mode. A loss that normalizes itself, or that the model computes, is not checked.

    Args:
        objective: prepared for batches like this one.
        batch: (features, labels) on the host.
        num_parts: micro-batches times replicas of an optimizer step.
        remedy: the end of the warning, with a place for `num_parts`.
    """
    features, labels = batch
    size = size_of(features)
    names = names_of(objective)
    if not names or labels is None or size < 2:
        return False
    features, labels = map_leaves(tf.convert_to_tensor, features), map_leaves(tf.convert_to_tensor, labels)
    outputs = objective.call(features, False, {})
    is_half = any(leaf.dtype.size < 4 for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf))
    tolerance = HALF_TOLERANCE if is_half else TOLERANCE
    whole = loss_sum(objective, features, labels, outputs, 0, size)
    for cut in sorted({1, size // 2}):  # two cuts, since the parts may agree by chance at one
        first = loss_sum(objective, features, labels, outputs, 0, cut)
        second = loss_sum(objective, features, labels, outputs, cut, size)
        scale = max(abs(whole), abs(first), abs(second))
        if math.isfinite(whole) and not abs(whole - first - second) <= tolerance * scale:
            warn(names, size, cut, (whole / size, (first + second) / size), num_parts, remedy)
            return True
    return False


def warn(names: list[str], size: int, cut: int, means: tuple[float, float], num_parts: int, remedy: str) -> None:
    """Warns that the loss of `size` samples is `means[0]` as a whole, and `means[1]` when split in two."""
    logger.warning(
        "%s couples the samples of a batch, or is a mean over something else than its samples: on %d samples it is "
        "%.6g, and by the first %d and the others apart %.6g. " + remedy,
        " and ".join(names),
        size,
        means[0],
        cut,
        means[1],
        num_parts,
    )


def names_of(objective: Objective) -> list[str]:
    """Returns the names of the losses that can be checked: those computed from outputs and labels alone."""
    compiled = objective.compiled
    if objective.compute_loss_func is not None:
        name = getattr(objective.compute_loss_func, "__name__", "compute_loss_func")
        return [] if objective.loss_weight == "scaled" else [name]
    if compiled is None or compiled.loss is None or compiled.has_own_loss:
        return []
    losses = [one.loss for one in getattr(compiled.loss, "_flat_losses", None) or () if one.loss is not None]
    return sorted({getattr(loss, "name", None) or type(loss).__name__ for loss in losses})


def loss_sum(objective: Objective, features: object, labels: object, outputs: object, start: int, stop: int) -> float:
    """Returns the undivided contribution of the rows `start:stop` to the loss of an optimizer step."""
    size = size_of(features)
    labels = rows(labels, start, stop)
    counts = count(rows(features, start, stop), map_leaves(lambda leaf: leaf.numpy(), labels))
    own = tf.constant(counts, tf.float32)
    labels, weights = split_weights(labels)
    part = tf.nest.map_structure(lambda leaf: rows_of_output(leaf, start, stop, size), outputs)
    compiled = objective.compiled
    if compiled is not None:
        return float(sum(one.total for one in compiled.parts(labels, part, weights, own[0], True)))
    objective.begin(Share(own, tf.ones([NUM_COUNTS]), weights))
    loss = objective.loss_of(part, labels, None)
    objective.end()
    return float(objective.weigh(loss, labels, own, tf.ones([NUM_COUNTS])))


def rows_of_output(leaf: Any, start: int, stop: int, size: int) -> Any:
    """Returns rows of one output with their Keras mask; an output without a row per sample is returned whole."""
    if not tf.is_tensor(leaf) or leaf.shape.rank == 0 or leaf.shape[0] != size:
        return leaf
    part = leaf[start:stop]
    mask = getattr(leaf, "_keras_mask", None)
    if mask is not None:
        part._keras_mask = mask[start:stop]
    return part
