"""Asynchronous checkpoint writing: a copy in host memory, and one thread that writes files from it."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.checkpoint.adapters import has_adapters
from paceline.pytorch.checkpoint.tensors import plain_values, save_plain
from paceline.pytorch.checkpoint.weights import Sorted, address_of, num_bytes
from paceline.pytorch.data.prefetch import has_pinned_memory

Key = tuple[torch.dtype, torch.Size, tuple[int, ...]]

LOWER_PRIORITY = 10  # niceness, at most 19; gives the thread about a tenth of a busy core

_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_SMALL_BYTES = 1 << 15
_LIBRARIES = ("transformers", "peft")  # libraries whose save_pretrained needs nothing but the model


class NotCopyable(Exception):
    """Raised if a model cannot be copied for asynchronous writing; the message gives the reason."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Stops the cyclic garbage collector for a block that makes many objects and keeps them.

    Each collection would walk all objects of the process, 0.2 s with the libraries loaded, and free none of these.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class HostBuffers:
    """Host memory that successive copies reuse: allocating new pages costs several times as much as copying.

    Copies of small tensors are made anew: they fit in pages that the process has, and finding a buffer costs more.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[Tensor]] = {}
        self._used: list[tuple[Key, Tensor]] = []
        # By address. Sources are kept alive, so that no other tensor can get their address before `finish`.
        self._sources: dict[Hashable, Tensor] = {}
        self._copies: dict[Hashable, Tensor] = {}
        self._others: list[Tensor] = []  # earlier sources at an address that was copied again, in another form

    @property
    def num_bytes(self) -> int:
        """Returns the size of all buffers in bytes."""
        held = chain((buffer for _, buffer in self._used), chain.from_iterable(self._free.values()))
        return sum(map(num_bytes, held))

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to the host. Copies of the same tensor share a buffer. Call `finish` before reading them."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        address = tensor.data_ptr() or address_of(tensor)
        earlier = self._sources.get(address)
        if earlier is not None:
            if _is_same(tensor, earlier):
                return self._copies[address]
            self._others.append(earlier)
        is_small = tensor.is_cpu and tensor.nbytes <= _SMALL_BYTES
        self._sources[address] = tensor
        self._copies[address] = copied = tensor.clone() if is_small else self._fill(tensor)
        return copied

    def _fill(self, tensor: Tensor) -> Tensor:
        """Copies a tensor into a free buffer of its form, or a new one."""
        is_pinned = not tensor.is_cpu and has_pinned_memory()
        stride = tensor.stride()
        if not tensor.is_contiguous():
            stride = torch.empty_like(tensor, device="meta").stride()  # dense, in the same order of dimensions
        key = (tensor.dtype, tensor.shape, stride)
        free = self._free.get(key)
        if free:
            buffer = free.pop()
        else:
            buffer = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
        self._used.append((key, buffer))
        return buffer.copy_(tensor, non_blocking=is_pinned)

    def finish(self) -> None:
        """Waits for copies from an accelerator, and frees buffers of earlier copies that this copy did not reuse."""
        is_waiting = not all(source.is_cpu for source in chain(self._sources.values(), self._others))
        if is_waiting and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._forget_sources()
        self._free.clear()

    def give_back(self) -> None:
        """Makes the buffers available to the next copies; call it after the copies have been written."""
        self._forget_sources()
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()

    def clear(self) -> None:
        """Frees the memory."""
        self._free.clear()
        self._used.clear()
        self._forget_sources()

    def _forget_sources(self) -> None:
        self._sources.clear()
        self._copies.clear()
        self._others.clear()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """True if two strided tensors at one address are views of the same values."""
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.device == other.device
    )


class HostCopy:
    """The contents of one checkpoint's files, copied to the host. `write` writes the files later, and can be retried
    if it fails.
    """

    def __init__(self, buffers: HostBuffers) -> None:
        self.buffers = buffers
        self._writes: list[Callable[[], Any]] = []

    def add(self, write: Callable[[], Any]) -> None:
        """Adds a function that writes files; it must not use anything that training changes."""
        self._writes.append(write)

    def add_tensors(self, state: object, path: str | os.PathLike[str]) -> None:
        """Adds a call of `save_tensors`. Raises TypeError immediately for values that could not be read back."""
        copied = plain_values(state, Path(path).name, self.buffers.copy)
        self._writes.append(partial(save_plain, copied, path))

    def add_weights(self, weights: Sorted, write: Callable[[Sorted], None]) -> None:
        """Adds a call of `write` with a copy of the weights. Raises TypeError immediately, like `add_tensors`."""
        tensors = {name: self.buffers.copy(tensor) for name, tensor in weights.tensors.items()}
        extra = plain_values(weights.extra, "the model's extra state", self.buffers.copy)
        self._writes.append(partial(write, Sorted(tensors, weights.tied, extra)))

    def add_model(self, model: nn.Module, folder: str | os.PathLike[str]) -> None:
        """Adds a call of `save_pretrained` on a copy of the whole model.

        Raises: NotCopyable, if the model has special tensors or attributes that cannot be copied.
        """
        try:
            copied: Any = copied_model(model, self.buffers.copy)
        except NotCopyable:
            raise
        except Exception as error:  # any object can be an attribute of a module
            raise NotCopyable(f"a part of the model cannot be copied: {type(error).__name__}: {error}") from error
        self._writes.append(partial(copied.save_pretrained, os.fspath(folder)))

    def write(self) -> None:
        """Writes everything."""
        for write in self._writes:
            write()


def copied_model(model: nn.Module, copy_tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a deep copy of a model, including hooks and configuration, whose tensors `copy_tensor` copies.

    If only adapters are saved, the frozen weights are shared with `model`.

    Raises: NotCopyable, for quantized weights and other special tensors.
    """
    made: dict[int, Any] = {}
    only_trained = has_adapters(model)
    for tensor in chain(model.parameters(), model.buffers()):
        if only_trained and not tensor.requires_grad:
            made[id(tensor)] = tensor
            continue
        if type(tensor) not in _PLAIN_TYPES:
            raise NotCopyable(f"the model has a {type(tensor).__name__}")
        copied = copy_tensor(tensor)
        made[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return copy.deepcopy(model, made)


def writes_itself_safely(model: nn.Module) -> bool:
    """True if `model.save_pretrained` can be called on a copy of the model: it is a library's method, not a user's."""
    module = getattr(getattr(type(model), "save_pretrained", None), "__module__", "") or ""
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    return module.partition(".")[0] in _LIBRARIES and not is_quantized


def size_of(tensors: Iterable[Tensor]) -> int:
    """Returns the total bytes of the tensors. Of those at one address the largest counts; those on "meta" do not."""
    sizes: dict[Hashable, int] = {}  # by address
    for tensor in tensors:
        if tensor.is_meta:
            continue
        address, size = tensor.data_ptr() or address_of(tensor), tensor.nbytes
        if size > sizes.get(address, -1):
            sizes[address] = size
    return sum(sizes.values())


def available_host_memory() -> int | None:
    """Returns the host memory in bytes that the system and this process's cgroup have left; None if unknown."""
    known = [value for value in (_system_memory(), _group_memory()) if value is not None]
    return min(known, default=None)


def _system_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_memory() -> int | None:
    """Returns the free bytes of the cgroup (version 2) that a container runs in; None if unknown."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        reclaimable = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(reclaimable.get("file", 0))
    except (OSError, ValueError):
        return None


class Writer:
    """Runs one task at a time on a background thread.

    Attributes:
        is_due: a task has ended and `settle` should be called. A plain attribute, since each step reads it.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended: Callable[[BaseException | None], None] | None = None
        self._wake: Callable[[], None] | None = None
        self._is_awaited = False  # the loop waits for the task

    def listen(self, wake: Callable[[], None]) -> None:
        """Sets the function that the thread calls after it has set `is_due`."""
        self._wake = wake

    @property
    def is_busy(self) -> bool:
        """True if a task was started and has not been settled."""
        return self._thread is not None

    def start(self, work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """Runs `work` on the thread, after waiting for the previous task; `settle` calls `ended` with the exception of
        `work` or None.
        """
        self.join()
        self._error, self._ended, self._is_awaited = None, ended, False
        # not a daemon, so that an exiting interpreter waits for the checkpoint that is being written
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Calls `ended` of a finished task, on this thread; does nothing while it is running."""
        thread, ended = self._thread, self._ended
        if thread is None or not self.is_due:
            return
        thread.join()
        self.is_due, self._thread, self._ended = False, None, None
        error, self._error = self._error, None
        if ended is not None:
            ended(error)

    def join(self) -> None:
        """Waits for the running task, at the priority of this thread, and settles it."""
        if self._thread is not None:
            self._is_awaited = True
            if sys.platform == "linux" and self._thread.is_alive() and self._thread.native_id is not None:
                with suppress(OSError):  # not every user may raise a priority
                    os.setpriority(os.PRIO_PROCESS, self._thread.native_id, os.getpriority(os.PRIO_PROCESS, 0))
            self._thread.join()
            self.settle()

    def _run(self, work: Callable[[], None]) -> None:
        # on Linux each thread has its own priority; training takes precedence
        if sys.platform == "linux" and not self._is_awaited:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER_PRIORITY)
        try:
            work()
        except BaseException as error:
            self._error = error
        self.is_due = True
        if self._wake is not None:
            self._wake()
