"""The record of a run, `run.json`: everything needed to reproduce its results. Standard library only."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, Any

from paceline.args.secrets import mask_command, mask_text, masked
from paceline.core.lineage import KEY, RECORD_NAME, RunMark
from paceline.core.retry_writer import replace_whole

logger = logging.getLogger(__name__)

_LIBRARIES = ("paceline", "torch", "numpy", "transformers", "datasets", "safetensors", "tensorflow")
GIT_SECONDS = 5.0  # a repository on a slow disk must not delay a run
# Without the first option, `status` takes the index lock and can make a commit of the user's fail. The second keeps the
# configuration of a repository from naming a program that `status` and `diff` would run.
GIT_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")


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
    `hub_token`, are masked. With `run`, the ids that mark the run's checkpoints and the start that this one resumes are
    written too. The file is replaced atomically.

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
        record["parent"] = _parent(run)
    if extra is not None:
        record["extra"] = jsonable(extra)
    history: list[Any] = []
    if earlier is not None:
        history = earlier.pop("history", [])
        history.append(earlier)
    record["history"] = history
    os.makedirs(path.parent, exist_ok=True)
    replace_whole(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def library_versions(names: Iterable[str] = _LIBRARIES) -> dict[str, str]:
    """Returns the versions of the libraries in `names` that are installed or imported already; imports none."""
    versions = {}
    for name in names:
        # A package on the path that is not installed, as in a source checkout, has the version that it states.
        version = _installed_version(name) or getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return versions


@functools.cache
def _installed_version(name: str) -> str | None:
    """Returns the version of an installed package, whose metadata takes milliseconds to read; None without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns commit and branch of the repository that contains `folder`, and whether tracked files differ from it.

    The branch is None if the commit is checked out without one. Returns None without a repository.
    """
    found = git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if found is not None:
        lines = found.split("\n")
        headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
        commit, branch = headers.get("branch.oid"), headers.get("branch.head")
        dirty = any(not line.startswith("#") for line in lines)
    else:  # a repository too large to compare in time still has a commit
        head = git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        commit, _, branch = (head or "").partition("\n")
        dirty = None
    if not commit or commit == "(initial)":
        return None
    return {"commit": commit, "branch": None if branch in ("HEAD", "(detached)") else branch, "dirty": dirty}


def update_record(path: Path, run: RunMark, entries: Mapping[str, Any]) -> None:
    """Adds entries to the record of a run; a mapping is merged into the one of the same name.

    Does nothing if the file is not the record of this start of the run.

    Raises: OSError, if the file cannot be read or written; it is then unchanged.
    """
    try:
        record = json.loads(path.read_bytes())
        is_same = record[KEY]["starts"] == run.to_json()["starts"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if not is_same:
        return
    for name, value in jsonable(entries).items():
        before = record.get(name)
        record[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    replace_whole(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _parent(run: RunMark) -> dict[str, Any] | None:
    """Returns the ids of the run, and of the start of it, whose checkpoint this start resumes; None for a new run."""
    if len(run.starts) < 2:
        return None
    return {"run": run.run_id, "start": run.starts[-2][0], "step": run.starts[-1][1]}


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


def git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command, stripped; None if it fails or takes longer than `GIT_SECONDS`."""
    try:
        content, _ = git_output(folder, *arguments)
        return None if content is None else content.decode().strip()
    except UnicodeDecodeError:
        return None


def git_output(folder: Path, *arguments: str, most: int | None = None) -> tuple[bytes | None, bool]:
    """Returns the output of a git command, and whether it was cut; no output if it fails or takes too long.

    Git writes to a file and is started without a fork where the system can (`close_fds=False` lets Python do that). A
    worker that another thread forks at this moment would inherit a pipe, and the end of the pipe would be seen only
    when that worker ends.

    Args:
        folder: where git runs.
        arguments: the arguments of git.
        most: bytes of output after which git is stopped; None: any number.
    """
    program = shutil.which("git")
    if program is None:
        return None, False
    command = [program, *GIT_OPTIONS, "-C", str(folder), *arguments]
    try:
        with _scratch_file() as output:
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, close_fds=False
            ) as process:
                end = time.monotonic() + GIT_SECONDS
                while process.poll() is None and time.monotonic() < end and not _is_longer(output, most):
                    time.sleep(0.001)
                process.kill()  # does nothing to a process that has ended
            is_cut = _is_longer(output, most)
            if process.returncode != 0 and not is_cut:
                return None, False
            output.seek(0)
            return output.read(-1 if most is None else most), is_cut
    except (OSError, subprocess.SubprocessError):
        return None, False


def _scratch_file() -> IO[bytes]:
    """Opens a file without a name, in memory where the system has such files, so that a full disk does not matter."""
    create = getattr(os, "memfd_create", None)
    return tempfile.TemporaryFile() if create is None else os.fdopen(create("paceline-git"), "w+b")


def _is_longer(file: IO[bytes], most: int | None) -> bool:
    return most is not None and os.fstat(file.fileno()).st_size > most


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
