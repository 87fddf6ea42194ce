"""Single checkpoint files: they are written whole or not at all, and read without running any code in them."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
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
_KINDS: tuple[Any, ...] = (str, int, float, complex)  # subclasses are converted, since pickle would store their class
_SCALARS = frozenset((bool, int, float, str, type(None)))  # exact types: subclasses, such as enums, are converted
_NUMBERS = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
_NUMBERS += [np.float16, np.float32, np.float64, np.complex64, np.complex128]


class CheckpointError(ValueError):
    """Raised if a checkpoint file cannot be read, or does not fit its target. The message names the file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a hidden file in the folder of `path`. It replaces `path` when the block ends; if the block raises, it is
    deleted.

    Raises: the block's error; an OSError without a file name, as of a full disk, gets that of `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    with open(temporary, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        yield temporary
        if os.stat(temporary).st_mode != mode:
            os.chmod(temporary, mode)  # safetensors creates files that only their owner may read
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def plain_values(state: object, where: str, tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Returns a copy of nested dicts, lists and tuples with only values that can be read back without running code.

    numpy scalars become Python numbers, enums their values, and named tuples plain tuples.

    Args:
        where: the name of the state in the error.
        tensor: converts each tensor, for instance to a copy. None detaches it, and copies it if it is a view of a
            larger storage.

    Raises:
        TypeError: a value in `state` could not be read back; the message gives its location.
    """
    try:
        plain = _plain(state, where, tensor or _whole)
        check_nest(plain)
    except (Refused, RecursionError) as error:
        reason = error if isinstance(error, Refused) else "a value contains itself, or is nested too deeply"
        raise TypeError(f"{where} cannot be saved, since it could not be read back: {reason}") from error
    return plain


def save_tensors(state: object, path: str | os.PathLike[str]) -> None:
    """Writes the `plain_values` of nested dicts, lists and tuples of tensors, numbers, text and bytes.

    The file has the format of `torch.save`.

    Raises:
        TypeError: a value in `state` could not be read back without running code; the message gives its location.
        OSError: the file cannot be written; an existing file is unchanged.
    """
    save_plain(plain_values(state, Path(path).name), path)


def save_plain(plain: object, path: str | os.PathLike[str]) -> None:
    """Writes the result of `plain_values`, in which each tensor fills its own storage. Raises: OSError."""
    # To a Python file object: torch's own writer reports a full disk as a RuntimeError without the cause.
    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(plain, file, pickle_module=tensor_pickle)
        except RuntimeError as error:
            refused = error.__context__  # the file's error, which torch hides when it fails to close its archive
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(path)) from refused
            raise


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file. Pipes and devices are refused, since reading one may never end.

    Raises: FileNotFoundError and other OSErrors; CheckpointError, if it is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return open(path, "rb")


def load_tensors(path: str | os.PathLike[str], *, is_mapped: bool = False) -> Any:
    """Reads tensors, numeric arrays and plain values from a `torch.save` file onto the CPU. No code in it is run.

    Args:
        is_mapped: memory-map the values, so that they are read when used, if the file format allows it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or holds other values.
    """
    open_file(path).close()
    try:
        return read_torch_file(path, is_mapped=is_mapped)
    except OSError as error:
        if error.filename is not None:
            raise
        # a truncated file makes the reader seek before its start, and the error does not name the file
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    except Exception as error:  # damaged bytes raise undocumented exceptions of many types
        raise CheckpointError(f"{path} cannot be read safely: {_reason(error)}") from error


def load_stream(stream: object, what: str) -> Any:
    """Reads a stream like `load_tensors`; `what` names the file in the error."""
    try:
        return read_torch_file(stream)
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read safely: {_reason(error)}") from error


def save_json(value: object, path: str | os.PathLike[str]) -> None:
    """Writes plain values as JSON. Raises TypeError or ValueError for values that JSON cannot hold, including NaN."""
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
    if isinstance(value, np.generic) and not isinstance(value, np.longdouble | np.clongdouble):  # item() returns itself
        return _plain(value.item(), where, tensor)
    if isinstance(value, _LEAVES):
        return value
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        kept: type[dict[Any, Any]] = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kept(_plain_dict(value, where, tensor))
    if isinstance(value, (set, frozenset)):
        return (frozenset if isinstance(value, frozenset) else set)(_plain_keys(value, where, tensor))
    if isinstance(value, (list, tuple)):
        return _plain_sequence(value, where, tensor)
    if isinstance(value, np.ndarray) and value.dtype.type in _NUMBERS:
        return np.array(value, order="C")
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back without running "
        "code: give the object a state_dict() of tensors, numbers, text, lists and dicts"
    )


def _plain_dict(values: dict[Any, Any], where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    """An optimizer has a dict for each parameter: its tensors and numbers cost no further call and no text."""
    keys, items = _plain_keys(values, where, tensor), []
    for key, item in values.items():
        kind = type(item)
        if kind is torch.Tensor:
            items.append(tensor(item))
        elif kind in _SCALARS:
            items.append(item)
        else:
            items.append(_plain(item, f"{where}[{key!r}]", tensor))
    return dict(zip(keys, items, strict=True))


def _plain_sequence(
    values: list[Any] | tuple[Any, ...], where: str, tensor: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any] | tuple[Any, ...]:
    items: Iterable[Any] = values
    if not _SCALARS.issuperset(map(type, values)):  # as are the 625 integers of Python's random state
        items = [_plain(item, f"{where}[{index}]", tensor) for index, item in enumerate(values)]
    return list(items) if isinstance(values, list) else tuple(items)


def _plain_keys(values: Collection[Any], where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Returns the keys of a dict, or the items of a set, as plain values.

    Raises: TypeError, if they could not be keys when read back.
    """
    if _SCALARS.issuperset(map(type, values)):
        return list(values)
    keys = [_plain(key, f"a key of {where}", tensor) for key in values]
    try:
        check_keys(keys)
        if len(set(keys)) < len(keys):
            raise Refused("two of them are the same as plain values")
    except Refused as error:
        raise TypeError(f"The keys of {where} cannot be saved: {error}") from error
    return keys


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the detached tensor; copied if it is a view of a larger storage, which would be stored too."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _reason(error: Exception) -> str:
    """Returns the reason why a file could not be read, for the message."""
    if isinstance(error, Refused):
        return f"it holds more than tensors and plain values ({error})"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
