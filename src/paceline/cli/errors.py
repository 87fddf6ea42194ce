"""Usage errors, reported in one sentence instead of a traceback."""

from __future__ import annotations

import errno
import importlib
import sysconfig
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType

from paceline.args.errors import did_you_mean
from paceline.core.optional import require

# of disks and permissions: file and reason suffice, also where the standard library raised the error for this package
FILE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)


class UsageError(Exception):
    """The command or its configuration is invalid; the message names the remedy. Exit code 2."""


def is_message(error: BaseException) -> bool:
    """True if this package raised the error deliberately, so that its message suffices without a traceback.

    So does that of a full or read-only disk. False for an error inside user code, or another one that Python raised
    inside this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OSError) and error.errno in FILE_ERRORS:
        library = sysconfig.get_path("stdlib")
        own = [frame for frame in frames if not Path(frame.filename).is_relative_to(library)]
        return bool(own) and Path(own[-1].filename).is_relative_to(Path(__file__).parents[1])
    is_ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
    return is_ours and str(frames[-1].line).startswith("raise ")


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `; did you mean 'x'?` for the closest known name, else up to 16 known names, else an empty text.

    Args:
        name: the unknown name.
        known: the known names.
        prefix: text put before the name in the question, such as the dashes of a command line.
    """
    names = sorted(set(known))
    if hint := did_you_mean(name, names, prefix):
        return hint
    return f"; known are: {', '.join(names)}" if 0 < len(names) <= 16 else ""


def need(module: str, extra: str, why: str) -> ModuleType:
    """Imports an optional package.

    Raises:
        UsageError: the package is missing; the message gives the reason and the extra that installs it.
    """
    try:
        return require(module, extra)
    except ImportError as error:
        raise UsageError(f"{why}: {error}") from error


def load_part(module: str, hint: str = "") -> ModuleType:
    """Imports a module of this package that requires torch or TensorFlow.

    Raises:
        UsageError: the framework is missing; the message names the extra that installs it, then `hint`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name == "torch":
            raise UsageError(f'torch is required: pip install "paceline[torch]"{hint}') from error
        if not is_message(error):
            raise
        raise UsageError(str(error)) from error


def check_keys(where: str, section: Iterable[str], known: Collection[str]) -> None:
    """Refuses unknown keys of a section.

    Raises:
        UsageError: an unknown key; the message names the closest known one.
    """
    for key in section:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{suggest(str(key), (*known, 'factory'))}")


def check_no_option(command: str, words: Iterable[str]) -> None:
    """Refuses options of a command that has none.

    Raises:
        UsageError: one of the words is an option.
    """
    for word in words:
        if word.startswith("-"):
            raise UsageError(f"{command} has no option {word!r}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
