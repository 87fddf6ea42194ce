"""Records the batches with which the functions of a step were traced, so that a resumed run repeats the traces.

TensorFlow compiles a function for the shapes of its first call, and again with open shapes once a call has other
shapes. Both graphs compute the same, but not to the bit: with known shapes, two passes of the graph optimizer (constant
folding and arithmetic optimization; without both, all bits are equal) turn them into constants and multiply in another
order. Which graph an optimizer step uses depends on all earlier calls, so that a resumed run would use other graphs
than the original run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.checkpoint.resuming import is_same
from paceline.tensorflow.data.batches import Weighted, is_list_of_arrays
from paceline.tensorflow.framework import tf

logger = logging.getLogger(__name__)

# With `reduce_retracing`, a dimension that differs is left open: batches of one structure and dtypes have at most one
# trace more than they have dimensions. If keys or dtypes keep changing, there is no such bound.
MAX_TRACES = 256  # limit of recorded traces; repeating this many takes minutes

# settings that determine the shapes of batches; if one has changed, traces are not repeated
SHAPING = ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size")


def describe(nest: Any) -> Any:
    """Returns the structure of a batch, with the shape and dtype of each leaf, JSON-serializable."""
    if nest is None:
        return None
    if isinstance(nest, Mapping):
        return {"dict": [[name, describe(value)] for name, value in nest.items()]}
    if isinstance(nest, Weighted):
        return {"weighted": [describe(value) for value in nest]}
    if isinstance(nest, tuple):
        return {"tuple": [describe(value) for value in nest]}
    if is_list_of_arrays(nest):
        return {"list": [describe(value) for value in nest]}
    tensor = tf.convert_to_tensor(nest)
    return {"shape": list(tensor.shape), "dtype": tensor.dtype.name}


def blank(description: Any) -> Any:
    """Returns a batch of zeros with this description."""
    if description is None:
        return None
    if "dict" in description:
        return {name: blank(value) for name, value in description["dict"]}
    if "weighted" in description:
        return Weighted(*map(blank, description["weighted"]))
    if "tuple" in description:
        return tuple(blank(value) for value in description["tuple"])
    if "list" in description:
        return [blank(value) for value in description["list"]]
    return tf.zeros(description["shape"], description["dtype"])


def record(traces: list[dict[str, Any]], trace: dict[str, Any]) -> None:
    """Appends a trace to `traces`; the first `MAX_TRACES` are kept, since a run starts with them."""
    if len(traces) == MAX_TRACES:
        return
    traces.append(trace)
    if len(traces) == MAX_TRACES:
        logger.warning(
            "The optimizer step was compiled for %d structures of batches. No further ones are recorded in "
            "checkpoints: the numbers of a resumed run may differ in their last bits. Give all batches the same keys "
            "and dtypes.",
            MAX_TRACES,
        )


class Traceable(Protocol):
    """An engine with compiled functions.

    Attributes:
        num_replicas: number of replicas that share an optimizer step.
    """

    num_replicas: int

    def trace(self, *args: Any, **kwargs: Any) -> Any: ...

    def compile(self) -> None: ...


def trace_again(engine: Traceable, arguments: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    """Traces the functions of an engine as the run that wrote `progress` did, without changing variables.

    Does nothing if the number of replicas or an option of `SHAPING` has changed. If a trace fails, a warning is logged
    and all traces are dropped.

    Args:
        engine: the engine of the run.
        arguments: the current options by name, as plain values.
        progress: contents of `progress.json`.
    """
    before = progress.get("arguments") or {}
    traces = progress.get("traces") or {}
    if traces.get("num_replicas") != engine.num_replicas:
        return
    if not all(name in before and is_same(before[name], arguments[name]) for name in SHAPING):
        return
    try:
        for trace in traces["calls"]:
            engine.trace(
                trace["function"], blank(trace["batch"]), trace["with_outputs"], trace.get("is_divided", False)
            )
    except Exception as error:  # errors of the model's own code, for shapes it no longer supports
        logger.warning(
            "The optimizer step could not be traced as in the run before (%s: %.200s): its numbers may differ from "
            "those of a run without a stop in their last bits.",
            type(error).__name__,
            error,
        )
        engine.compile()
