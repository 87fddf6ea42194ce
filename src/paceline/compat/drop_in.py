"""Replaces transformers' classes under existing scripts and libraries; users import it as `paceline.drop_in`.

    from paceline import drop_in
    drop_in.install()                       # first thing in the script
    from trl import SFTTrainer              # now a subclass of paceline.Trainer

Every public name of paceline that transformers defines too is replaced: in transformers itself, at the top level and in
submodules, and in modules that imported it from there. Existing subclasses of transformers' Trainer and callbacks get
paceline's classes as their bases.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import paceline
from paceline.compat.older_imports import add_names, remove_names
from paceline.core.optional import require
from paceline.pytorch.distributed.world import process_state

logger = logging.getLogger(__name__)

# submodules that define public names; imported before any replacement, so that transformers' own classes stay intact
DEFINING_MODULES = (
    "trainer",
    "trainer_seq2seq",
    "training_args",
    "training_args_seq2seq",
    "trainer_callback",
    "trainer_utils",
    "trainer_pt_utils",
    "optimization",
    "hf_argparser",
    "data.data_collator",
    "data",
    "integrations.integration_utils",
    "debug_utils",
    "trainer_jit_checkpoint",
    "utils.notebook",
)
# classes without class-level state, so that their subclasses can be given another base
MOVABLE = ("Trainer", "Seq2SeqTrainer", "TrainerCallback")
USAGE = "usage: python -m paceline.drop_in (script.py | -m module) [arguments of the script]"


@dataclass
class Replaced:
    """The changes that `install` made, for `uninstall`.

    Attributes:
        pairs: name -> (the object of transformers, ours).
        names: (module, name, previous object) in modules outside transformers.
        moved: (class, its previous bases).
        added: (module, name) of names that transformers itself does not export.
    """

    pairs: dict[str, tuple[Any, Any]]
    names: list[tuple[ModuleType, str, Any]] = field(default_factory=list)
    moved: list[tuple[type, tuple[type, ...]]] = field(default_factory=list)
    added: list[tuple[ModuleType, str]] = field(default_factory=list)


_done: list[Replaced] = []  # empty, or the one active installation


def is_installed() -> bool:
    """True if transformers exports paceline's classes now."""
    return bool(_done)


def install() -> None:
    """Replaces transformers' names by paceline's. A second call changes nothing.

    Call this function before libraries that build on the Trainer are imported, so that their classes derive from
    paceline's. Earlier imports are converted if possible. One warning names the others: existing trainer objects, and
    classes whose base Python cannot change.

    Raises:
        ImportError: transformers is not installed; the message names the extra.
    """
    if _done:
        return
    done = Replaced(find_pairs())
    by_identity = {id(theirs): (theirs, ours) for theirs, ours in done.pairs.values()}
    for module in modules_but_ours():
        for name, theirs in replace_names(module, by_identity):
            if not is_of(module, "transformers"):
                done.names.append((module, name, theirs))
    done.added = add_names()
    left = move_subclasses(done)
    _done.append(done)
    process_state()
    if left:
        logger.warning(
            "Imported before paceline.drop_in.install(), and left on transformers: %s. Call install() first, before "
            "these are imported, or start the script with `python -m paceline.drop_in`.",
            "; ".join(left),
        )


def uninstall() -> None:
    """Restores transformers' own classes. Classes of libraries imported meanwhile stay derived from paceline's."""
    if not _done:
        return
    done = _done.pop()
    remove_names(done.added)
    by_identity = {id(ours): (ours, theirs) for theirs, ours in done.pairs.values()}
    for module in modules_but_ours():
        if is_of(module, "transformers"):
            replace_names(module, by_identity)
    for module, name, theirs in done.names:
        setattr(module, name, theirs)
    for cls, bases in done.moved:
        cls.__bases__ = bases
    for theirs, ours in (done.pairs[name] for name in MOVABLE if name in done.pairs):
        for cls in ours.__subclasses__():
            if cls.__module__.startswith("transformers."):  # a class in a module that was imported meanwhile
                change_base(cls, ours, theirs)


@contextmanager
def installed() -> Iterator[None]:
    """Runs `install()` for a `with` block; an earlier installation stays after it."""
    was_installed = is_installed()
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def find_pairs() -> dict[str, tuple[Any, Any]]:
    """Returns every public name of paceline that transformers defines too, with both objects."""
    require("transformers", "transformers")
    pairs = {}
    for suffix in DEFINING_MODULES:
        try:
            module = importlib.import_module(f"transformers.{suffix}")
        except ImportError as error:  # not in this release, or it needs a missing package
            logger.debug("transformers.%s is missing: %s", suffix, error)
            continue
        for name in paceline.__all__:
            theirs = vars(module).get(name)
            if name not in pairs and getattr(theirs, "__module__", "").startswith("transformers"):
                pairs[name] = (theirs, getattr(paceline, name))
    return pairs


def modules_but_ours() -> list[ModuleType]:
    """Returns the modules imported so far and transformers' modules that they reference, except this package's.

    transformers replaces its own module by a second one during import; earlier importers keep the first one.
    """
    # type(), because reading __class__ of some objects causes a warning
    found = {id(module): module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)}
    for module in list(found.values()):
        held = [value for value in list(vars(module).values()) if issubclass(type(value), ModuleType)]
        found.update((id(value), value) for value in held if is_of(value, "transformers"))
    return [module for module in found.values() if not is_of(module, "paceline")]


def is_of(module: ModuleType, package: str) -> bool:
    """True if a module belongs to a package."""
    return str(vars(module).get("__name__")).split(".")[0] == package


def replace_names(module: ModuleType, by_identity: dict[int, tuple[Any, Any]]) -> list[tuple[str, Any]]:
    """Replaces objects in a module's namespace; returns (name, previous object). Does not trigger lazy imports."""
    changed = []
    for name, value in list(vars(module).items()):
        old, new = by_identity.get(id(value), (None, None))
        if old is not None and value is old:
            setattr(module, name, new)
            changed.append((name, old))
    return changed


def move_subclasses(done: Replaced) -> list[str]:
    """Gives subclasses of the replaced classes our base. Returns the classes that could not be moved, with reasons."""
    left = []
    replaced = {id(theirs) for theirs, _ in done.pairs.values()}
    for name in MOVABLE:
        theirs, ours = done.pairs.get(name, (None, None))
        below = [] if theirs is None else [cls for cls in theirs.__subclasses__() if id(cls) not in replaced]
        alive = living_classes() if below and name != "TrainerCallback" else set()
        if any(issubclass(cls, theirs) and id(cls) in replaced for cls in alive):
            left.append(f"{name} objects that exist already")
        for cls in below:
            if cls.__module__.startswith("transformers.trainer"):
                continue  # a class without a counterpart in paceline
            if any(issubclass(kind, cls) for kind in alive):
                left.append(f"{cls.__module__}.{cls.__qualname__} (objects of it exist already)")
                continue
            bases = cls.__bases__
            try:
                change_base(cls, theirs, ours)
            except TypeError as error:
                left.append(f"{cls.__module__}.{cls.__qualname__} ({error})")
            else:
                done.moved.append((cls, bases))
    return left


def living_classes() -> set[type]:
    """Returns the classes of all existing objects."""
    return {type(item) for item in gc.get_objects()}


def change_base(cls: type, old: type, new: type) -> None:
    """Replaces `old` by `new` among the bases of a class."""
    cls.__bases__ = tuple(new if base is old else base for base in cls.__bases__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script or a module as `python` would, with paceline installed. Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_module = given[:1] == ["-m"]
    if len(given) < 1 + is_module or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if given[:1] in (["-h"], ["--help"]) else 2
    if not is_module and not Path(given[0]).exists():
        print(f"{given[0]}: there is no such script.\n{USAGE}", file=sys.stderr)
        return 2
    install()
    if is_module:
        sys.argv = given[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        sys.path.insert(0, str(Path(given[0]).resolve().parent))
        runpy.run_path(given[0], run_name="__main__")
    return 0
