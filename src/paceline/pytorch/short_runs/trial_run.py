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
from paceline.pytorch.data.stream import start_of
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.probes.side_effects import frozen_that_may_change, undoing

OPTIONS: dict[str, Any] = {
    **WITHOUT_OUTPUT,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "logging_strategy": "no",
    "log_flops": False,
    "gradient_noise_scale": False,
    "data_map": False,
    "loss_by_source": None,
    "log_token_metrics": False,
    "ema_decay": None,
    "ema_warmup": True,
    "swa_start": None,
    "swa_lr": None,
    "swa_anneal_steps": 0,
    "average_steps": None,
    "average_device": "model",
    "batch_size_warmup": None,
    "sequence_length_warmup": None,
    "phases": None,
    "disable_tqdm": True,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
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
    """Restores everything that training changes on exit.

    These are trained parameters, frozen ones that forward may change, gradients, buffers, training modes, plain
    attributes of modules (counters), optimizer state, the position of the data and the random generators. Copies are
    held in host memory.
    """
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    parameters = [(tensor, on_host(tensor)) for tensor in (*trained, *frozen_that_may_change(model))]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # a forward pass may assign another tensor to the name of a buffer
    buffers = [
        (module, name, tensor, None if tensor is None else on_host(tensor))
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    modes = [(module, module.training) for module in model.modules()]
    state = None if optimizer is None else on_host(copy.copy(optimizer.state_dict()))
    position = start_of(data) if can_rewind(data) else None
    clear_gradients(model)
    try:
        with preserved_rng(), undoing([model]):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in parameters:
                tensor.copy_(value)
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        for module, mode in modes:
            module.training = mode
        if optimizer is not None:
            optimizer.load_state_dict(state)
        if position is not None:
            data.load_state_dict(position)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def on_host(value: Any) -> Any:
    """Returns a copy of a value whose tensors are in host memory; dicts, lists and tuples are copied with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return copy.deepcopy(value)


def can_rewind(data: object) -> bool:
    """Returns True if a dataset can save and restore its position."""
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def check_rereadable(method: str, data: object) -> None:
    """Raises UnsupportedOption for a stream that can be read only once, whose samples would be missing later."""
    if isinstance(data, Iterator) and not can_rewind(data):
        raise UnsupportedOption(
            f"{method}: train_dataset is an iterator, which can be read only once: its first samples would be missing "
            "in the run. Pass a dataset whose __iter__ starts again, or one with state_dict and load_state_dict."
        )


def clear_gradients(model: nn.Module) -> None:
    """Drops all gradients."""
    for parameter in model.parameters():
        parameter.grad = None
