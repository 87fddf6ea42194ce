"""What a person typed wrong, said in one sentence instead of a traceback."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType

from paceline.args.errors import did_you_mean
from paceline.core.optional import require


class UsageError(Exception):
    """The command or its configuration cannot be honoured; the message says what to write instead. Exit code 2."""


def is_message(error: BaseException) -> bool:
    """Whether this package raised the error on purpose: its text says what to do, and a traceback adds nothing.

    An error inside a person's own code, or one that Python raised inside ours, is no message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
    return is_ours and str(frames[-1].line).startswith("raise ")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, else all of them where they are few, else nothing."""
    names = sorted(set(known))
    if hint := did_you_mean(name, names):
        return hint
    return f"; known are: {', '.join(names)}" if 0 < len(names) <= 16 else ""


def need(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional package.

    Raises:
        UsageError: it is missing; the message says why it is needed and which extra installs it.
    """
    try:
        return require(module, extra)
    except ImportError as error:
        raise UsageError(f"{why}: {error}") from error


def load_part(module: str, hint: str = "") -> ModuleType:
    """Import a module of this package that stands on torch or TensorFlow.

    Raises:
        UsageError: what it stands on is missing; the message names the extra that installs it, then says `hint`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name == "torch":
            raise UsageError(f'torch is needed here: pip install "paceline[torch]"{hint}') from error
        if not is_message(error):
            raise
        raise UsageError(str(error)) from error


def check_keys(where: str, section: Iterable[str], known: Collection[str]) -> None:
    """Refuse a key that a section does not have.

    Raises:
        UsageError: there is one; the nearest known one is named.
    """
    for key in section:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{suggest(str(key), (*known, 'factory'))}")


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
