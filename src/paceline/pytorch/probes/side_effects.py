"""Undoes the side effects of an extra call of user code: counters, lists of metrics, sums.

An overridden `compute_loss`, loss function, hook or module may count its calls, or collect values to log. A pass that
only probes the loss must not be counted. Restored are numbers, strings, lists, dicts, sets, deques and small tensors
that user code reaches through attributes of its own objects and classes, through its closures, and through its globals.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

MAX_DEPTH = 4  # maximum nesting of containers
MAX_ITEMS = 1000  # items of longer containers are not visited; the container itself is still restored
MAX_NUMEL = 4096  # larger tensors are not restored
# objects of these libraries are skipped: their state is not the user's, module wrappers must keep the effects of a
# pass, and other threads may be using a queue
LIBRARIES = {"paceline", "torch", "transformers", "tokenizers", "datasets", "accelerate", "deepspeed", "numpy"}
LIBRARIES |= sys.stdlib_module_names - {"types"}
INTERNAL = {"training", "_parameters", "_buffers", "_modules"}  # of modules: restored elsewhere, or unchanged
CONTAINERS = (list, dict, set, deque)
PLAIN = (int, float, str, type(None), Tensor, *CONTAINERS)  # class attributes of these types are recorded
Undo = Callable[[], None]


@contextmanager
def undoing(owners: Iterable[Any]) -> Iterator[None]:
    """Restores on exit the plain values of these objects, functions and modules, and of objects they own."""
    memory = Memory()
    for owner in owners:
        memory.add_owner(owner)
    try:
        yield
    finally:
        memory.put_back()


def frozen_that_may_change(model: nn.Module) -> list[nn.Parameter]:
    """Returns the frozen parameters, which a forward pass may change, as those of a momentum encoder.

    None if they are more than the trained ones, as below adapters: copies would need more memory than the gradients.
    """
    known = [each for each in model.parameters() if each.is_floating_point() and not nn.parameter.is_lazy(each)]
    frozen = [each for each in known if not each.requires_grad]
    number = sum(each.numel() for each in frozen)
    return frozen if number <= sum(each.numel() for each in known if each.requires_grad) else []


class Memory:
    """Recorded values, and how to restore them."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._seen: dict[int, Any] = {}  # keeps recorded objects alive, so that no id is reused

    def put_back(self) -> None:
        """Restores all values; unchanged ones are not written."""
        for undo in self._undo:
            undo()

    def add_owner(self, owner: object, is_nested: bool = False) -> None:
        """Records the state of an object, a function or a module with its submodules."""
        if isinstance(owner, functools.partial | types.MethodType):
            self.add_owner(owner.func if isinstance(owner, functools.partial) else owner.__func__, is_nested)
            owner = getattr(owner, "__self__", None)
        if owner is None or isinstance(owner, type) or self._is_known(owner):
            return
        if isinstance(owner, types.FunctionType):
            self._add_function(owner)
        elif isinstance(owner, nn.Module):
            for module in owner.modules():
                if module is not owner:
                    self.add_owner(module, is_nested=True)
                hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
                for function in (type(module).forward, *hooks):
                    self.add_owner(function, is_nested=True)
            self._add_attributes(owner, is_nested=True)
        else:
            self._add_attributes(owner, is_nested)

    def _add_attributes(self, owner: object, is_nested: bool) -> None:
        attributes = getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict) or (is_nested and is_of_library(owner)):
            return
        kind, before = type(owner), {name: value for name, value in attributes.items() if name not in INTERNAL}

        def undo() -> None:
            if type(owner) is not kind:
                return  # a lazy module was initialized and changed its class
            for name in attributes.keys() - before.keys() - INTERNAL:
                del attributes[name]
            for name, value in before.items():
                if attributes.get(name, self) is not value:
                    attributes[name] = value

        self._undo.append(undo)
        for each in kind.__mro__:
            self._add_class(each)
        for value in before.values():
            self._add_value(value)
            if not is_nested and not isinstance(value, CONTAINERS):
                self.add_owner(value, is_nested=True)

    def _add_class(self, owner: type) -> None:
        if self._is_known(owner) or is_from_library(owner.__module__):
            return
        before = {name: value for name, value in vars(owner).items() if isinstance(value, PLAIN) and name[:2] != "__"}

        def undo() -> None:
            for name, value in before.items():
                if vars(owner).get(name, self) is not value:
                    setattr(owner, name, value)

        self._undo.append(undo)
        for value in before.values():
            self._add_value(value)

    def _add_function(self, function: types.FunctionType) -> None:
        if is_of_library(function):
            return
        cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if not is_empty(cell)]
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        variables = {name: function.__globals__[name] for name in names}

        def undo() -> None:
            for cell, value in cells:
                if cell.cell_contents is not value:
                    cell.cell_contents = value
            for name, value in variables.items():
                if function.__globals__.get(name) is not value:
                    function.__globals__[name] = value

        self._undo.append(undo)
        for value in (*(value for _, value in cells), *variables.values()):
            self._add_value(value)
        for value in (value for _, value in cells if not isinstance(value, CONTAINERS)):
            self.add_owner(value, is_nested=True)

    def _add_value(self, value: object, depth: int = 0) -> None:
        """Records the items of a container, and a small tensor that is not a parameter."""
        if isinstance(value, Tensor):
            if value.numel() <= MAX_NUMEL and type(value) is Tensor and not value.requires_grad:
                self._add_tensor(value)
        elif isinstance(value, CONTAINERS) and depth < MAX_DEPTH and not self._is_known(value):
            items = list(value.items() if isinstance(value, dict) else value)
            self._undo.append(functools.partial(restore, value, items))
            for item in items if len(items) <= MAX_ITEMS else ():
                self._add_value(item[1] if isinstance(value, dict) else item, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        if not self._is_known(tensor):
            version, before = tensor._version, tensor.detach().clone()
            self._undo.append(lambda: None if tensor._version == version else refill(tensor, before))

    def _is_known(self, value: object) -> bool:
        known = id(value) in self._seen
        self._seen[id(value)] = value
        return known


def restore(container: Any, items: list[Any]) -> None:
    """Restores a container's items, unless they are unchanged."""
    now = list(container.items() if isinstance(container, dict) else container)
    pairs = zip(now, items, strict=False)
    if isinstance(container, dict):
        is_same = all(new[0] is old[0] and new[1] is old[1] for new, old in pairs)
    else:
        is_same = all(new is old for new, old in pairs)
    if len(now) == len(items) and is_same:
        return
    container.clear()
    if isinstance(container, dict):
        dict.update(container, items)
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def refill(tensor: Tensor, values: Tensor) -> None:
    """Writes values into a tensor, unless user code changed its shape."""
    if tensor.shape == values.shape:
        tensor.detach().copy_(values)


def is_empty(cell: types.CellType) -> bool:
    """Returns True if a closure variable is unassigned."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def is_of_library(value: object) -> bool:
    """Returns True if a function, or the class of an object, comes from a library."""
    return is_from_library(value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__)


def is_from_library(module: object) -> bool:
    """Returns True if a module name belongs to a library."""
    return str(module).partition(".")[0] in LIBRARIES
