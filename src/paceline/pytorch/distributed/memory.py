"""Training memory of a model on one process, in bytes: its parameters, their gradients, and the optimizer's state.

The sizes are counted after the strategy has prepared the model, so that shards, replicas and frozen parts count with
their true size. FakeTensors count as the tensors that they represent. Parameters on the device "meta" belong to
pipeline stages of other processes, and are not counted; neither are activations.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.training_memory import Memory
from paceline.pytorch.model.tensor_parts import local_part


def count_memory(model: nn.Module, optimizer: object) -> Memory:
    """Returns the memory that a model prepared by the strategy takes on this process."""
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    largest = max((total([parameter]) for parameter in trained), default=0)
    return Memory(
        parameters=total([*parameters, *model.buffers()]),
        gradients=largest if callable(getattr(optimizer, "fused_backward", None)) else total(trained),
        optimizer=count_state(optimizer),
        largest_gradient=largest,
    )


def count_state(optimizer: Any) -> int | None:
    """Returns the bytes of an optimizer's state; before its first step, found by a step on tensors without data.

    Returns None for optimizers that are not torch's own, and for those whose step reads values.
    """
    state = getattr(optimizer, "state", None)
    if state:
        return total(value for entry in state.values() for value in tensors_of(entry))
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    rehearsed = copy.copy(optimizer)
    vars(rehearsed).pop("step", None)  # a scheduler's wrapper, bound to the original optimizer
    rehearsed.state, rehearsed.param_groups = defaultdict(dict), []
    rehearsed._optimizer_step_pre_hooks, rehearsed._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if parameter.requires_grad and not parameter.is_meta]
        shadows = list(map(shadow, own))
        rehearsed.param_groups.append({**group, "params": shadows, "fused": False, "foreach": False})
    try:
        rehearsed.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # the step reads values
        return None
    return total(value for entry in rehearsed.state.values() for value in tensors_of(entry))


def shadow(parameter: Tensor) -> nn.Parameter:
    """Returns a parameter of the same local size, with a gradient, both without data."""
    like = torch.empty_like(local_part(parameter), device="meta")
    made = nn.Parameter(like)
    made.grad = torch.empty_like(like)
    return made


def tensors_of(entry: object) -> list[Tensor]:
    """Returns the tensors of one parameter's state."""
    values = entry.values() if isinstance(entry, dict) else (entry,)
    return [value for value in values if isinstance(value, Tensor)]


def total(tensors: Iterable[Tensor]) -> int:
    """Returns the total bytes of this process's shards of the tensors; each tensor is counted once."""
    held = {id(tensor): local_part(tensor) for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())
