"""Writes safetensors files: 8 bytes of header length, a JSON header, the values.

The writer of the package safetensors takes all tensors at once, and 2.4 times the CPU time for 3,000 of 64 numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.pytorch.checkpoint.tensors import CheckpointError, replacing

Form = tuple[torch.Size, torch.dtype]
Progress = Callable[[int], Any]

# dtype -> its name in safetensors
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NOT_IN_NUMPY = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))


def write_file(
    path: Path,
    forms: Mapping[str, Form],
    read: Callable[[str], Tensor],
    notes: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """Writes one file, with one tensor at a time in memory.

    Args:
        forms: name -> (shape, dtype).
        read: name -> the tensor.
        notes: the file's metadata.
        progress: called with the bytes of each written tensor.

    Raises: OSError if the disk refuses; CheckpointError for a tensor of another form.
    """
    ordered = aligned(forms)
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    end = 0
    for key in ordered:
        shape, dtype = form = forms[key]
        start, end = end, end + bytes_of(form)
        header[key] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in ordered:
            tensor = read(key)
            if (tensor.shape, tensor.dtype) != forms[key]:
                raise CheckpointError(f"{key} is {tuple(tensor.shape)} of {tensor.dtype}, not what its index says")
            file.write(octets(tensor))
            del tensor  # before the next is read
            if progress is not None:
                progress(bytes_of(forms[key]))


def bytes_of(form: Form) -> int:
    """Returns the bytes of one tensor's values."""
    return form[0].numel() * form[1].itemsize


def aligned(forms: Mapping[str, Form]) -> list[str]:
    """Returns the names of one file's tensors in an order that aligns each to a multiple of its item size."""
    return sorted(forms, key=lambda key: (-forms[key][1].itemsize, key))


def octets(tensor: Tensor) -> memoryview:
    """Returns the raw bytes of a tensor, contiguous, on the host."""
    # each call costs more than writing a small tensor
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _NOT_IN_NUMPY:
        tensor = tensor.view(-1).view(torch.uint8)
    return tensor.numpy().data
