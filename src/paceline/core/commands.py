"""Commands to a live run: one JSON file in its output folder, written by the run's owner, and its answer.

The sender creates an empty answer file and the command file, both readable by the owner only. The run reads and removes
the command file, and writes into the answer file if that is still there; the sender removes it. A file of another user,
a link, or a file that is not a command is refused. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMMAND_FILE = ".paceline-control.json"
MOST_BYTES = 4096
ACTIONS = ("save", "evaluate", "stop")
# command -> (setting, operation)
CHANGES = {
    "learning-rate": ("learning_rate", "set"),
    "max-grad-norm": ("max_grad_norm", "set"),
    "scale-learning-rate": ("learning_rate", "scale"),
    "weight-decay": ("weight_decay", "set"),
}

_ID = re.compile(r"[0-9a-f]{32}")
_SECONDS_BETWEEN_LOOKS = 0.05
# NOFOLLOW refuses a link, and NONBLOCK keeps a pipe from blocking the run
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class CommandRefused(ValueError):
    """A command is not accepted; the message gives the reason.

    Attributes:
        command_id: the id of the command, whose sender waits for an answer; None if unknown.
        is_left: the file could not be removed, so that it will be found again.
    """

    def __init__(self, reason: str, command_id: str | None = None, is_left: bool = False) -> None:
        super().__init__(reason)
        self.command_id, self.is_left = command_id, is_left


def check_value(name: str, operation: str, value: object) -> float:
    """Returns the value of a requested change.

    Raises:
        ValueError: it is not a number in the range of the setting.
    """
    text = str(value)[:80]
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: {text} is not a finite number.")
    if operation == "scale" and number <= 0:
        raise ValueError(f"{name}: the factor {text} is not positive.")
    if name == "learning_rate" and number <= 0:
        raise ValueError(f"{name}: {text} is not positive; a rate of 0 could not be changed again.")
    if number < 0:
        raise ValueError(f"{name}: {text} is negative.")
    return number


# ---- the run


def take_command(folder: Path) -> tuple[str, str, float | None, str] | None:
    """Reads and removes the command in a folder.

    Returns: (command, setting or action, value, id); None if there is no command.

    Raises:
        CommandRefused: the file is another user's, a link, or no command.
    """
    taken = folder / f"{COMMAND_FILE}.taken"
    try:
        os.replace(folder / COMMAND_FILE, taken)  # a file that is published from now on is another command
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandRefused(f"it cannot be removed ({error.strerror})", is_left=True) from error
    try:
        content = _read_own(taken)
    except OSError as error:
        raise CommandRefused(f"it cannot be read ({error.strerror})") from error
    finally:
        with suppress(OSError):
            taken.unlink()
    return parse_command(content)


def parse_command(content: bytes) -> tuple[str, str, float | None, str]:
    """Parses the content of a command file; returns (command, setting or action, value, id).

    Raises:
        CommandRefused: it is no command.
    """
    if len(content) > MOST_BYTES:
        raise CommandRefused(f"it has more than {MOST_BYTES} bytes")
    try:
        values: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CommandRefused("it is not JSON") from error
    if not isinstance(values, dict):
        raise CommandRefused("it is not a JSON object")
    command_id = values.get("id")
    if not isinstance(command_id, str) or not _ID.fullmatch(command_id):
        raise CommandRefused("it has no id")
    if not is_running(values.get("pid")):  # killed before it could withdraw a command, perhaps to an earlier run
        raise CommandRefused("its sender has ended")
    command = values.get("command")
    if command in ACTIONS:
        return command, command, None, command_id
    if not isinstance(command, str) or command not in CHANGES:
        raise CommandRefused(f"there is no command {str(command)[:80]!r}", command_id)
    name, operation = CHANGES[command]
    try:
        return command, name, check_value(name, operation, values.get("value")), command_id
    except (ValueError, OverflowError) as error:
        raise CommandRefused(str(error), command_id) from error


def is_running(pid: object) -> bool:
    """True if a process of this id exists, or none is given."""
    if type(pid) is not int or not 0 < pid < 2**31:
        return pid is None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def answer_command(folder: Path, command_id: str, is_accepted: bool, text: str) -> None:
    """Writes the answer to a command, unless its sender no longer waits."""
    path = _answer_path(folder, command_id)
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | _SAFELY)
        try:
            _check_own(descriptor, path)
            os.write(descriptor, json.dumps({"is_accepted": is_accepted, "text": text}).encode() + b"\n")
        finally:
            os.close(descriptor)


def check_owner(folder: Path) -> None:
    """Checks that a folder belongs to the user of this process.

    Raises:
        PermissionError: it does not.
    """
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")


# ---- the sender


@contextmanager
def sent(folder: Path, command: str, value: float | None, timeout: float) -> Iterator[str]:
    """Returns a context in which a folder holds a command; yields its id, and leaves no file behind.

    Args:
        folder: the output folder of the run.
        command: one of `ACTIONS` or `CHANGES`.
        value: the value of a change.
        timeout: seconds to wait while the folder holds another command.

    Raises:
        TimeoutError: another command was not read in time.
        OSError: the folder cannot be written to.
    """
    command_id = uuid.uuid4().hex
    answer, path = _answer_path(folder, command_id), folder / COMMAND_FILE
    temporary = answer.with_suffix(".new")
    content = json.dumps({"id": command_id, "command": command, "value": value, "pid": os.getpid()}).encode()
    try:
        _create(answer, b"")
        _create(temporary, content)
        deadline = time.monotonic() + timeout
        while not _publish(temporary, path):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} still holds another command")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        yield command_id
    finally:
        temporary.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
        with suppress(OSError):
            if path.read_bytes() == content:  # the run has not read it
                path.unlink()


def wait_for_answer(folder: Path, command_id: str, timeout: float) -> tuple[bool, str] | None:
    """Returns (accepted, text) as the run answers; None if it does not within `timeout` seconds."""
    path, deadline = _answer_path(folder, command_id), time.monotonic() + timeout
    while True:
        content = path.read_bytes()
        if content.endswith(b"\n"):
            values = json.loads(content)
            return bool(values["is_accepted"]), str(values["text"])
        if time.monotonic() > deadline:
            return None
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def is_waiting(folder: Path) -> bool:
    """True if the run has not read the command yet."""
    return os.path.lexists(folder / COMMAND_FILE)


# ---- files


def _answer_path(folder: Path, command_id: str) -> Path:
    return folder / f".paceline-control-{command_id}.answer"


def _create(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _SAFELY, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        file.write(content)


def _publish(temporary: Path, path: Path) -> bool:
    """Renames a complete file to `path`. Returns False, and keeps both files, if `path` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            return False
        os.replace(temporary, path)
        return True
    temporary.unlink()
    return True


def _read_own(path: Path) -> bytes:
    """Returns the first bytes of a file that belongs to the user of this process and is no link.

    Raises:
        CommandRefused: the file or its folder is another user's, or others may access the file.
        OSError: it cannot be read; a symbolic link counts as such an error.
    """
    descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    try:
        _check_own(descriptor, path)
        return os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_own(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise CommandRefused("it is not a regular file")
    if found.st_uid != os.geteuid() or path.parent.stat().st_uid != os.geteuid():
        raise CommandRefused("the file or its folder belongs to another user")
    if found.st_mode & 0o077:
        raise CommandRefused("other users may access it: its mode is not 0600")
