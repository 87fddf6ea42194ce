"""Lines of the header of a run with TensorFlow."""

from __future__ import annotations

from typing import Any

from paceline.core.headlines import optimizer_line
from paceline.core.training_memory import Memory
from paceline.tensorflow.checkpoint.variables import num_bytes, optimizer_variables


def describe_parts(model: Any, optimizer: Any, rate: float, schedule: str) -> list[str]:
    """Returns the lines about the optimizer, and about the memory that is known before a step.

    Args:
        model: the model, whose variables exist.
        optimizer: the optimizer, whose variables exist.
        rate: the learning rate after warm-up.
        schedule: the name of the schedule.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scale
    sizes = [num_bytes([variable]) for variable in model.trainable_variables]
    memory = Memory(
        parameters=num_bytes(model.variables),
        gradients=sum(sizes),
        optimizer=num_bytes(optimizer_variables(optimizer)),
        largest_gradient=max(sizes, default=0),
    )
    return [optimizer_line(type(inner).__name__, [rate], schedule), f"memory     {memory.describe()}"]
