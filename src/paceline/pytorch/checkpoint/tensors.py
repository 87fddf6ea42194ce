"""Single checkpoint files: written whole or not at all, read without running any code in them."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from paceline.checkpoint.pickles import Refused, check_keys, check_nest
from paceline.pytorch.checkpoint import tensor_pickle
from paceline.pytorch.checkpoint.torch_files import read_torch_file

_LEAVES = (bool, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size)
_KINDS: tuple[Any, ...] = (str, int, float, complex)  # a subclass of these would be stored as an object of its class
_NUMBERS = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
_NUMBERS += [np.float16, np.float32, np.float64, np.complex64, np.complex128]


class CheckpointError(ValueError):
    """Raised if a checkpoint file cannot be read, or does not fit its target. The message names the file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a hidden file beside `path`; it replaces `path` when the block ends, and is deleted when it raises."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    with open(temporary, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        yield temporary
        if os.stat(temporary).st_mode != mode:
            os.chmod(temporary, mode)  # safetensors makes files that only their owner may read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plain_values(state: object, where: str, tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Returns a copy of nested dicts, lists and tuples with only values that can be read back without running code.

    numpy numbers become Python's, enums their values, named tuples tuples.

    Args:
        where: the name of the state in the error.
        tensor: converts each tensor, to a copy for instance; None: the tensor without its graph, copied if it is a part
            of a larger one.


    Raises:
        TypeError: something in `state` could not be read back; the message says where it is.
    """
    try:
        plain = _plain(state, where, tensor or _whole)
        check_nest(plain)
    except (Refused, RecursionError) as error:
        reason = error if isinstance(error, Refused) else "a value contains itself, or is nested too deeply"
        raise TypeError(f"{where} cannot be saved, since it could not be read back: {reason}") from error
    return plain


def save_tensors(state: object, path: str | os.PathLike[str]) -> None:
    """Writes nested dicts, lists and tuples of tensors, numbers, text and bytes with `torch.save`.

    It writes the state's `plain_values`.

    Raises:
        TypeError: something in `state` could not be read back without running code; the message says where it is.
        OSError: the file cannot be written; a file that was there is unchanged.
    """
    save_plain(plain_values(state, Path(path).name), path)


def save_plain(plain: object, path: str | os.PathLike[str]) -> None:
    """Writes the result of `plain_values`, each tensor of which has a storage of its own. Raises: OSError."""
    # Through a Python file: torch's own writer reports a full disk as a RuntimeError that does not say so.
    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(plain, file, pickle_module=tensor_pickle)
        except RuntimeError as error:
            refused = error.__context__  # the file's error, hidden by torch's failing to end its archive
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(path)) from refused
            raise


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file. Pipes and devices are refused: reading one may never end.

    Raises: FileNotFoundError and other OSErrors; CheckpointError, if it is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return open(path, "rb")


def load_tensors(path: str | os.PathLike[str], *, is_mapped: bool = False) -> Any:
    """Reads a file of `torch.save` onto the CPU: tensors, arrays of numbers and plain values. No code in it is run.

    Args:
        is_mapped: leave the values in the file until they are used, if its form allows it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or holds other values.
    """
    open_file(path).close()
    try:
        return read_torch_file(path, is_mapped=is_mapped)
    except OSError as error:
        if error.filename is not None:
            raise
        # a file cut short makes the reader seek before its start: that error names no file
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    except Exception as error:  # damaged bytes raise undocumented exceptions of many types
        raise CheckpointError(f"{path} cannot be read safely: {_reason(error)}") from error


def load_stream(stream: object, what: str) -> Any:
    """Reads a stream as `load_tensors`; `what` names the file in the error."""
    try:
        return read_torch_file(stream)
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read safely: {_reason(error)}") from error


def save_json(value: object, path: str | os.PathLike[str]) -> None:
    """Writes plain values as JSON. Raises TypeError or ValueError for values that JSON cannot hold, NaN included."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file. Raises FileNotFoundError, or CheckpointError if it is damaged."""
    try:
        with open_file(path) as file:
            return json.load(file)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_first_line(error)}") from error


def _plain(value: object, where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, Enum):
        return _plain(value.value, where, tensor)
    if isinstance(value, np.generic) and not isinstance(value, np.longdouble | np.clongdouble):  # their own items
        return _plain(value.item(), where, tensor)
    if isinstance(value, _LEAVES):
        return value
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        kept: type[dict[Any, Any]] = type(value) if type(value) in (OrderedDict, Counter) else dict
        keys = _plain_keys(value, where, tensor)
        items = [_plain(item, f"{where}[{key!r}]", tensor) for key, item in value.items()]
        return kept(dict(zip(keys, items, strict=True)))
    if isinstance(value, (set, frozenset)):
        return (frozenset if isinstance(value, frozenset) else set)(_plain_keys(value, where, tensor))
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]", tensor) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.ndarray) and value.dtype.type in _NUMBERS:
        return np.array(value, order="C")
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back without running "
        "code: give the object a state_dict() of tensors, numbers, text, lists and dicts"
    )


def _plain_keys(values: Collection[Any], where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The keys of a dict, or what a set holds. Raises: TypeError, where they could not be keys again."""
    keys = [_plain(key, f"a key of {where}", tensor) for key in values]
    try:
        check_keys(keys)
        if len(set(keys)) < len(keys):
            raise Refused("two of them are the same as plain values")
    except Refused as error:
        raise TypeError(f"The keys of {where} cannot be saved: {error}") from error
    return keys


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its graph; copied if storing it would store the larger tensor that it is a view of."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _reason(error: Exception) -> str:
    """Returns the reason why a file was not read."""
    if isinstance(error, Refused):
        return f"it holds more than tensors and plain values ({error})"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
