"""Converts states of users' objects to JSON: tensors, arrays, bytes and tuples are tagged, all else must be plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

TAG = "__kind__"


def to_portable(value: object) -> Any:
    """Returns the value in a form that `json` can write and `from_portable` can read.

    Raises:
        TypeError: the value contains an unsupported type; the message names it.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return {TAG: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, np.ndarray):
        return {TAG: "array", "dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "values": bytes(value).hex()}
    if isinstance(value, tuple):
        return {TAG: "tuple", "values": [to_portable(item) for item in value]}
    if isinstance(value, list):
        return [to_portable(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: to_portable(item) for key, item in value.items()}
        return {TAG: "items", "values": [[to_portable(key), to_portable(item)] for key, item in value.items()]}
    raise TypeError(
        f"The state of the training data holds a {type(value).__name__}, which cannot be written to a checkpoint. Let "
        "state_dict() return numbers, strings, lists, dicts, tensors and arrays."
    )


def from_portable(value: object) -> Any:
    """Returns the value that was passed to `to_portable`; numpy scalars become Python numbers."""
    if isinstance(value, list):
        return [from_portable(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: from_portable(item) for key, item in value.items()}
    values = value["values"]
    if kind == "tensor":
        return torch.tensor(values, dtype=getattr(torch, value["dtype"]))
    if kind == "array":
        return np.array(values, dtype=np.dtype(value["dtype"]))
    if kind == "bytes":
        return bytes.fromhex(values)
    if kind == "tuple":
        return tuple(from_portable(item) for item in values)
    return {from_portable(key): from_portable(item) for key, item in values}
