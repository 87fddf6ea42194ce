"""Construction of an arguments object: older names are translated, unknown ones refused with the closest match."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.args.errors import did_you_mean
from paceline.args.older_names import OLDER_NAMES, Retired, retired_values, translate
from paceline.args.places import BASE

# attributes of an object under construction
GIVEN = "_given_by_name"  # the keywords that the caller passed
TOLD = "_told"  # the warnings that were given for the object that this one is a copy of; None if it is no copy


@functools.cache
def parameters_of(initializer: Any) -> tuple[frozenset[str], bool]:
    """Returns the keywords of an `__init__`, and True if it accepts any keyword."""
    parameters = inspect.signature(initializer).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters), takes_any


def defaults_of(cls: type) -> dict[str, Any]:
    """Returns the fields of an arguments class with their defaults."""
    defaults: dict[str, Any] = {}
    for item in fields(cls) if is_dataclass(cls) else ():
        if item.init:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            defaults[item.name] = None if default is MISSING else default
    return defaults


def checked_keywords(cls: Any, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keywords `given` under their names in `cls`, and the retired options among them.

    Raises:
        TypeError: a name is unknown; the message contains the closest known one.
        UnsupportedOption: a retired option has a value with an effect.
    """
    names, takes_any = parameters_of(cls.__init__)
    if names.issuperset(given):
        return given, {}
    known = {**dict.fromkeys(names), **defaults_of(cls)}
    retired = retired_values(given, known)
    result = translate(given, known, cls.__name__)
    unknown = [] if takes_any else [name for name in result if name not in names]
    if unknown:
        hint = did_you_mean(unknown[0], [*known, *OLDER_NAMES])
        raise TypeError(
            f"{cls.__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}: no such option{hint}"
        )
    return result, retired


def replaced_object(cls: type, caller: FrameType) -> Any:
    """Returns the object that `dataclasses.replace` copies if it is the caller; None for any other call.

    `replace` passes every field; a comparison with the object shows which fields were changed. Before 3.13, Python
    calls no method of the class that would report this.
    """
    if caller.f_globals.get("__name__") != "dataclasses":
        return None
    source = caller.f_locals.get("obj", caller.f_locals.get("self"))
    return source if type(source) is cls else None


def names_written(source: Any, given: dict[str, Any]) -> set[str]:
    """Returns the options that a `dataclasses.replace` of `source` sets explicitly.

    These are the changed fields, and the current names of unchanged fields under older names. If a field under an older
    name is changed, the option that was derived from it is removed from `given`.
    """
    held = vars(source)
    changed = {name for name, value in given.items() if name not in held or held[name] is not value}
    written = set(changed)
    for name, entry in OLDER_NAMES.items():
        if isinstance(entry, Retired) or entry.new in changed:
            continue
        if name in changed:
            given.pop(entry.new, None)
        elif name in given:
            written.add(entry.new)
    return written


def underived(source: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a `dataclasses.replace` with the user's values where `source` holds derived ones.

    The copy derives them anew: `replace(args, metric_for_best_model="accuracy")` has the direction of accuracy, not
    that of the metric before.
    """
    held = vars(source)
    own = {name: value for name, value in held.get("_given", {}).items() if given.get(name) is held[name]}
    return {**given, **own}


def option_docs() -> Any:
    """Returns the module that documents options; few programs read what it writes."""
    return importlib.import_module("paceline.args.option_docs")


class ArgumentsMeta(type):
    """Checks the keywords of a call before any `__init__`, including a subclass's."""

    if not TYPE_CHECKING:  # Type checkers read the signature of __init__.

        def __call__(cls, *values: Any, **given: Any) -> Any:
            source = replaced_object(cls, sys._getframe(1))
            written = given.keys() if source is None else names_written(source, given)
            if source is not None:
                given = underived(source, given)
            keywords, retired = checked_keywords(cls, given)
            made = cls.__new__(cls, *values, **keywords)
            vars(made)[GIVEN] = frozenset(keywords if source is None else written)
            vars(made)[TOLD] = None if source is None else vars(source).get(TOLD, frozenset())
            made.__init__(*values, **keywords)
            if source is not None and BASE in vars(source):
                vars(made)[BASE] = vars(source)[BASE]
            vars(made).pop(GIVEN, None)
            vars(made).update(retired)
            return made

        @property
        def __doc__(cls) -> str:
            """The docstring as written, followed by the text of each option; built when it is read."""
            own = type.__dict__["__doc__"].__get__(cls, type(cls)) or ""
            # @dataclass reads the docstring between setting these two; the text of all options takes 6 ms
            is_being_made = "__dataclass_params__" in vars(cls) and "__match_args__" not in vars(cls)
            return option_docs().class_doc(cls, own) if is_dataclass(cls) and not is_being_made else own

        @__doc__.setter
        def __doc__(cls, text: str) -> None:
            type.__dict__["__doc__"].__set__(cls, text)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature of `__init__`, which the `__call__` above would hide."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])
