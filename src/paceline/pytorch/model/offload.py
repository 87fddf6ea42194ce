"""Activations in host memory: copied there in the forward pass, and back when the backward pass needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.pytorch.data.prefetch import has_pinned_memory

MIN_BYTES = 64 * 2**10  # a copy of less saves nothing


@dataclass(eq=False)
class Moved:
    """A tensor in host memory.

    Attributes:
        host: its values; in page-locked memory if there is an accelerator.
        device: the device it came from.
        stride: its stride there, which compiled code relies on.
        copied: event after which the values are in host memory; None if they already are.
        returned: the tensor that the values were copied back to, while it lives.
    """

    host: Tensor
    device: torch.device
    stride: tuple[int, ...]
    copied: Any = None
    returned: weakref.ref[Tensor] | None = None

    def remember(self, tensor: Tensor) -> None:
        """Sets the tensor that the values were copied back to."""
        self.returned = weakref.ref(tensor)


class ActivationOffload:
    """Moves what autograd saves in a module's forward pass to host memory.

    The copies run on a separate stream beside the forward pass. Parameters, their casts by autocast and views of
    both, small tensors, those of other classes (shards) and those with repeated elements stay on the device. A tensor
    that several operations save is copied once.

    Args:
        min_bytes: smaller tensors stay.

    Attributes:
        num_moved, bytes_moved: tensors that were moved so far, and their size.
    """

    def __init__(self, min_bytes: int = MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self.num_moved = self.bytes_moved = 0
        self._active: list[saved_tensors_hooks] = []
        self._pins = has_pinned_memory()
        self._streams: dict[torch.device, torch.Stream] = {}
        # by storage, place in it, and version; valid while the storage lives
        self._moved: dict[tuple[Any, ...], tuple[StorageWeakRef, Moved]] = {}

    # ---- hooks of the module

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Begins a forward pass."""
        if torch.is_grad_enabled():
            self._moved.clear()
            hooks = saved_tensors_hooks(self.pack, self.unpack)
            hooks.__enter__()
            self._active.append(hooks)

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Ends a forward pass, also one that failed."""
        if self._active:
            self._active.pop().__exit__()
        self._moved.clear()

    # ---- hooks of autograd

    def pack(self, tensor: Tensor) -> Tensor | Moved:
        """Returns the tensor in host memory, or itself if it stays."""
        if type(tensor) is not Tensor or self._stays(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._moved.get(key)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            return known[1]
        moved = self._copy(tensor)
        self._moved[key] = (StorageWeakRef(storage), moved)  # type: ignore[no-untyped-call]
        self.num_moved += 1
        self.bytes_moved += tensor.nbytes
        return moved

    def unpack(self, packed: Tensor | Moved) -> Tensor:
        """Returns the tensor on its device."""
        if isinstance(packed, Tensor):
            return packed
        tensor = packed.returned() if packed.returned is not None else None
        if tensor is None:
            if packed.copied is not None:
                self._current_stream(packed.device).wait_event(packed.copied)
            host = packed.host
            tensor = torch.empty_strided(host.shape, packed.stride, dtype=host.dtype, device=packed.device)
            tensor.copy_(host, non_blocking=self._pins)
            packed.remember(tensor)
        return tensor

    def _stays(self, tensor: Tensor) -> bool:
        is_parameter = is_weight(tensor if tensor._base is None else tensor._base)
        is_repeated = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        return is_parameter or is_repeated or tensor.layout is not torch.strided or tensor.nbytes < self.min_bytes

    def _copy(self, tensor: Tensor) -> Moved:
        device = tensor.device
        with torch.no_grad():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._pins)
            if device.type == "cpu" or not self._pins:
                return Moved(host.copy_(tensor), device, tensor.stride())
            copies = self._streams.get(device)
            if copies is None:
                copies = self._streams[device] = torch.Stream(device)
            copies.wait_stream(self._current_stream(device))
            with copies:
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(copies)  # the allocator must not reuse it before it is copied
            return Moved(host, device, tensor.stride(), copies.record_event())

    @staticmethod
    def _current_stream(device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)


def is_weight(tensor: Tensor) -> bool:
    """Returns True for a parameter, and for its cast by autocast: moving those would copy all weights in each pass."""
    if isinstance(tensor, nn.Parameter):
        return True
    made_by = tensor.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(made_by.next_functions[0][0], "variable", None), nn.Parameter)


def offload_activations(model: nn.Module, offload: ActivationOffload | None = None) -> tuple[str, Callable[[], None]]:
    """Moves the activations of each forward pass of `model` with gradients to host memory.

    Returns:
        A note, and a function that ends it.
    """
    made = offload if offload is not None else ActivationOffload()
    handles = [
        model.register_forward_pre_hook(made.enter),
        model.register_forward_hook(made.leave, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return f"Activations of {type(model).__name__} are kept in host memory until the backward pass.", undo
