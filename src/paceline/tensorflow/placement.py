"""Places batches on the replicas of a strategy, with the counts that weight each part, and gathers their outputs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from paceline.tensorflow.data.batches import Array, map_leaves, share_out
from paceline.tensorflow.devices import cluster_of
from paceline.tensorflow.framework import tf
from paceline.tensorflow.objective import NUM_COUNTS, SAMPLES, count


def place(strategy: Any, batch: Any, totals: Array | None) -> tuple[Any, Any, Any]:
    """Returns a batch on the replicas of a strategy: features, labels, and float32 (2, 4) counts of part and total.

    Args:
        strategy: the strategy of the run.
        batch: (features, labels) on the host.
        totals: counts of the optimizer step; the batch is split over the replicas of all workers. None: the batch is
            split over this process's replicas, and sums are not divided.
    """
    of_all = np.ones(NUM_COUNTS) if totals is None else totals
    if strategy.num_replicas_in_sync == 1:
        features, labels = map_leaves(as_tensor, batch)
        return features, labels, tf.constant(np.stack([count(*batch), of_all]), tf.float32)
    num_local = len(strategy.extended.worker_devices)
    first = cluster_of(os.environ.get("TF_CONFIG"))[1] * num_local
    if totals is None:
        parts = share_out(batch, num_local)
    else:
        parts = share_out(batch, int(strategy.num_replicas_in_sync))[first : first + num_local]
    flat = []
    for part, size in parts:
        weights = np.stack([count(*part) if size else np.zeros(NUM_COUNTS), of_all])
        flat.append([*map(as_tensor, tf.nest.flatten(part)), tf.constant(weights, tf.float32)])
    spread = [
        None if flat[0][number] is None else strategy.experimental_distribute_values_from_function(
            lambda context, number=number: flat[context.replica_id_in_sync_group - first][number]
        )
        for number in range(len(flat[0]))
    ]  # fmt: skip
    features, labels = tf.nest.pack_sequence_as(parts[0][0], spread[:-1])
    return features, labels, spread[-1]


def gather(strategy: Any, outputs: object, counts: Any) -> Any:
    """Returns the concatenated outputs of the replicas of this process that have samples of their own; traced.

    Args:
        strategy: the strategy of the run.
        outputs: a nest, with tensors of each replica as leaves.
        counts: the counts of each replica, as `place` gives them.
    """
    local = strategy.experimental_local_results
    ends = [tf.where(own[0, SAMPLES] > 0, tf.int32.max, 0) for own in local(counts)]

    def join(leaf: Any) -> Any:
        return tf.concat([part[:end] for part, end in zip(local(leaf), ends, strict=True)], 0)

    return tf.nest.map_structure(join, outputs)


def as_tensor(leaf: object) -> Any:
    """Returns a leaf as a tensor; None and ragged or sparse tensors are unchanged."""
    is_composite = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
    return leaf if leaf is None or is_composite else tf.convert_to_tensor(leaf)
