"""The record of a run, `run.json`: what one needs to tell later how its numbers came about. Standard library only."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RECORD_NAME = "run.json"
MASK = "<MASKED>"

_LIBRARIES = ("paceline", "torch", "numpy", "transformers", "datasets", "safetensors", "tensorflow")
# `hub_token`, `--api-key`, `password`; not `include_num_input_tokens_seen` or `max_new_tokens`.
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:token|password|passwd|secret|credentials?|(?:api|access|secret|auth)[_-]?key)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,})")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_GIT_SECONDS = 5.0  # a repository on a slow disk must not hold up a run


def write_run_record(
    output_dir: str | os.PathLike[str],
    *,
    args_dict: Mapping[str, Any],
    plan_dict: Mapping[str, Any],
    seeds: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `run.json` into `output_dir`: arguments, plan, seeds, versions, system, git commit, command, start time.

    Earlier runs in the same folder stay under `history`, oldest first. Values under names such as `hub_token`, and
    tokens that can be recognised by their form, are masked. The file is replaced in one step.

    Returns: its path. Raises: OSError, when the folder cannot be written.
    """
    path = Path(output_dir, RECORD_NAME)
    earlier = _read_earlier(path)
    record: dict[str, Any] = {
        "format": 1,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": mask_command([sys.executable, *sys.argv]),
        "working_directory": os.getcwd(),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": library_versions(),
        "seeds": jsonable(seeds),
        "arguments": jsonable(args_dict),
        "plan": jsonable(plan_dict),
    }
    if extra is not None:
        record["extra"] = jsonable(extra)
    history: list[Any] = []
    if earlier is not None:
        history = earlier.pop("history", [])
        history.append(earlier)
    record["history"] = history
    os.makedirs(path.parent, exist_ok=True)
    temporary = path.with_name(f".{RECORD_NAME}.incomplete-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def library_versions(names: Iterable[str] = _LIBRARIES) -> dict[str, str]:
    """Versions of those of `names` that are installed, or imported already; none is imported for this."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A package on the path without being installed, as in a source checkout.
            version = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(version, str):
                versions[name] = version
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it, of the repository around `folder`; None without one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    # Without the option, `status` takes the index lock and can make a commit of the user's fail.
    changes = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def mask_command(command: Sequence[str]) -> list[str]:
    """The words of a command line with the values of secret options (`--hub_token X`, `--api-key=X`) masked."""
    masked = []
    is_secret = False
    for word in command:
        name, equals, _ = word.partition("=")
        if is_secret and not word.startswith("--"):
            masked.append(MASK)
        elif equals and _SECRET_NAME.search(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_mask_text(word))
        is_secret = word.startswith("-") and not equals and _SECRET_NAME.search(word) is not None
    return masked


def jsonable(value: Any, name: str = "") -> Any:
    """`value` in terms of strict JSON, secrets masked: enums by value, non-finite floats and other objects as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return jsonable(value.value, name)
    if isinstance(value, str):
        return MASK if _SECRET_NAME.search(name) and not _is_placeholder(value) else _mask_text(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, name) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item, name) for item in value), key=str)
    return _mask_text(str(value))


def _is_placeholder(value: str) -> bool:
    return not value or (value.startswith("<") and value.endswith(">"))


def _mask_text(text: str) -> str:
    return _URL_PASSWORD.sub(MASK, _SECRET_VALUE.sub(MASK, text))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read_earlier(path: Path) -> dict[str, Any] | None:
    """The record that is there, or None; one that cannot be read is kept beside, not overwritten."""
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict) and isinstance(value.get("history", []), list):
            return value
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        pass
    kept = path.with_name(f"{RECORD_NAME}.unreadable-{os.getpid()}")
    os.replace(path, kept)
    logger.warning("%s could not be read and is kept as %s; its history starts anew", path, kept.name)
    return None
