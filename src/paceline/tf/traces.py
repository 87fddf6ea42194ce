"""Which batches the functions of an update were traced with, in order: a resumed run traces them with the same first.

TensorFlow compiles a function for the shapes of its first call, and for shapes that are left open once a call has
others. Both compute the same, but where shapes are known, two passes of the graph optimizer (constant folding and
arithmetic optimization; without both, all bits are equal) make constants of them and multiply in another order. Which
of the graphs an update gets depends on all the calls before it: a run that begins in the middle would get others than
the run it goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.resuming import is_same
from paceline.tf.batches import is_list_of_arrays
from paceline.tf.framework import tf

if TYPE_CHECKING:
    from paceline.tf.engine import TFEngine

logger = logging.getLogger(__name__)

# what decides the shapes of the batches; with another value the run is no longer that of the checkpoint
SHAPING = ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size")


def describe(nest: Any) -> Any:
    """The nest of a batch, with the shape and dtype of each leaf; JSON-able."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {"dict": [[name, describe(value)] for name, value in nest.items()]}
    if isinstance(nest, tuple):
        return {"tuple": [describe(value) for value in nest]}
    if is_list_of_arrays(nest):
        return {"list": [describe(value) for value in nest]}
    tensor = tf.convert_to_tensor(nest)
    return {"shape": list(tensor.shape), "dtype": tensor.dtype.name}


def blank(description: Any) -> Any:
    """A batch of zeros that `describe` describes so."""
    if description is None:
        return None
    if "dict" in description:
        return {name: blank(value) for name, value in description["dict"]}
    if "tuple" in description:
        return tuple(blank(value) for value in description["tuple"])
    if "list" in description:
        return [blank(value) for value in description["list"]]
    return tf.zeros(description["shape"], description["dtype"])


def trace_again(engine: TFEngine, args: Any, progress: Mapping[str, Any]) -> None:
    """Trace the functions of an engine as those of the run were that wrote `progress`; no variable changes.

    Nothing is done where the batches have another size now. What cannot be traced any more is told, and left.
    """
    before, now = progress.get("arguments") or {}, args.to_sanitized_dict()
    traces = progress.get("traces") or {}
    if traces.get("num_replicas") != engine.num_replicas:
        return
    if not all(name in before and is_same(before[name], now[name]) for name in SHAPING):
        return
    try:
        for trace in traces["calls"]:
            engine.trace(trace["function"], blank(trace["batch"]), trace["with_outputs"])
    except Exception as error:  # of the model's own code, given what it is no longer made for
        logger.warning(
            "The update could not be traced as it was in the run before (%s: %.200s): its numbers may differ from "
            "those of a run without a stop in their last bits.",
            type(error).__name__,
            error,
        )
        engine.compile()
