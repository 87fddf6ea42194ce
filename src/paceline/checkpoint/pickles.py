"""Safe unpickling: plain values, and calls to an allow-list of names. Nothing is imported.

Python's own unpickler resolves names to live objects, and lets a file call them and set their attributes. Here a name
becomes an inert `Name`, which only the caller's constructors interpret. Opcodes that no checkpoint needs are refused,
and so are values that are nested too deeply or grow too large through repeated references.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

MOST_DEPTH = 200
_MOST_SHARING = 100  # maximum ratio of a value's expanded size to its stored size
_LEAST_LIMIT = 100_000  # number of values; smaller expanded sizes are always allowed
_MOST_COPIED = 16  # maximum ratio of the bytes that calls copy to the bytes of the pickle so far
_LEAST_COPIED = 1 << 26  # bytes; smaller copies are not checked
_MOST_KEY_ITEMS = 32  # values in a key that is a tuple of tuples

# The opcodes that torch.save and pickle.dump write. Excluded: text forms, extensions, instances by keyword, and bytes
# or integers with a length prefix that is trusted before they are read.
_OPCODES = [
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM",
    "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID",
]  # fmt: skip

_CONTAINERS = (dict, list, tuple, set, frozenset)

Constructor = Callable[..., Any]


class Refused(pickle.UnpicklingError):
    """A pickle requests an operation that is not allowed."""


class Name:
    """An inert placeholder for a global that a pickle names.

    Attributes:
        path: module and qualified name.
        construct: returns the result of a call; None if calls are refused.
    """

    __slots__ = ("construct", "path")

    def __init__(self, path: str, construct: Constructor | None = None) -> None:
        self.path, self.construct = path, construct

    def call(self, *values: Any) -> Any:
        """Returns the result of a call by the pickle. Raises: Refused."""
        if self.construct is None:
            raise Refused(f"it calls {self.path}, which is not allowed")
        return self.construct(*values)

    def new(self, *values: Any) -> Any:
        """Returns the result of a construction by `__new__` in the pickle. Raises: Refused."""
        return self.call(*values)


class Buildable:
    """The result of a constructor whose state the pickle sets afterwards."""

    def built(self, state: object) -> Any:
        """Returns the value that replaces this object."""
        raise NotImplementedError


_Unpickler: Any = pickle._Unpickler  # the Python implementation, whose opcode table can be replaced


class DataUnpickler(_Unpickler):  # type: ignore[misc]  # the Python implementation has no stub
    """Reads one pickle after another from a file.

    Args:
        find: maps the path of a global to its placeholder. Raises `Refused` for unknown ones.
        find_storage: maps the content of a persistent id to its value.
        set_state: sets the state of an object of a class that `find` knows. Raises `Refused` for all others.
    """

    def __init__(
        self,
        file: Any,
        find: Callable[[str], Any],
        find_storage: Callable[[Any], Any] | None = None,
        set_state: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._find, self._find_storage, self._set_state = find, find_storage, set_state
        self._file, self._num_copied = file, 0

    def load(self) -> Any:
        """Returns the value of the next pickle. Raises: `Refused`, and many other types for damaged bytes."""
        value = super().load()
        check_nest(value)
        return value

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # the name in pickles of protocol 2 that also support Python 2
            module = "builtins"
        return self._find(f"{module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        if self._find_storage is None:
            raise Refused("it refers to something outside of itself")
        return self._find_storage(pid)

    def _call(self) -> None:
        arguments, function = self._called()
        self.append(function.call(*arguments))

    def _new(self) -> None:
        arguments, function = self._called()
        self.append(function.new(*arguments))

    def _called(self) -> tuple[tuple[Any, ...], Name]:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or not isinstance(function, Name):
            raise Refused(f"it calls a {type(function).__name__}, which is not allowed")
        self._count(arguments)
        return arguments, function

    def _count(self, given: Any) -> None:
        """Limits the bytes that calls copy: a pickle can reference an existing value again in two bytes."""
        parts = given if isinstance(given, tuple) else ()
        self._num_copied += sum(_weight(part) for part in parts)
        if self._num_copied > _LEAST_COPIED and self._num_copied > _MOST_COPIED * self._file.tell():
            raise Refused(f"it copies {self._num_copied:,} bytes, many times its own length")

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        self._count(state)
        if type(target) is OrderedDict:  # `_metadata` of a module's state dict: the versions of its submodules
            if isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # as torch sets it
            return
        if self._set_state is not None and not isinstance(target, Buildable):
            self._set_state(target, state)
            return
        if not isinstance(target, Buildable):
            raise Refused(f"it sets attributes of a {type(target).__name__}, which is not allowed")
        value = target.built(state)
        self.stack[-1] = value
        self.memo.update({key: value for key, held in self.memo.items() if held is target})

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_pairs([key, value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set_pairs(items)

    def _set_pairs(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise Refused(f"it sets items of a {type(target).__name__}, which is not allowed")
        check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused(f"it appends to a {type(self.stack[-1]).__name__}, which is not allowed")
        self.stack[-1].extend(items)

    def _add_items(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise Refused(f"it adds to a {type(self.stack[-1]).__name__}, which is not allowed")
        check_keys(items)
        self.stack[-1].update(items)

    def _freeze(self) -> None:
        items = self.pop_mark()
        check_keys(items)
        self.append(frozenset(items))

    dispatch = {getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES}
    dispatch.update(
        {
            pickle.REDUCE[0]: _call,
            pickle.NEWOBJ[0]: _new,
            pickle.BUILD[0]: _build,
            pickle.SETITEM[0]: _set_item,
            pickle.SETITEMS[0]: _set_items,
            pickle.APPEND[0]: _append,
            pickle.APPENDS[0]: _appends,
            pickle.ADDITEMS[0]: _add_items,
            pickle.FROZENSET[0]: _freeze,
        }
    )


def _weight(value: object) -> int:
    """Returns the approximate bytes of a copy; 0 for values whose tensors are not copied."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, _CONTAINERS):
        return 32 * len(value)
    return getattr(value, "nbytes", 0) if type(value).__module__ == "numpy" else 0


def check_keys(keys: Iterable[Any]) -> None:
    """Refuses deep or large nested tuples as keys: hashing recurses without a limit and can crash the process."""
    for key in keys:
        num_items = 0
        pending: list[Iterable[Any]] = [key] if isinstance(key, tuple) else []
        while pending:
            inner = [item for item in pending.pop() if isinstance(item, tuple | frozenset)]
            num_items += sum(1 + len(item) for item in inner)
            if num_items > _MOST_KEY_ITEMS:
                raise Refused(f"a key is a tuple of tuples of more than {_MOST_KEY_ITEMS} values")
            pending += inner


def check_nest(root: object) -> None:
    """Refuses a value that is nested too deeply, contains itself, or grows out of proportion when expanded.

    Costs about a microsecond per container. Raises: Refused.
    """
    measured: dict[int, tuple[int, int]] = {}  # id -> (depth, number of values after expansion of shared parts)
    entered: set[int] = set()
    num_values = 0
    pending = [root] if isinstance(root, _CONTAINERS) else []
    while pending:
        value = pending[-1]
        key = id(value)
        if key in measured:
            pending.pop()
            continue
        held = value.values() if isinstance(value, dict) else value
        inner = [child for child in held if isinstance(child, _CONTAINERS)]
        if not inner:  # most are: an optimizer has a dict of tensors for each parameter
            pending.pop()
            num_values += len(value)
            measured[key] = 1, len(value)
            continue
        if key not in entered:
            entered.add(key)
            waiting = [child for child in inner if id(child) not in measured]
            if any(id(child) in entered for child in waiting):
                raise Refused("a value contains itself")
            pending += waiting
            continue
        pending.pop()
        sizes = [measured[id(child)] for child in inner]
        depth = 1 + max(each for each, _ in sizes)
        size = len(value) + sum(each for _, each in sizes)
        num_values += len(value)
        measured[key] = depth, size
        if depth > MOST_DEPTH:
            raise Refused(f"values are nested deeper than {MOST_DEPTH}")
        if size > max(_LEAST_LIMIT, _MOST_SHARING * num_values):
            raise Refused(f"parts are used again so often that they make {size:,} values")
