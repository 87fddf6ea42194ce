"""Checks for names and links that lead outside of a folder. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_DRIVE = re.compile(r"[A-Za-z]:")


def is_inner_name(name: object) -> bool:
    """True if a relative path with forward slashes names a file below a folder, on every system.

    False for absolute paths, drives, backslashes, NUL, names that file systems reject, and parts that are empty, "."
    or "..".
    """
    if not isinstance(name, str) or not name or len(name) > 4096 or "\\" in name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeError:
        return False
    return _DRIVE.match(name) is None and all(part not in ("", ".", "..") for part in name.split("/"))


def leads_outside(path: Path, folder: Path) -> bool:
    """True if a path below a folder resolves, through links, to a path outside of it.

    A snapshot in the hub's cache consists of links to the sibling folder `blobs`, which counts as inside.
    """
    try:
        root = Path(os.path.realpath(folder))
        snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
        if snapshots is not None and (snapshots.parent / "blobs").is_dir():
            root = snapshots.parent
        return not Path(os.path.realpath(path)).is_relative_to(root)
    except (OSError, ValueError):  # a loop of links; a name that file systems reject
        return True


def without_links_outside(folder: Path) -> Callable[[str, list[str]], list[str]]:
    """Returns the `ignore` function for `shutil.copytree` that excludes links out of the folder."""

    def ignore(place: str, names: list[str]) -> list[str]:
        return [name for name in names if leads_outside(Path(place, name), folder)]

    return ignore
