"""A pickler for `torch.save(..., pickle_module=...)` whose files torch reads, in half the time for small tensors.

torch calls Python code for each pickled object, about 20 per tensor, to check if it is a storage. It also collects
metadata of each tensor that only special tensors have. Both cost more than writing a small tensor. This pickler reduces
a plain tensor directly to the same call that torch stores, and passes only storages to torch's check.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# dtypes that torch stores as a typed storage and `_rebuild_tensor_v2`; newer dtypes are stored in another form
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_STORAGES = frozenset((torch.storage.TypedStorage, torch.UntypedStorage))


class Pickler(pickle.Pickler):
    """The base class of the pickler that torch defines in each `torch.save`, with its own `persistent_id`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        identify: Callable[[Any, object], Any] | None = cls.__dict__.get("persistent_id")
        if identify is None:
            return

        def persistent_id(self: Any, value: object) -> Any:
            return identify(self, value) if type(value) in _STORAGES else None

        cls.persistent_id = persistent_id  # type: ignore[method-assign]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # No memo: it would keep about ten objects per tensor alive until the end, for the garbage collector to walk.
        # Values that occur twice are written twice, which `check_nest` has limited; storages still once.
        self.fast = True

    def reducer_override(self, value: object) -> Any:
        """Returns the call that rebuilds a plain tensor; NotImplemented leaves any other object to torch."""
        if type(value) is not Tensor or not is_plain(value):
            return NotImplemented
        storage = value._typed_storage()  # type: ignore[no-untyped-call]
        arguments: tuple[Any, ...] = (
            storage,
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            False,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, arguments


def is_plain(tensor: Tensor) -> bool:
    """True for a dense tensor on the host without graph, hooks, attributes or negation bit."""
    return (
        tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
