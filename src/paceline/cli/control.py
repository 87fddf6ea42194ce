"""`paceline control RUN COMMAND`: sends a command to a live run and prints its answer. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.lock import LOCK_NAME, holder_in
from paceline.cli.display import say
from paceline.cli.errors import UsageError, suggest
from paceline.cli.options import Known, parse_options
from paceline.core.commands import ACTIONS, CHANGES, check_owner, check_value, is_waiting, sent, wait_for_answer

DEFAULT_TIMEOUT = 60.0  # seconds; a run answers after the optimizer step in progress, or after an evaluation


def run(words: Sequence[str]) -> int:
    """Sends a command, prints the answer, and returns the exit code: 0 if it was accepted, else 1.

    Raises:
        UsageError: the command line is wrong, or no run of this user on this machine trains in the folder.
    """
    given = parse_options(words, Known(("RUN", "COMMAND", "VALUE"), {"timeout": False}))
    if given.arguments:
        raise UsageError(f"control takes --timeout, not --{next(iter(given.arguments))}")
    if len(given.positional) < 2:
        raise UsageError(f"control needs a run and a command: {', '.join((*ACTIONS, *CHANGES))}")
    folder, command = Path(given.positional[0]), given.positional[1]
    value = read_value(command, given.positional[2:])
    timeout = read_timeout(given.own)
    check_run(folder)
    try:
        with sent(folder, command, value, timeout) as command_id:
            answer = wait_for_answer(folder, command_id, timeout)
            if answer is None and is_waiting(folder):
                say(f"no answer within {timeout:g} s: the command was withdrawn, and nothing was changed")
                return 1
    except TimeoutError as error:
        raise UsageError(f"{error}: the run does not read it now, try again later") from error
    if answer is None:
        say(
            f"no answer within {timeout:g} s: the run has read the command, and will obey at its next step; see its log"
        )
        return 1
    is_accepted, text = answer
    say(text if is_accepted else f"refused: {text}")
    return 0 if is_accepted else 1


def read_value(command: str, words: Sequence[str]) -> float | None:
    """Returns the value of a command; None for a command without one.

    Raises:
        UsageError: there is no such command, or its value is missing, superfluous or out of range.
    """
    known = (*ACTIONS, *CHANGES)
    if command not in known:
        raise UsageError(f"there is no command {command!r}{suggest(command, known)}")
    if command in ACTIONS:
        if words:
            raise UsageError(f"{command} takes no value")
        return None
    if not words:
        raise UsageError(f"{command} needs a value")
    try:
        return check_value(*CHANGES[command], float(words[0]))
    except ValueError as error:
        raise UsageError(f"{command} {words[0]}: {error}") from error


def read_timeout(own: Mapping[str, Any]) -> float:
    """Returns the seconds to wait.

    Raises:
        UsageError: it is not a positive number.
    """
    try:
        timeout = float(own.get("timeout", DEFAULT_TIMEOUT))
    except ValueError:
        timeout = 0.0
    if not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout {own['timeout']}: give a positive number of seconds")
    return timeout


def check_run(folder: Path) -> None:
    """Checks that a run of this user trains in a folder, on this machine.

    Raises:
        UsageError: it does not.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if os.name != "posix":
        raise UsageError("control needs a POSIX system, whose files have owners")
    try:
        check_owner(folder)
    except PermissionError as error:
        raise UsageError(f"{error}: only its owner can control the run") from error
    if holder_in(folder) is None:
        is_locked = (folder / LOCK_NAME).exists()
        other = " (its lock is that of a process on another machine, or of one that has ended)" if is_locked else ""
        raise UsageError(f"no run trains in {folder} now{other}")
