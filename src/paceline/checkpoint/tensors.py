"""One file: written so that it is whole or absent, read so that nothing in it can run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

_LEAVES = (bool, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size)
_NUMBERS = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
_NUMBERS += [np.float16, np.float32, np.float64, np.complex64, np.complex128]


class CheckpointError(ValueError):
    """A file of a checkpoint cannot be read, or does not fit what it is loaded into. The message names the file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a hidden file beside `path`; it takes the place of `path` when the block ends, and goes when it raises."""
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


def plain_values(state: Any, where: str, tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """A copy of nested dicts, lists and tuples that holds only what can be read back without running code.

    numpy numbers become Python's, enums their values, named tuples tuples.

    Args:
        where: what the state is called in the error.
        tensor: makes what is kept of each tensor, a copy for instance; None: the tensor without its graph, alone where
            it is a part of a larger one.

    Raises:
        TypeError: something in `state` could not be read back; the message says where it is.
    """
    return _plain(state, where, tensor or _whole)


def save_tensors(state: Any, path: str | os.PathLike[str]) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, text and bytes with `torch.save`.

    What is written are its `plain_values`.

    Raises:
        TypeError: something in `state` could not be read back without running code; the message says where it is.
        OSError: the file cannot be written; a file that was there is unchanged.
    """
    plain = plain_values(state, Path(path).name)
    # Through a Python file: torch's own writer reports a full disk as a RuntimeError that does not say so.
    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(plain, file)
        except RuntimeError as error:
            refused = error.__context__  # what the file raised, hidden by torch's failing to end its archive
            if isinstance(refused, OSError):
                raise OSError(refused.errno, refused.strerror, str(path)) from refused
            raise


def load_tensors(path: str | os.PathLike[str], *, is_mapped: bool = False) -> Any:
    """Read a file of `torch.save` onto the CPU, without running anything in it (`weights_only`, plus numpy arrays).

    Args:
        is_mapped: leave the values in the file until they are used, where its form allows it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            can_map = is_mapped and zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map or None)
    except OSError as error:
        if error.filename is not None:
            raise
        # a file cut short makes the reader seek before its start: that error names no file
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    except Exception as error:  # what damaged bytes make the reader raise is not documented: many kinds are seen
        raise CheckpointError(f"{path} cannot be read safely: {_reason(error)}") from error


def load_stream(stream: IO[bytes], what: str) -> Any:
    """As `load_tensors`, from a stream; `what` stands for the file in the error."""
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read safely: {_reason(error)}") from error


def save_json(value: Any, path: str | os.PathLike[str]) -> None:
    """Write plain values as JSON. Raises TypeError or ValueError for what JSON cannot hold, NaN included."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises FileNotFoundError, or CheckpointError when it is damaged."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_first_line(error)}") from error


def _plain(value: Any, where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, Enum):
        return _plain(value.value, where, tensor)
    if isinstance(value, np.generic):
        return _plain(value.item(), where, tensor)
    if isinstance(value, _LEAVES):
        return value
    # A subclass of these would be stored as an object of its class.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return complex(value)
    if isinstance(value, dict):
        kept: type[dict[Any, Any]] = type(value) if type(value) in (OrderedDict, Counter) else dict
        pairs = ((_plain(key, where, tensor), _plain(item, f"{where}[{key!r}]", tensor)) for key, item in value.items())
        return kept(dict(pairs))
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item, f"{where}[{index}]", tensor) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else set(items)
    if isinstance(value, np.ndarray) and value.dtype.type in _NUMBERS:
        return np.array(value, order="C")
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back without running "
        "code: give the object a state_dict() of tensors, numbers, text, lists and dicts"
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; copied where storing it would store the larger tensor that it is cut from."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _numpy_globals() -> list[Any]:
    """What a file with numpy arrays and numbers names, under the modules of numpy 1 and 2; all build plain data."""
    core = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray  # type: ignore[attr-defined]
    named = [
        (getattr(core, name), f"numpy.{package}.multiarray.{name}")
        for package in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    return [*named, np.ndarray, np.dtype, *(type(np.dtype(number)) for number in _NUMBERS)]


def _reason(error: Exception) -> str:
    """Why torch did not read a file, without its advice to read it unsafely."""
    if not isinstance(error, pickle.UnpicklingError) or error.__context__ is None:
        return _first_line(error)
    return f"it holds more than tensors and plain values ({_first_line(error.__context__).partition('. ')[0]})"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
