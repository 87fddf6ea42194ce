"""Sends small tensors from a worker inside its message, and not in a file of shared memory each.

torch sends a file descriptor for each tensor of a batch. The receiving process connects to the worker for each, which
takes about a millisecond, whatever the size of the tensor. Sent by value, views of one tensor arrive as copies that do
not share memory; a tensor that a batch holds twice arrives as one.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

LARGEST = 512 * 1024  # bytes; from about a MiB on, copying through a pipe takes longer than shared memory


def send_small_tensors_by_value() -> None:
    """Makes a worker send small tensors by value; may be called repeatedly, and does nothing in other processes."""
    if get_worker_info() is not None:
        ForkingPickler.register(Tensor, _reduce)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what pickle needs to rebuild a tensor; see `object.__reduce__`."""
    if not _is_sent_by_value(tensor):
        return reduce_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]
    data = bytearray(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape))


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor over the received bytes, which it owns."""
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")


def _is_sent_by_value(tensor: Tensor) -> bool:
    """True for a small dense tensor on the host that is in no shared memory yet."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.nbytes <= LARGEST
        and not tensor.is_shared()  # type: ignore[no-untyped-call]
    )
