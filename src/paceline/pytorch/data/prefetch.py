"""Moves batches to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from paceline.pytorch.data.batches import rebuild_dataclass, rebuild_mapping, rebuild_sequence


def move_to_device(batch: object, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Returns the batch with its tensors on `device`; other values are unchanged.

    Args:
        batch: a tensor, or dicts, lists, tuples, dataclasses, ModelOutputs or BatchEncodings of them, nested at will.
        device: target device.
        non_blocking: do not wait for the copy; has an effect with pinned memory only.

    Returns:
        The same object if all tensors are on the device, else a new object of the same type. The batch is not modified.
    """
    if type(device) is not torch.device:
        device = torch.device(device)
    # fast path for a dict of tensors that are all on the device, the most common batch on a CPU
    if type(batch) is dict:
        for value in batch.values():
            if not isinstance(value, torch.Tensor) or value.device != device:
                break
        else:
            return batch
    return _move(batch, device, non_blocking)


def _move(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    if isinstance(value, Mapping):
        moved = {key: _move(item, device, non_blocking) for key, item in value.items()}
        return value if _same(value.values(), moved.values()) else rebuild_mapping(value, moved)
    if isinstance(value, list | tuple):
        items = [_move(item, device, non_blocking) for item in value]
        return value if _same(value, items) else rebuild_sequence(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _move(item, device, non_blocking) for name, item in vars(value).items()}
        return value if _same(vars(value).values(), fields.values()) else rebuild_dataclass(value, fields)
    if not isinstance(value, str | bytes | int | float) and callable(getattr(value, "to", None)):
        return value.to(device)  # packed sequences, nested batches of other libraries
    return value


def _same(before: Any, after: Any) -> bool:
    return all(old is new for old, new in zip(before, after, strict=True))


class DevicePrefetcher:
    """Moves batches to an accelerator on a separate copy stream.

    The host runs ahead of the device, so the copy of a batch overlaps with the previous step, and its own step does not
    wait for it. This requires batches in pinned memory (`dataloader_pin_memory`). No batch is fetched before it is
    requested. On a CPU this is `move_to_device`.

    Args:
        device: the target device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.copies: Any = None
        if self.device.type != "cpu":
            module: Any = getattr(torch, self.device.type, None)  # the meta device has no module
            if hasattr(module, "Stream") and hasattr(module, "current_stream"):
                self.copies = module.Stream(device=self.device)
                self._module = module

    def __call__(self, batch: object) -> Any:
        """Returns the batch on the device. Operations queued afterwards wait for the copy; the host does not."""
        if self.copies is None:
            return move_to_device(batch, self.device, non_blocking=True)
        compute = self._module.current_stream(self.device)
        with self._module.stream(self.copies):
            moved = move_to_device(batch, self.device, non_blocking=True)
        compute.wait_stream(self.copies)
        for tensor in tensors_in(moved):
            if tensor.device.type == self.device.type:
                tensor.record_stream(compute)  # the allocator must not reuse it before the step is done
        return moved


def has_pinned_memory() -> bool:
    """Returns True if there is an accelerator with its own memory, which copies from page-locked memory faster."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "mps":
        return False
    return accelerator.type != torch._C._get_privateuse1_backend_name() or _can_allocate_pinned()


def _can_allocate_pinned() -> bool:
    """Returns False if a backend outside of torch has no allocator of page-locked memory, which it may leave out."""
    try:
        torch.empty(1, pin_memory=True)
    except NotImplementedError:
        return False
    return True


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns every tensor of a nested batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]
