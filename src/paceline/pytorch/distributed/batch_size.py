"""Retrying a function with a smaller batch size when memory runs out."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from paceline.pytorch.distributed.strategy import empty_device_cache, is_out_of_memory

logger = logging.getLogger(__name__)

SHRINK = 0.9  # as in transformers 5.23


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    auto_find_batch_size: bool = False,
) -> Callable[..., Any]:
    """Decorates a function whose first parameter is a batch size in samples, so that the caller leaves it out.

    Inside a Trainer, `TrainingArguments(auto_find_batch_size=True)` does the same without restarting the training.

    Args:
        function: first called with `starting_batch_size`.
        auto_find_batch_size: after an out-of-memory error, call it again with nine tenths of the batch size, until it
            succeeds.

    Raises:
        TypeError: the function's first parameter is not `batch_size`.
        RuntimeError: not even a batch size of 1 fits in memory.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if next(iter(inspect.signature(function).parameters), None) != "batch_size":
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"find_executable_batch_size: the first parameter of {name} must be `batch_size`")
    if not auto_find_batch_size:
        return functools.partial(function, starting_batch_size)
    return functools.wraps(function)(functools.partial(call_with_less, function, starting_batch_size))


def call_with_less(function: Callable[..., Any], batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """Calls `function` with smaller and smaller batches until one fits in memory."""
    while batch_size > 0:
        try:
            return function(batch_size, *args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("out of memory with batch_size=%d: trying a smaller one", batch_size)
        batch_size = int(batch_size * SHRINK)
        gc.collect()
        if torch.accelerator.is_available():
            empty_device_cache(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    raise RuntimeError("find_executable_batch_size: out of memory with a batch size of 1; use a smaller model.")
