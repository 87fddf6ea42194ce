"""Every class of the Hugging Face Trainer's trainer modules beside ours, member by member.

What is not the same is in `class_members.yaml`, with the reason; an entry that nothing needs fails.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_models import Classifier, classification, make_trainer

import paceline
from paceline.compat.private_names import UNCALLED

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (
    "trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq", "trainer_callback", "trainer_utils",
    "trainer_pt_utils", "trainer_jit_checkpoint", "trainer_optimizer", "optimization", "hf_argparser", "debug_utils",
    "data.data_collator", "integrations.integration_utils",
)  # fmt: skip
REASONS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("class_members.yaml").read_text(encoding="utf-8"))
# written by the language for every class
OF_THE_LANGUAGE = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__", "__firstlineno__",
    "__dataclass_params__", "__match_args__", "__static_attributes__", "__parameters__", "__hash__", "__replace__",
    "__qualname__", "__orig_bases__", "_abc_impl", "__new__", "__repr__", "__eq__", "__str__",
    "__slotnames__",
}  # fmt: skip


def public_objects() -> Iterator[tuple[str, str, Any]]:
    """(module, name, class or function) of everything that the Hugging Face Trainer's modules define."""
    for suffix in MODULES:
        module = importlib.import_module(f"transformers.{suffix}")
        for name, value in sorted(vars(module).items()):
            if getattr(value, "__module__", None) == module.__name__ and callable(value):
                yield suffix, name, value


def members_of(cls: type) -> dict[str, Any]:
    """Returns the members that a class and its bases define, without bases from other packages."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(("transformers", "paceline")):
            found.update(vars(base))
    return {name: value for name, value in found.items() if name not in OF_THE_LANGUAGE}


def plain(value: Any) -> Any:
    """A value to compare: members of an enumeration by their value."""
    return value.value if isinstance(value, Enum) else value


def function_of(member: Any) -> Any:
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def parameters_differ(theirs: Any, ours: Any) -> str:
    """Returns the reason why a call of their signature fails with ours; "" if it does not."""
    try:
        asked = list(inspect.signature(theirs).parameters.values())
        taken = list(inspect.signature(ours).parameters.values())
    except (TypeError, ValueError):
        return ""
    named = [item for item in asked if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    places = [item.name for item in taken]
    if [item.name for item in named] != [item.name for item in taken[: len(named)]]:
        return f"takes {places}, not {[item.name for item in asked]}"
    for kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
        kinds = [{item.kind.name for item in items} for items in (asked, taken)]
        if kind in kinds[0] and kind not in kinds[1]:
            return f"takes no {kind}"
    for item, mine in zip(named, taken, strict=False):
        if item.default is not item.empty and plain(mine.default) != plain(item.default):
            is_factory = "factory" in repr(item.default) and "factory" in repr(mine.default)
            if not is_factory:
                return f"{item.name} is {mine.default!r}, not {item.default!r}"
    more = [item for item in taken[len(named) :] if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    required = [item.name for item in more if item.default is item.empty]
    return f"needs {required}" if required else ""


def member_differs(theirs: Any, ours: Any) -> str:
    """Returns the reason why our member cannot replace theirs; "" if it can."""
    if isinstance(theirs, property | functools.cached_property) or type(theirs).__name__ == "_tuplegetter":
        return "" if hasattr(type(ours), "__get__") and not callable(ours) else "is no property"
    if isinstance(theirs, staticmethod | classmethod) and type(theirs) is not type(ours):
        return f"is no {type(theirs).__name__}"
    if callable(function_of(theirs)):
        return parameters_differ(function_of(theirs), function_of(ours))
    return "" if plain(ours) == plain(theirs) else f"is {ours!r}, not {theirs!r}"


def differences_of(name: str, theirs: type, ours: type) -> Iterator[tuple[str, str]]:
    """(place, what differs) between two classes."""
    names = {base.__name__ for base in ours.__mro__}
    for base in theirs.__mro__[1:]:
        if base.__name__ not in names:
            yield f"{name}:base {base.__name__}", "is no such class"
    if dataclasses.is_dataclass(theirs) and not dataclasses.is_dataclass(ours):
        yield f"{name}:dataclass", "is no dataclass"
    if issubclass(theirs, Enum):
        for item in theirs:
            if item.name not in ours.__members__ or ours[item.name].value != item.value:  # type: ignore[attr-defined,index]
                yield f"{name}.{item.name}", "is not the same"
        return
    mine = members_of(ours)
    for key, member in members_of(theirs).items():
        if key in mine:
            reason = member_differs(member, mine[key])
        else:  # of a base of another package, as torch's; or a field that has no default
            reason = "" if hasattr(ours, key) else "is not there"
        if reason:
            yield f"{name}.{key}", reason


@functools.cache
def differences() -> dict[str, str]:
    """Place -> what differs, of all classes and functions of the Hugging Face Trainer."""
    found: dict[str, str] = {}
    for module, name, theirs in public_objects():
        if name not in paceline.__all__:
            found[f"{module}/{name}"] = "is not a name of paceline"
        elif isinstance(theirs, type):
            found.update(differences_of(name, theirs, getattr(paceline, name)))
        elif reason := parameters_differ(theirs, getattr(paceline, name)):
            found[f"{module}/{name}"] = reason
    return found


def attributes_set(cls: type) -> set[str]:
    """Attributes that the methods of a class set on the object."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
            for item in ast.walk(target):
                if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
                    found.add(item.attr)
    return found


def missing_attributes(folder: Path) -> dict[str, str]:
    """Attributes of the Hugging Face Trainer's objects that ours have not."""
    trainer = make_trainer(folder, Classifier(), classification(8))
    callbacks = importlib.import_module("transformers.trainer_callback")
    pairs = [
        (transformers.Trainer, trainer),
        (transformers.TrainingArguments, trainer.args),
        (callbacks.CallbackHandler, trainer.callback_handler),
        (callbacks.TrainerState, trainer.state),
        (callbacks.TrainerControl, trainer.control),
    ]
    return {
        f"{theirs.__name__}()." + name: "is not there"
        for theirs, ours in pairs
        for name in attributes_set(theirs)
        if not hasattr(ours, name)
    }


def test_every_member_is_there_or_its_absence_has_a_reason(tmp_path: Path) -> None:
    found = {**differences(), **missing_attributes(tmp_path)}
    left = {place: what for place, what in found.items() if not any(fnmatch.fnmatchcase(place, key) for key in REASONS)}
    assert left == {}
    unneeded = [key for key in REASONS if not any(fnmatch.fnmatchcase(place, key) for place in found)]
    assert unneeded == []
    assert all(reason.strip() for reason in REASONS.values())


def test_every_private_method_can_be_named_on_the_class() -> None:
    """As `functools.wraps(Trainer._inner_training_loop)` does, when a library is imported."""
    for name, member in vars(transformers.Trainer).items():
        if inspect.isfunction(member) and not name.startswith("__"):
            ours = getattr(paceline.Trainer, name)
            assert functools.wraps(ours)(lambda: None).__name__ == name
            assert callable(ours)
    assert {"_inner_training_loop", "_nested_gather", "_rotate_checkpoints"} <= UNCALLED.keys()
