"""A pickler for `torch.save(..., pickle_module=...)` whose files torch reads, in half the time for small tensors.

The pickler of the standard library calls Python code for each object that it meets, about 20 per tensor, so that torch
can check if it is a storage. That costs more than writing a small tensor. This one writes dicts, lists, tuples and
tensors itself: tensors of one dtype, shape and stride differ in the name of their storage only. It leaves every other
object to the standard library, and values without tensors to its C code.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import IO, Any, ClassVar

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
_SCALARS = frozenset((bool, int, float, str, type(None)))


class Pickler(pickle.Pickler):
    """The base class of the pickler that torch defines in each `torch.save`, with its own `persistent_id`.

    No memo is kept: values that occur twice are written twice, which `check_nest` has limited; storages still once.
    """

    _identify: ClassVar[Callable[[Any, object], Any]]  # torch's function: the mark of a storage

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._identify = identify = cls.__dict__["persistent_id"]

        def persistent_id(self: Any, value: object) -> Any:
            return identify(self, value) if type(value) in _STORAGES else None

        cls.persistent_id = persistent_id  # type: ignore[method-assign]

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        self._other = io.BytesIO()
        super().__init__(self._other, protocol)
        self.fast = True  # no memo: parts of the stream may be put together
        self._file = file
        self._parts: list[bytes] = [pickle.PROTO + bytes([protocol])]
        self._known: dict[Hashable, bytes] = {}

    def dump(self, value: object) -> None:
        """Writes the value to the file."""
        self._add(value)
        self._file.write(b"".join([*self._parts, pickle.STOP]))

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind is Tensor and is_plain(value):
            self._add_tensor(value)
        elif kind in _SCALARS or _holds_scalars(kind, value):
            self._parts.append(self._plain(value))
        elif kind is dict:
            self._add_dict(value)
        elif kind is list:
            self._add_items(value, pickle.EMPTY_LIST + pickle.MARK, pickle.APPENDS)
        elif kind is tuple:
            self._add_items(value, pickle.MARK, pickle.TUPLE)
        else:
            self._parts.append(self._pickled(value))

    def _add_items(self, values: Iterable[Any], start: bytes, end: bytes) -> None:
        self._parts.append(start)
        for item in values:
            self._add(item)
        self._parts.append(end)

    def _add_dict(self, values: dict[Any, Any]) -> None:
        self._parts.append(pickle.EMPTY_DICT)
        if not values:
            return
        self._parts.append(pickle.MARK)
        for key, item in values.items():
            self._parts.append(self._plain(key) if type(key) in _SCALARS else self._pickled(key))
            self._add(item)
        self._parts.append(pickle.SETITEMS)

    def _add_tensor(self, tensor: Tensor) -> None:
        """Writes the call that rebuilds the tensor, with the mark that torch gives its storage."""
        storage = tensor._typed_storage()  # type: ignore[no-untyped-call]
        kind, storage_type, name, location, size = self._identify(storage)
        start = self._known.get(storage_type)
        if start is None:
            call = self._pickled(torch._utils._rebuild_tensor_v2) + pickle.MARK + pickle.MARK
            start = self._known[storage_type] = call + self._pickled(kind) + self._pickled(storage_type)
        form = (location, size, tensor.storage_offset(), tensor.shape, tensor.stride())
        end = self._known.get(form)
        if end is None:
            rest: tuple[Any, ...] = (
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
                False,
                OrderedDict(),
            )
            mark = self._pickled(location) + self._pickled(size) + pickle.TUPLE + pickle.BINPERSID
            end = self._known[form] = mark + b"".join(map(self._pickled, rest)) + pickle.TUPLE + pickle.REDUCE
        self._parts += (start, self._plain(name), end)

    @staticmethod
    def _plain(value: object) -> bytes:
        """Returns opcodes for a value without tensors, in a third of the time of `_pickled`.

        Text that occurs twice in it is written once: a reference never leaves the value.
        """
        return pickle.dumps(value, 2)[2:-1]

    def _pickled(self, value: object) -> bytes:
        """Returns the opcodes that the standard library writes for the value."""
        super().dump(value)
        opcodes = self._other.getvalue()[2:-1]  # without the protocol and the end
        self._other.seek(0)
        self._other.truncate()
        return opcodes


def _holds_scalars(kind: type, value: Any) -> bool:
    """True for a list, tuple or dict that holds only numbers, text and None."""
    if kind is list or kind is tuple:
        return _SCALARS.issuperset(map(type, value))
    return kind is dict and _SCALARS.issuperset(map(type, value.values())) and _SCALARS.issuperset(map(type, value))


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
