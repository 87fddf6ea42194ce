"""A disk that loses at a power cut what was not synced: the content of files, and the names in folders.

Changes are really made, below one folder; the model only notes what `os.fsync` brought to the disk. At each change it
makes what could be left after a cut at that moment and hands it to the test: a file that was never synced is empty; in
a folder, which the system may have written of its own accord, the names are those of now, or those of its last fsync.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "link")

Tree = dict[str, Any]  # name -> content of a file, or the Tree of a folder
Check = Callable[[Path, str], None]  # (what is left, after which change)


@dataclass
class LossyDisk:
    """The part of a folder that is on the disk.

    Attributes:
        root: the folder; what is in it at first is on the disk.
        check: is called with what could be left, after each change.
        files: number of a file -> its content when it was last synced.
        folders: number of a folder -> name -> number, when it was last synced.
    """

    root: Path
    check: Check
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # open files keep their number for themselves
    problems: list[str] = field(default_factory=list)
    checking: threading.local = field(default_factory=threading.local)
    lock: Any = field(default_factory=threading.RLock)

    def begin(self) -> None:
        for folder, names, files in os.walk(self.root):
            for path in [Path(folder), *(Path(folder, name) for name in (*names, *files))]:
                descriptor = os.open(path, os.O_RDONLY)
                self.sync(descriptor)
                os.close(descriptor)

    def sync(self, descriptor: int) -> None:
        """`os.fsync`."""
        number = self.hold(os.dup(descriptor))
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            self.files[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            return
        entries = {entry.name: entry for entry in os.scandir(descriptor)}
        self.folders[number] = {name: self.hold(os.open(name, os.O_RDONLY, dir_fd=descriptor)) for name in entries}

    def hold(self, descriptor: int) -> int:
        number = os.fstat(descriptor).st_ino
        if number in self.held:
            os.close(descriptor)
        else:
            self.held[number] = descriptor
        return number

    def close(self) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)

    def cut(self, what: str) -> None:
        """Hand everything that could be left by a cut now to the test, whose own changes are not watched."""
        self.checking.now = True
        try:
            self._cut(what)
        finally:
            self.checking.now = False

    def _cut(self, what: str) -> None:
        places = {path.lstat().st_ino: path for path in self.root.rglob("*")}
        seen: list[Tree] = []
        for top_is_written, rest_is_written in product((False, True), repeat=2):
            places[self.root.stat().st_ino] = self.root
            tree = self.restore(self.root.stat().st_ino, places, top_is_written, rest_is_written)
            if tree in seen:
                continue
            seen.append(tree)
            left = self.root.with_name(f"{self.root.name}-left")
            write_tree(tree, left)
            kind = f"{what}; names as now: {top_is_written} in the folder, {rest_is_written} below"
            try:
                self.check(left, kind)
            except AssertionError as error:  # raised here, it would be taken for a refusal of the disk
                self.problems.append(f"{kind}: {error}")
            shutil.rmtree(left)

    def restore(self, number: int, places: dict[int, Path], is_written: bool, rest_is_written: bool) -> Tree:
        """Returns what is left of one folder.

        Args:
            places: where each number is, as the running system sees it; those that were removed are in none.
            is_written: its names are those of now.
            rest_is_written: so it is with the folders below.
        """
        now = places.get(number)
        current = {entry.name: entry.inode() for entry in os.scandir(now)} if now is not None else {}
        entries = current if is_written else self.folders.get(number, {})
        return {
            name: self.restore(child, places, rest_is_written, rest_is_written)
            if self.is_folder(child, places.get(child))
            else self.files.get(child, b"")
            for name, child in entries.items()
        }

    def is_folder(self, number: int, place: Path | None) -> bool:
        if number in self.held:
            return os.path.isdir(f"/proc/self/fd/{self.held[number]}")
        return place is not None and place.is_dir()


def write_tree(tree: Tree, folder: Path) -> None:
    """Make files and folders."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(content, folder / name)
        else:
            (folder / name).write_bytes(content)


@contextmanager
def losing(root: Path, check: Check) -> Iterator[LossyDisk]:
    """Within the block, each change that the process makes is followed by every cut that is possible.

    Raises: AssertionError, at the end, with what `check` found.
    """
    disk = LossyDisk(root, check)
    disk.begin()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if getattr(disk.checking, "now", False):
                return function(*args, **options)
            with disk.lock:
                result = disk.sync(args[0]) if name == "fsync" else function(*args, **options)
                disk.cut(f"{name} {args[0]}")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        try:
            yield disk
        finally:
            patch.undo()
            disk.close()
    assert not disk.problems, "\n".join(disk.problems)
