"""The globals that torch.save files may name: constructors of tensors, numeric arrays and plain values.

torch's own loader calls numpy's functions with any arguments from a file, and trusts its offsets, strides and lengths,
so a file of a few bytes can make it access an arbitrary address. Here all of these are checked first.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.pickles import Buildable, Constructor, Name, Refused, check_keys

MOST_EXPANDED_BYTES = 1 << 28  # limit of a tensor whose elements share memory, beyond its bytes in the file

_NUMERIC = re.compile(r"[<>=|]?(?:[iu][1248]|f[248]|c(?:8|16)|b1|\?)")
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "QInt32Storage": torch.qint32,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}
_STORAGE_PATH = re.compile(r"torch\.(?:cuda\.|storage\.)?(\w+Storage)")
_LAYOUTS = {
    str(layout): layout
    for layout in (
        torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
    )
}  # fmt: skip
_SCHEMES = {str(scheme): scheme for scheme in (torch.per_tensor_affine, torch.per_channel_affine)}
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class Storage:
    """Bytes that a file holds, and their dtype.

    Args:
        content: the bytes, of exactly the stated length.
        dtype: dtype of the elements, unless the tensor names another dtype.
    """

    def __init__(self, content: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.content = content
        self.dtype = dtype


def find_global(path: str, extra: Mapping[str, Any]) -> Any:
    """Returns the safe replacement of the global at `path`.

    Args:
        path: module and name.
        extra: additional globals, which take precedence.

    Raises: Refused, if the global is not allowed.
    """
    if path in extra:
        return Name(path, extra[path])
    if path in _CONSTRUCTORS:
        return Name(path, _CONSTRUCTORS[path])
    if path in _CLASSES or path in ("numpy.ndarray", "torch._utils._rebuild_wrapper_subclass"):
        return Name(path)
    if path in _SCHEMES:
        return _SCHEMES[path]
    storage = _STORAGE_PATH.fullmatch(path)
    if storage is not None and storage[1] in _STORAGES:
        return _STORAGES[storage[1]]
    module, _, name = path.rpartition(".")
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return dtype
    if path in _of_the_user():
        return _Own(path, _of_the_user()[path])
    raise Refused(f"it names {path}")


def _of_the_user() -> dict[str, Any]:
    """Returns the globals allowed with `torch.serialization.add_safe_globals`: the user's classes, not torch's.

    torch's are excluded because torch.distributed allows its device meshes, whose construction starts process groups.
    """
    listed = [item if isinstance(item, tuple) else (item, None) for item in torch.serialization.get_safe_globals()]
    named = {path or f"{item.__module__}.{item.__qualname__}": item for item, path in listed}
    return {path: item for path, item in named.items() if path.partition(".")[0] not in ("torch", "numpy")}


class _Own(Name):
    """A class or function that the user allowed; it is called as torch would call it."""

    __slots__ = ("target",)

    def __init__(self, path: str, target: Any) -> None:
        super().__init__(path, target)
        self.target = target

    def new(self, *values: Any) -> Any:
        if not isinstance(self.target, type):
            raise Refused(f"{self.path} is no class")
        return self.target.__new__(self.target, *values)


def set_state(target: object, state: object) -> None:
    """Sets the state of an object of a class that the user allowed. Raises Refused for any other."""
    if not any(type(target) is allowed for allowed in _of_the_user().values()):
        raise Refused(f"it sets attributes of a {type(target).__name__}, which is not allowed")
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
    elif isinstance(state, dict):
        target.__dict__.update(state)


# ---- tensors


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise Refused("a tensor has sizes or strides that are no whole numbers of 0 or more")
    return tuple(value)


def _checked_place(
    storage: object, offset: object, size: object, stride: object, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Returns (offset, size, stride) if all elements are inside the storage."""
    if not isinstance(storage, Storage):
        raise Refused("a tensor has no storage")
    (offset,), size, stride = _sizes([offset]), _sizes(size), _sizes(stride)
    if len(size) != len(stride):
        raise Refused("a tensor has another number of strides than of dimensions")
    num_held, num_elements = storage.content.nbytes() // dtype.itemsize, prod(size)
    last = offset + sum((number - 1) * step for number, step in zip(size, stride, strict=True))
    if offset > num_held or (num_elements and last >= num_held):
        raise Refused(f"a tensor of {size} reaches beyond its {num_held} elements")
    if num_elements * dtype.itemsize > storage.content.nbytes() + MOST_EXPANDED_BYTES:
        raise Refused(f"a tensor of {size} is made of {num_held} elements")
    return offset, size, stride


def _tensor(
    storage: Any,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    *more: Any,
) -> Tensor:
    """Rebuilds a tensor like `_rebuild_tensor`, `_v2` and `_v3`; `_v3` passes the dtype before the metadata."""
    dtype = more[0] if more and isinstance(more[0], torch.dtype) else getattr(storage, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise Refused("a tensor has no storage")
    place = _checked_place(storage, offset, size, stride, dtype)
    tensor = torch.empty(0, dtype=dtype).set_(storage.content, *place)  # type: ignore[call-overload]  # not in the stub
    metadata = more[-1] if more and isinstance(more[-1], dict) else {}
    if metadata.get("conj"):
        tensor = tensor.conj()
    if metadata.get("neg"):
        tensor = torch._neg_view(tensor)
    if requires_grad is True and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_(True)
    return tensor  # type: ignore[no-any-return]


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, *ignored: Any) -> Tensor:
    if getattr(storage, "dtype", None) not in (torch.qint8, torch.quint8, torch.qint32):
        raise Refused("a quantized tensor is of a type that is not read")
    offset, size, stride = _checked_place(storage, offset, size, stride, storage.dtype)
    if not isinstance(scheme, tuple) or not scheme:
        raise Refused("a quantized tensor has no scheme")
    if scheme[0] is torch.per_tensor_affine:
        _, scale, zero = scheme
        made = torch._empty_affine_quantized(size, scale=float(scale), zero_point=int(zero), dtype=storage.dtype)
    elif scheme[0] is torch.per_channel_affine:
        _, scales, zeros, axis = scheme
        if type(axis) is not int or not 0 <= axis < len(size):
            raise Refused("a quantized tensor has no such axis")
        scales, zeros = _compact(scales, torch.float32, torch.float64), _compact(zeros, torch.float32, torch.int64)
        scales, zeros = scales.double(), zeros.long()
        if scales.shape != (size[axis],) or zeros.shape != (size[axis],):
            raise Refused("a quantized tensor has not one scale for each of its channels")
        made = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zeros, axis=axis, dtype=storage.dtype
        )
    else:
        raise Refused("a quantized tensor is of a scheme that is not read")
    return made.set_(storage.content, offset, size, stride)  # type: ignore[call-overload, no-any-return]


def _sparse(layout: Any, data: object) -> Tensor:
    if not isinstance(data, tuple):
        raise Refused("a sparse tensor has no parts")
    tensors = [part for part in data if isinstance(part, Tensor)]
    if any(part.layout is not torch.strided for part in tensors):
        raise Refused("a sparse tensor is made of sparse tensors")
    if layout is torch.sparse_coo:
        indices, values, size, *rest = data
        is_coalesced = rest[0] if rest and isinstance(rest[0], bool) else None
        made = torch.sparse_coo_tensor(indices, values, _sizes(size), check_invariants=True, is_coalesced=is_coalesced)
    elif layout in _LAYOUTS.values() and layout is not torch.strided:
        compressed, plain, values, size = data
        made = torch.sparse_compressed_tensor(
            compressed, plain, values, _sizes(size), layout=layout, check_invariants=True
        )
    else:
        raise Refused("a sparse tensor has a layout that is not read")
    return made


def _dense(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refused(f"a {type(value).__name__} stands where a tensor is expected")
    return value


def _compact(value: object, *dtypes: torch.dtype) -> Tensor:
    """Returns the value if it is a contiguous tensor of one of the dtypes, so that it is no larger than in the file."""
    tensor = _dense(value)
    if tensor.dtype not in dtypes or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise Refused(f"a tensor of {tensor.dtype} stands where numbers of {dtypes[-1]}, side by side, are expected")
    return tensor


def _parameter(data: object, requires_grad: object = True, *ignored: Any) -> Tensor:
    data = _dense(data)
    return torch.nn.Parameter(data.detach(), bool(requires_grad) and (data.is_floating_point() or data.is_complex()))


def _of_type(function: object, kind: object, arguments: object, state: object) -> Tensor:
    """Rebuilds a tensor subclass. torch's own become plain tensors; those that the user allowed are rebuilt as such."""
    if not isinstance(function, Name) or not isinstance(arguments, tuple) or not isinstance(kind, Name):
        raise Refused("a tensor is made by something unknown")
    if isinstance(kind, _Own) and function.path == "torch._utils._rebuild_wrapper_subclass":
        if not arguments or not isinstance(arguments[0], _Own) or arguments[0].target is not kind.target:
            raise Refused("a tensor is made of another class than it says")
        _, dtype, size, stride, offset, layout, _, requires_grad = arguments
        tensor: Tensor = torch._utils._rebuild_wrapper_subclass(  # type: ignore[no-untyped-call]
            kind.target, dtype, _sizes(size), _sizes(stride), offset, layout, torch.device("cpu"), requires_grad
        )
    else:
        tensor = _dense(function.call(*arguments))
    if not isinstance(kind, _Own):
        return tensor
    made: Tensor = torch._tensor._rebuild_from_type_v2(lambda: tensor, kind.target, (), state)  # type: ignore[no-untyped-call]
    return made


def _from_array(data: object, dtype: object, *ignored: Any) -> Tensor:
    """Rebuilds a tensor from a device whose tensors torch saves through numpy."""
    if not isinstance(data, np.ndarray):
        raise Refused("a tensor is made of something else than numbers")
    if not isinstance(dtype, torch.dtype) or dtype.itemsize > data.itemsize:  # torch widens types that numpy lacks
        raise Refused("a tensor is made of numbers that are narrower than its own")
    return torch.from_numpy(data).to(dtype)


def _from_host(data: object, dtype: object, *ignored: Any) -> Tensor:
    tensor = _dense(data)
    if tensor.dtype != dtype:  # torch writes equal dtypes; a wider one would claim memory beyond the file
        raise Refused(f"a tensor of {tensor.dtype} says that it is of {dtype}")
    return tensor


# ---- numpy


class _Type(Buildable):
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def built(self, state: Any) -> np.dtype[Any]:
        """Returns the dtype, in the byte order of its state. Fields, metadata and objects are refused."""
        is_plain = isinstance(state, tuple) and len(state) == 8 and state[2:5] == (None, None, None)
        if not is_plain or state[1] not in ("<", ">", "=", "|"):
            raise Refused("an array has a type that is none of numbers")
        return self.dtype.newbyteorder(state[1])


class _Array(Buildable):
    def built(self, state: object) -> np.ndarray[Any, Any]:
        """Returns the array, with a copy of its bytes."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise Refused("an array has no content")
        _, shape, dtype, is_fortran, content = state
        shape, dtype = _sizes(shape), _numbers(dtype)
        if not isinstance(content, bytes) or prod(shape) * dtype.itemsize != len(content):
            raise Refused(f"an array of {shape} has not as many bytes as it needs")
        flat = np.frombuffer(content, dtype) if content else np.zeros(0, dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _numbers(dtype: object) -> np.dtype[Any]:
    found = dtype.dtype if isinstance(dtype, _Type) else dtype
    if not isinstance(found, np.dtype) or found.kind not in "biufc":
        raise Refused("an array has a type that is none of numbers")
    return found


def _dtype(text: object, *ignored: Any) -> _Type:
    if not isinstance(text, str) or not _NUMERIC.fullmatch(text):
        raise Refused(f"an array has the type {text!r:.40}, which is none of numbers")
    return _Type(np.dtype(text))


def _reconstruct(kind: object, *ignored: Any) -> _Array:
    if not isinstance(kind, Name) or kind.path != "numpy.ndarray":
        raise Refused("an array is of another class than numpy's own")
    return _Array()


def _scalar(dtype: object, content: object) -> Any:
    dtype = _numbers(dtype)
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise Refused("a number has not as many bytes as it needs")
    return np.frombuffer(content, dtype)[0]


# ---- plain values


def _encode(text: object, encoding: object = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise Refused(f"it encodes text as {encoding!r:.40}")
    return text.encode(encoding)


def _bytearray(content: object = b"", *ignored: Any) -> bytearray:
    if not isinstance(content, bytes):
        raise Refused("bytes are made of something else")
    return bytearray(content)


def _items(kind: Any, items: Any = ()) -> Any:
    """Returns a set, an ordered mapping or a counter built from the given values."""
    if not isinstance(items, list | tuple | dict):
        raise Refused(f"a {kind.__name__} is made of a {type(items).__name__}")
    check_keys([pair[0] if kind is OrderedDict and isinstance(pair, list | tuple) and pair else pair for pair in items])
    return kind(items)


def _layout(text: object) -> torch.layout:
    if text not in _LAYOUTS:
        raise Refused(f"there is no layout {text!r:.40}")
    return _LAYOUTS[text]


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    return complex(float(real), float(imaginary))


_CONSTRUCTORS: dict[str, Constructor] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda *content: bytes(_bytearray(*content)),
    "builtins.complex": _complex,
    "builtins.frozenset": partial(_items, frozenset),
    "builtins.set": partial(_items, set),
    "collections.Counter": partial(_items, Counter),
    "collections.OrderedDict": partial(_items, OrderedDict),
    "torch.Size": lambda sizes=(): torch.Size(_sizes(sizes)),
    "torch.device": lambda *place: torch.device(*place),
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_host,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_array,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
}
