"""Warnings of a launch with several processes, each shown once per machine instead of once per process.

A process claims a warning by creating an empty file in a folder that the processes of the launch share; one that finds
the file leaves the warning out. A warning of only some processes is therefore shown too, and no process waits.

Warnings of torch's C++ code, which reach no Python handler, are those of the first process of a machine, if torch is
imported after paceline: it reads their level once.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, MutableMapping
from pathlib import Path

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
SILENT = -1  # a record of this level is below the level of every handler


def install(name: str, environment: MutableMapping[str, str]) -> None:
    """Shows the warnings of a logger and its children once for the processes that torchrun started on this machine.

    Args:
        name: the logger.
        environment: the variables of this process; the level of torch's C++ log is set in it, unless it is there.
    """
    size = environment.get("LOCAL_WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 2:  # not a number: refused, by name, with the process group
        return
    folder = folder_of(environment, os.getppid())
    logging.getLogger(name).handlers.insert(0, ClaimingHandler(folder))
    if environment.get("LOCAL_RANK") == "0":
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    elif "torch" not in sys.modules:
        environment.setdefault(CPP_LOG_LEVEL, "ERROR")


def folder_of(environment: Mapping[str, str], launcher: int) -> Path:
    """Returns the folder that the processes of one launch share, which no other launch uses.

    Args:
        environment: the variables that torchrun sets.
        launcher: the process id of torchrun, the parent of all of them.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    parts = [*(environment.get(name, "") for name in names), str(launcher), _start_of(launcher)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"paceline-warnings-{os.getuid() if hasattr(os, 'getuid') else ''}-{digest}"


def _start_of(process: int) -> str:
    """Returns the start time of a process, which distinguishes it from an earlier one with its id; empty if unknown."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # field 22, in clock ticks since boot


class ClaimingHandler(logging.Handler):
    """Hides warnings that another process of the launch has claimed from the handlers after it; writes nothing.

    Args:
        folder: the folder of the claims; see `folder_of`.
    """

    emits_nothing = True  # for `args.secrets.has_handlers`

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder
        self._seen: Counter[str] = Counter()

    def handle(self, record: logging.LogRecord) -> bool:
        try:
            text = f"{record.name}\0{record.levelno}\0{record.getMessage()}"
        except Exception:  # invalid arguments: the handler that emits the record reports them
            return True
        self._seen[text] += 1  # a warning that is repeated by each process is repeated once
        if not self._claim(f"{text}\0{self._seen[text]}"):
            record.levelno = SILENT
        return True

    def _claim(self, text: str) -> bool:
        """Returns True if this process is the first with the text, or if that cannot be found out."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if hasattr(os, "getuid") and self.folder.lstat().st_uid != os.getuid():
                return True
            (self.folder / hashlib.sha256(text.encode(errors="replace")).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return not self.folder.is_dir()
        except OSError:
            return True
        return True
