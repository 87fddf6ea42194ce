"""An accelerator named `standin` that is registered with torch and computes on the host.

It is registered through torch's interface for backends in Python (`_setup_privateuseone_for_python_backend`), as
accelerators outside of torch register theirs: tensors are of the device `standin:0`, `torch.accelerator` finds it, and
mixing its tensors with those of the CPU is an error. Registration lasts as long as the process. The device has no
addresses, no page-locked memory and no autocast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
CPU = torch.device("cpu")
# Views are made on the host: torch would compute their strides from those of the device's tensors, all contiguous.
VIEWS = ("t", "transpose.int", "permute", "expand", "select.int", "slice.Tensor", "squeeze", "squeeze.dim")
VIEWS += ("squeeze.dims", "unsqueeze", "unbind.int", "split.Tensor", "split_with_sizes", "diagonal")

_values: dict[int, torch.Tensor] = {}  # by storage: what a tensor of the device contains
_libraries: list[torch.library.Library] = []  # a registration ends with its library


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class Module:
    """`torch.standin`: what torch asks of every backend, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.seeds: list[int] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def wrap(values: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the device with these values. Memory is reused, never freed: for short tests."""
    tensor = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)
    _values[tensor.untyped_storage()._cdata] = values
    return tensor


def unwrap(value: Any) -> Any:
    """Returns what an operation is given on the host."""
    if is_on_device(value):
        return _values[value.untyped_storage()._cdata]
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def compute(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs any operation of the device on the host. Random ones draw from the device's generator."""
    leaves = pytree.tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device == CPU and leaf.dim() > 0:
            raise RuntimeError(f"{operation}: expected all tensors on {NAME}, found one on the CPU")
    given = {id(unwrap(leaf)): leaf for leaf in leaves if is_on_device(leaf)}
    host = torch.get_rng_state()
    module = getattr(torch, NAME)
    torch.set_rng_state(module.generator.get_state())
    try:
        found = operation(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
        module.generator.set_state(torch.get_rng_state())
    finally:
        torch.set_rng_state(host)
    return pytree.tree_map(
        lambda each: (
            (given.get(id(each)) if id(each) in given else wrap(each)) if isinstance(each, torch.Tensor) else each
        ),
        found,
    )


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    unwrap(target).copy_(unwrap(source))
    return target


def view(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    return wrap(unwrap(tensor).reshape(size))


def as_strided(tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    values = unwrap(tensor)
    if not values.is_contiguous():
        raise NotImplementedError(f"as_strided of a view of {NAME}: add the operation to VIEWS")
    return wrap(values.as_strided(size, stride, storage_offset))


def make_empty(size: Any, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return wrap(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def register() -> None:
    """Registers the device in this process."""
    module = Module()
    _setup_privateuseone_for_python_backend(NAME, module, Hooks(), Guard())
    every = torch.library.Library("_", "IMPL")
    every.fallback(compute, "PrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_copy_from": copy_from,
        "empty.memory_format": make_empty,
        "empty_strided": make_empty,
        "view": view,
        "as_strided": as_strided,
    }.items():
        some.impl(name, function, "PrivateUse1")
    for name in VIEWS:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        some.impl(name, functools.partial(compute, operation), "PrivateUse1")
    _libraries.extend([every, some])
    torch.accelerator.synchronize = lambda device=None: None  # the one function that torch does not pass on to Python


def record_calls(module: Any, package: str) -> list[str]:
    """Records each call of a public function of `module` whose caller is a module of `package`."""
    found: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__", "").startswith(package):
                found.append(f"{module.__name__}.{name} in {caller.f_code.co_filename}:{caller.f_lineno}")
            return function(*args, **kwargs)

        return call

    for name, function in list(vars(module).items()):
        if callable(function) and not isinstance(function, type) and not name.startswith("_"):
            setattr(module, name, recorded(name, function))
    return found
