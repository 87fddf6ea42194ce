"""Fingerprints of datasets: their length, and a hash of each of up to 64 rows that are spread evenly over them.

Reading is limited in time, and leaves no trace in a run: the random generators of the process and of the dataset are
restored, and a shallow copy of the dataset is read, so that counters and caches stay as they are. Where worker
processes load the data, the user's code is not run in this process: it may need files or libraries that only a worker
opens, and an error that ends a worker would end the run.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

MOST_ROWS = 64
SECONDS = 0.05  # for all datasets of a run; one slow row can exceed it
_MOST_DEPTH = 8  # nesting of a row
_MOST_OBJECTS = 200  # attributes searched for random generators
_HASH_BYTES = 8


class UnknownValue(TypeError):
    """A row holds an object whose content cannot be hashed."""


def fingerprints(datasets: Mapping[str, Any], runs_code: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the fingerprint of each dataset by its name; all together take about `SECONDS`."""
    found = {}
    begun = time.perf_counter()
    for place, (name, dataset) in enumerate(datasets.items()):
        left = SECONDS - (time.perf_counter() - begun)
        found[name] = fingerprint(dataset, max(left, 0.0) / (len(datasets) - place), runs_code)
    return found


def fingerprint(dataset: Any, seconds: float = SECONDS, runs_code: bool = True) -> dict[str, Any]:
    """Returns the fingerprint of one dataset as JSON values.

    Args:
        dataset: a map-style dataset, a sequence of rows, or a tuple or dict of arrays with one row per sample. Anything
            else counts as a stream, of which nothing is read.
        seconds: no further row is read after this time; at least one is.
        runs_code: also read rows that the dataset's own code makes.

    Returns:
        `kind` (the class) and, where they are known, `fingerprint` (the one that a `datasets` dataset keeps), `length`,
        `rows` (hexadecimal hash by row index) and `note` (the reason why rows are missing).
    """
    found: dict[str, Any] = {"kind": f"{type(dataset).__module__}.{type(dataset).__qualname__}"}
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        found["fingerprint"] = own
    columns = array_columns(dataset)
    try:
        length = len(columns[0]) if columns else len(dataset)
    except Exception:  # user code; streams have no length, and some raise their own error
        return {**found, "note": "a stream: its rows are not read"}
    found["length"] = length
    if not columns and not hasattr(dataset, "__getitem__"):
        return {**found, "note": "rows have no index: they are not read"}
    if not runs_code and not columns and not is_passive(dataset):
        return {**found, "note": "worker processes load the data: rows are not read in the main process"}
    # that of a `datasets` dataset only drops references; another may close a file that the original still reads
    if not columns and hasattr(type(dataset), "__del__") and "fingerprint" not in found:
        return {**found, "note": "the class defines __del__, so that no copy can be read"}
    try:
        with _generators_kept(dataset):
            source = dataset if columns or type(dataset) in (list, tuple) else copy.copy(dataset)

            def read(index: int) -> Any:
                return [column[index] for column in columns] if columns else source[index]

            return {**found, **_hash_rows(read, length, seconds)}
    except Exception as error:  # user code: a dataset that cannot be read must not end a run
        return {**found, "note": f"a row could not be hashed ({type(error).__name__}: {str(error)[:200]})"}


def spread(length: int, most: int = MOST_ROWS) -> list[int]:
    """Returns up to `most` indices, evenly spread over `length` rows, in an order whose every prefix is spread too."""
    number = min(length, most)
    even = [place * (length - 1) // max(number - 1, 1) for place in range(number)]
    return sorted(even, key=lambda index: _reversed_bits(even.index(index)))


def hash_value(value: object) -> str:
    """Returns the hash of a row's content, equal in every process.

    Raises:
        UnknownValue: it holds an object of which only the address is known.
    """
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    _feed(digest, value, 0)
    return digest.hexdigest()


def array_columns(dataset: object) -> list[Any]:
    """Returns the arrays of a tuple or dict of arrays of equal length; else nothing."""
    values: list[Any] = []
    if isinstance(dataset, dict):
        values = list(dataset.values())
    elif isinstance(dataset, tuple):
        values = list(dataset)
    are_arrays = bool(values) and all(isinstance(value, np.ndarray) and value.ndim > 0 for value in values)
    return values if are_arrays and len({len(value) for value in values}) == 1 else []


def is_passive(dataset: Any) -> bool:
    """Returns True if reading a row runs no code of the user: a list, a `TensorDataset`, a `datasets` dataset.

    Parts of these (`Subset`, as of `random_split`) and concatenations of them are passive too.
    """
    kind = type(dataset)
    if kind.__module__ == "datasets.arrow_dataset":
        return getattr(dataset, "_format_type", None) != "custom"
    if kind.__module__ != "torch.utils.data.dataset":
        return kind in (list, tuple)
    if kind.__name__ == "Subset":
        return is_passive(dataset.dataset)
    if kind.__name__ == "ConcatDataset":
        return all(is_passive(part) for part in dataset.datasets)
    return kind.__name__ == "TensorDataset"


def _hash_rows(read: Callable[[int], Any], length: int, seconds: float) -> dict[str, Any]:
    begun = time.perf_counter()
    rows: dict[str, str] = {}
    indices = spread(length)
    for index in indices:
        rows[str(index)] = hash_value(read(index))
        if time.perf_counter() - begun > seconds:
            break
    if indices and hash_value(read(indices[0])) != rows[str(indices[0])]:
        return {"note": "rows are random: the same row was read twice with different contents"}
    found: dict[str, Any] = {"rows": dict(sorted(rows.items(), key=lambda item: int(item[0])))}
    if len(rows) < len(indices):
        found["note"] = f"reading was stopped after {seconds * 1000:.0f} ms: {len(rows)} of {len(indices)} rows"
    return found


def _reversed_bits(number: int) -> int:
    return int(f"{number:06b}"[::-1], 2)


def _feed(digest: hashlib.blake2b, value: object, depth: int) -> None:
    """Adds a value to a hash, tagged with its type, so that 1 and "1" differ."""
    if depth > _MOST_DEPTH:
        raise UnknownValue("it is nested too deeply")
    if value is None or isinstance(value, bool | int | float | complex | str):
        digest.update(f"{type(value).__name__}:{value!r};".encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        digest.update(b"bytes:%d;" % len(value))
        digest.update(value)
    elif isinstance(value, np.ndarray | np.generic):
        _feed_array(digest, np.asarray(value), depth)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(digest, str(key), depth + 1)
            _feed(digest, value[key], depth + 1)
        digest.update(b"mapping;")
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item, depth + 1)
        digest.update(b"sequence:%d;" % len(value))
    else:
        _feed_object(digest, value, depth)


def _feed_array(digest: hashlib.blake2b, array: np.ndarray, depth: int) -> None:
    if array.dtype.hasobject:
        _feed(digest, array.tolist(), depth + 1)
        return
    digest.update(f"array:{array.dtype.str}:{array.shape};".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def _feed_object(digest: hashlib.blake2b, value: Any, depth: int) -> None:
    if callable(getattr(value, "detach", None)):  # a tensor
        _feed_array(digest, _array_of(value), depth)
    elif callable(getattr(value, "tobytes", None)):  # an image
        facts = [getattr(value, name, None) for name in ("mode", "size")]
        digest.update(f"{type(value).__name__}:{facts};".encode())
        digest.update(value.tobytes())
    elif hasattr(value, "__dict__") and not callable(value):
        digest.update(f"{type(value).__name__};".encode())
        _feed(digest, vars(value), depth + 1)
    else:
        raise UnknownValue(f"an object of the class {type(value).__name__}")


def _array_of(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    try:
        array: np.ndarray = tensor.numpy()
    except TypeError:  # numpy has no bfloat16, which float32 holds exactly
        array = tensor.float().numpy()
    return array


# ---- random generators


@contextmanager
def _generators_kept(dataset: object) -> Iterator[None]:
    """Restores the random generators of this process, and those among the attributes of a dataset."""
    python, legacy = random.getstate(), np.random.get_state()
    own = [(generator, _state_of(generator)) for generator in _generators_in(dataset)]
    torch: Any = sys.modules.get("torch")
    states = _torch_states(torch)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        for generator, state in own:
            _set_state(generator, state)
        for restore, state in states:
            restore(state)


def _torch_states(torch: Any) -> list[tuple[Any, Any]]:
    """Returns (function that restores, state) of torch's generators; of a device only if it is in use."""
    if torch is None or not hasattr(torch, "get_rng_state"):
        return []
    states = [(torch.set_rng_state, torch.get_rng_state())]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if device is None else torch.get_device_module(device)
    is_started = getattr(module, "is_initialized", None)
    if module is None or (is_started is not None and not is_started()):
        return states
    suffix = "_all" if hasattr(module, "get_rng_state_all") else ""
    states.append((getattr(module, f"set_rng_state{suffix}"), getattr(module, f"get_rng_state{suffix}")()))
    return states


def _generators_in(dataset: object) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = [dataset]
    while pending and len(seen) < _MOST_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if _is_generator(value):
            found.append(value)
        elif type(value) in (list, tuple):  # of no other class, whose methods are user code
            pending += value[:16]
        elif type(value) is dict:
            pending += list(islice(value.values(), 16))
        else:
            pending += list(getattr(value, "__dict__", {}).values())
    return found


def _is_generator(value: object) -> bool:
    is_torch = type(value).__name__ == "Generator" and hasattr(value, "get_state") and hasattr(value, "set_state")
    return is_torch or isinstance(value, random.Random | np.random.Generator | np.random.RandomState)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
