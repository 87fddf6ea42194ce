"""The record of a run, `run.json`: everything needed to reproduce its results. Standard library only."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_command, mask_text, masked
from paceline.core.lineage import KEY, RECORD_NAME, RunMark

logger = logging.getLogger(__name__)

_LIBRARIES = ("paceline", "torch", "numpy", "transformers", "datasets", "safetensors", "tensorflow")
_GIT_SECONDS = 5.0  # a repository on a slow disk must not delay a run


def write_run_record(
    output_dir: str | os.PathLike[str],
    *,
    args_dict: Mapping[str, Any],
    plan_dict: Mapping[str, Any],
    seeds: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    run: RunMark | None = None,
) -> Path:
    """Writes `run.json` to `output_dir`: arguments, plan, seeds, versions, system, git commit, command, start time.

    Earlier runs in the same folder stay under `history`, oldest first. Secrets (`paceline.args.secrets`), such as
    `hub_token`, are masked. With `run`, the ids that mark the run's checkpoints are written too. The file is replaced
    atomically.

    Returns: its path. Raises: OSError, if the folder cannot be written.
    """
    path = Path(output_dir, RECORD_NAME)
    earlier = _read_earlier(path)
    record: dict[str, Any] = {
        "format": 1,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": mask_command([sys.executable, *sys.argv]),
        "working_directory": mask_text(os.getcwd()),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": library_versions(),
        "seeds": jsonable(seeds),
        "arguments": jsonable(args_dict),
        "plan": jsonable(plan_dict),
    }
    if run is not None:
        record[KEY] = run.to_json()
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
    """Returns the versions of the libraries in `names` that are installed or imported already; imports none."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A package on the path that is not installed, as in a source checkout.
            version = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(version, str):
                versions[name] = version
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository that contains `folder`, and whether tracked files differ from it.

    Returns None without a repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    # Without the option, `status` takes the index lock and can make a commit of the user's fail.
    changes = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def jsonable(value: object) -> Any:
    """Converts `value` to strict JSON, secrets masked: enums by value, non-finite floats and other objects as text."""
    return masked(_plain(value))


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    return str(value)


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
    """Returns the existing record, or None; an unreadable one is renamed, not overwritten."""
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
