"""Short runs on the Trainer's own model and data, whose effects are undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.args.errors import UnsupportedOption
from paceline.args.places import WITHOUT_OUTPUT
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import SingleDevice

OPTIONS: dict[str, Any] = {
    **WITHOUT_OUTPUT,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "logging_strategy": "no",
    "push_to_hub": False,
    "auto_find_batch_size": False,
    "nonfinite_policy": "warn",
}


def check_one_process(method: str, strategy: SingleDevice) -> None:
    """Raises UnsupportedOption if there are several processes; `method` is the Trainer's method that was called."""
    if strategy.world.is_distributed:
        raise UnsupportedOption(
            f"{method} runs on one process, and there are {strategy.world.world_size}. Run it on one, with "
            "gradient_accumulation_steps for the same global batch size."
        )


@contextmanager
def unchanged(model: nn.Module, optimizer: Any, data: Any) -> Iterator[None]:
    """Restores on exit trained parameters, buffers, modes, optimizer state, data position and random generators."""
    held = [tensor for tensor in model.parameters() if tensor.requires_grad]
    values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in [*held, *model.buffers()]]
    modes = [(module, module.training) for module in model.modules()]
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    position = data.state_dict() if can_rewind(data) else None
    try:
        with preserved_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
        if optimizer is not None:
            optimizer.load_state_dict(state)
        if position is not None:
            data.load_state_dict(position)
        clear_gradients(model)


def can_rewind(data: object) -> bool:
    """Returns True if a dataset can save and restore its position."""
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def clear_gradients(model: nn.Module) -> None:
    """Drops all gradients."""
    for parameter in model.parameters():
        parameter.grad = None
