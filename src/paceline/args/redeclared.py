"""Options of paceline whose names a subclass of the arguments declares for itself, as TRL's SFTConfig does `packing`.

The subclass then defines the meaning of that field, and paceline's option of the same name is unset. paceline reads its
options through `own_options`; users, callbacks and records see the arguments with the subclass's values.
"""

from __future__ import annotations

import functools
from dataclasses import MISSING, Field
from typing import Any, TypeVar

from paceline.args.sections import Options, PacelineSection

RECORDS = ("to_dict", "to_sanitized_dict", "to_json_string", "__repr__", "__eq__")
Arguments = TypeVar("Arguments")

# options of earlier releases of transformers, which a subclass of arguments redeclares in their known meaning
INHERITED = frozenset({"logging_dir", "half_precision_backend", "fp16_opt_level", "tpu_num_cores"})
OWN = frozenset(PacelineSection.__dataclass_fields__) - INHERITED


@functools.cache
def redeclared(cls: type) -> tuple[str, ...]:
    """Returns paceline's own options that a class of arguments declares anew, sorted; empty for any other class."""
    if not issubclass(cls, Options):
        return ()
    given, ours = cls.__dataclass_fields__, Options.__dataclass_fields__
    return tuple(sorted(name for name in OWN if given[name] is not ours[name]))


def is_redeclared(cls: type, name: str) -> bool:
    """True if an arguments class declares this option of paceline anew."""
    return name in redeclared(cls)


def own_options(args: Arguments) -> Arguments:
    """Returns the arguments as paceline reads them: each own option that their class redeclares has its default.

    The result shares the values of `args`, so that later assignments to either are seen in both. It is `args` itself if
    the class redeclares none.
    """
    cls: type = type(args)
    if getattr(cls, "_is_own_view", False) or not redeclared(cls):
        return args
    view: Any = object.__new__(view_class(cls))
    object.__setattr__(view, "__dict__", args.__dict__)
    return view  # type: ignore[no-any-return]


@functools.cache
def view_class(cls: type) -> type:
    """Returns a subclass of an arguments class in which the options that it redeclares are read-only defaults."""
    members: dict[str, Any] = {name: property(default_reader(name)) for name in redeclared(cls)}
    members.update({name: record_writer(cls, name) for name in RECORDS if hasattr(cls, name)})
    members.update(_is_own_view=True, __module__=cls.__module__, __qualname__=cls.__qualname__)
    return type(cls)(cls.__name__, (cls,), members)


def record_writer(cls: type, name: str) -> Any:
    """Returns a method of the view that records the values of the subclass, as the arguments themselves do."""

    def write(view: object, *args: Any, **kwargs: Any) -> Any:
        declared: Any = object.__new__(cls)
        object.__setattr__(declared, "__dict__", view.__dict__)
        return getattr(declared, name)(*args, **kwargs)

    return write


def default_reader(name: str) -> Any:
    """Returns a getter of the default of an option of paceline."""
    declared: Field[Any] = Options.__dataclass_fields__[name]

    def read(_: object) -> Any:
        return declared.default_factory() if declared.default_factory is not MISSING else declared.default

    return read


def note_on_redeclared(args: Any) -> list[str]:
    """Returns a sentence that names the own options that the class of `args` redeclares; empty if there are none."""
    cls = next(each for each in type(args).__mro__ if not each.__dict__.get("_is_own_view", False))
    names = redeclared(cls)
    if not names:
        return []
    return [f"{cls.__name__} declares {', '.join(names)} itself: paceline's own are unset."]
