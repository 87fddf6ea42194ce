"""Checkpoint folders: their names, publishing by one rename, recovery after a crash, rotation. Standard library only.

A folder is written under a hidden name beside its final one and becomes visible by one rename, complete, with its
manifest, on the disk. Hidden siblings, all dropped or put back by `recover`:

    .NAME.incomplete-PID    being written; nothing reads it
    .NAME.replaced-PID      the folder that a new one of the same name replaces, until the new one is in its place
    .NAME.deleted-PID       on its way out; deleting a big folder takes time, and half of one must not be visible
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from paceline.core.manifest import MANIFEST_NAME, KnownFile, extra_files, seal, sync_folder, verify

__all__ = [
    "MANIFEST_NAME",
    "PREFIX_CHECKPOINT_DIR",
    "begin",
    "checkpoint_name",
    "discard_unfinished",
    "extra_files",
    "get_last_checkpoint",
    "list_checkpoints",
    "make_output_folder",
    "newest_valid",
    "publish",
    "recover",
    "rotate_checkpoints",
    "seal",
    "sort_checkpoints",
    "staged",
    "step_of",
    "surplus",
    "sync_folder",
    "verify",
]

logger = logging.getLogger(__name__)

PREFIX_CHECKPOINT_DIR = "checkpoint"

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>incomplete|replaced|deleted)-(?P<pid>\d+)(?:-\d+)?")
# Below this spread (seconds) of modification times over several checkpoints, the file system does not keep real ones.
_LEAST_MTIME_SPREAD = 1.0


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint at `step` (optimizer updates): `checkpoint-STEP`."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """The step in a checkpoint's path or name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """The checkpoint folders of a run, lowest step first; an empty list where `output_dir` does not exist."""
    return [Path(path) for path in sort_checkpoints(output_dir)]


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint with the highest step in `folder`, or None. What is in it is not looked at.

    Raises: FileNotFoundError, when `folder` does not exist.
    """
    os.stat(folder)
    checkpoints = sort_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def sort_checkpoints(
    output_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Paths of the folders `PREFIX-NUMBER` in `output_dir`, oldest first: by number, or by modification time.

    Folders whose name only begins like that (`checkpoint-12-copy`) are not checkpoints. `best_model_checkpoint` is
    moved to the last place but one, if it is not last. Where the modification times lie within one second, the file
    system is taken to keep no real ones, and the numbers decide.
    """
    found: list[tuple[int, str]] = []
    try:
        names = os.listdir(output_dir)
    except FileNotFoundError:
        return []
    for name in names:
        match = re.fullmatch(re.escape(checkpoint_prefix) + r"-([0-9]+)", name)
        path = str(Path(output_dir, name))
        if match is not None and os.path.isdir(path):
            found.append((int(match.group(1)), path))
    ordered = [path for _, path in sorted(found)]
    if use_mtime and len(ordered) > 1:
        times = {path: os.path.getmtime(path) for path in ordered}
        if max(times.values()) - min(times.values()) < _LEAST_MTIME_SPREAD:
            logger.info("modification times in %s look unreliable: checkpoints are sorted by number", output_dir)
        else:
            ordered.sort(key=times.__getitem__)
    best = _find(ordered, best_model_checkpoint)
    if best is not None and ordered[-1] != best:
        ordered.remove(best)
        ordered.insert(len(ordered) - 1, best)
    return ordered


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None = None,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    pinned: Collection[str] = (),
) -> list[str]:
    """Delete the oldest checkpoints until `save_total_limit` are left; None or a number below 1 deletes none.

    The newest and the best are never deleted, so with a limit of 1 both may stay. The best is recognised however its
    path is spelled, and by its name alone when the whole run was moved since the path was noted. Those that are
    `pinned`, by path, stay too, and count only where they are among the newest.

    Returns: the paths deleted. What cannot be deleted is logged and stays.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    checkpoints = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    if not checkpoints:
        return []
    best = _find(checkpoints, best_model_checkpoint)
    candidates, num_to_delete = surplus(checkpoints, save_total_limit, best, pinned)
    deleted: list[str] = []
    for path in candidates:
        if len(deleted) >= num_to_delete:
            break
        try:
            _discard(Path(path))
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted: %s", path, error)
        else:
            deleted.append(path)
    return deleted


def surplus(checkpoints: list[str], limit: int, best: str | None, pinned: Collection[str]) -> tuple[list[str], int]:
    """Of checkpoints in their order, those that may be deleted, and how many of them a limit wants gone.

    Args:
        best: stays, as the newest does; both count.
        pinned: stay too, and count only where they are among the newest.
    """
    protected = {checkpoints[-1], best} - {None}
    limit -= sum(path in pinned for path in checkpoints[-limit:])
    free = [path for path in checkpoints if path not in pinned]
    num_to_delete = len(free) - max(limit, len(protected.intersection(free)))
    return [path for path in free if path not in protected], num_to_delete


@contextmanager
def staged(final: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a folder that appears at once and complete, or not at all.

    Yields a hidden, empty folder beside `final`. When the block ends, it is sealed with a manifest, brought to the disk
    and renamed to `final`; a folder that was there is kept aside until then. When the block raises, what was written is
    removed and `final` is as it was.

    Raises: OSError, when the disk refuses (the errno tells: ENOSPC, EROFS, ...), with `final` as it was before.
    """
    final = Path(final)
    temporary = begin(final)
    try:
        yield temporary
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_output_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder that a run writes into.

    Raises:
        OSError: it cannot be made or written to; the message names the option.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        message = f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): name another folder"
        raise OSError(error.errno, message) from error


def begin(final: str | os.PathLike[str]) -> Path:
    """Make the hidden folder in which `final` is written; `publish` ends it. `staged` is both.

    Raises: NotADirectoryError, when `final` is there and is no folder.
    """
    final = Path(final)
    if os.path.lexists(final) and not final.is_dir():
        raise NotADirectoryError(f"{final} is there and is not a folder: move it away or save elsewhere")
    os.makedirs(final.parent, exist_ok=True)
    temporary = _hidden(final, "incomplete")
    os.mkdir(temporary)
    return temporary


def publish(temporary: Path, final: Path, known: Mapping[str, KnownFile] | None = None) -> None:
    """Seal `temporary` (see `manifest.seal`) and give it its name, in one rename. An older `final` is then deleted."""
    seal(temporary, known)
    aside: Path | None = None
    if os.path.lexists(final):
        aside = _hidden(final, "replaced")
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except BaseException:
        if aside is not None:
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    if aside is not None:
        try:
            _discard(aside)
        except OSError as error:
            logger.warning("the replaced folder %s cannot be deleted: %s", aside, error)


def discard_unfinished(temporary: Path) -> None:
    """Remove what `begin` made, where it is not to be published."""
    shutil.rmtree(temporary, ignore_errors=True)


def recover(output_dir: str | os.PathLike[str], report: Callable[[str], None], *, only: str | None = None) -> None:
    """Undo what a crash left in `output_dir`. Call it before a run starts, on one process, with no save under way.

    A folder that was put aside for a new one that never came is put back; unfinished and half-deleted ones are removed,
    unfinished files too, but for those of another process that is alive. `report` gets one sentence for each; nothing
    is raised for what cannot be changed. `only` limits it to what is left of one folder of that name.
    """
    output_dir = Path(output_dir)
    try:
        names = sorted(os.listdir(output_dir))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        match = _HIDDEN.fullmatch(name)
        path = output_dir / name
        if match is None or only not in (None, match["name"]):
            continue
        try:
            _recover_one(path, output_dir / match["name"], match["kind"], int(match["pid"]), report)
        except OSError as error:
            report(f"{path} is left from a crash and cannot be cleared: {error}")


def newest_valid(output_dir: str | os.PathLike[str], report: Callable[[str], None]) -> Path | None:
    """The checkpoint with the highest step that `verify` finds good, or None.

    `report` gets one sentence for each one passed over (why), and for files in the chosen one that its manifest does
    not list. Reads the whole checkpoint once.
    """
    for folder in reversed(list_checkpoints(output_dir)):
        problems = verify(folder)
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            report(f"{folder} is passed over: {'; '.join(problems[:3])}{more}")
            continue
        extra = extra_files(folder) if (folder / MANIFEST_NAME).exists() else []
        if extra:
            report(f"{folder} has files that its manifest does not list: {', '.join(extra)}")
        return folder
    return None


def _recover_one(path: Path, final: Path, kind: str, pid: int, report: Callable[[str], None]) -> None:
    if kind == "replaced" and not os.path.lexists(final):
        os.rename(path, final)
        sync_folder(final.parent)
        report(f"{final} is back: a crash had left it aside while it was being replaced")
    elif kind == "incomplete" and is_other_process(pid):
        report(f"{path} is left alone: process {pid}, which may be writing it, is alive")
    else:
        if path.is_dir():
            _discard(path)
        else:  # the record of a run, cut off
            path.unlink()
        report(f"{path} is removed: a crash had left it behind")


def _find(checkpoints: list[str], wanted: str | os.PathLike[str] | None) -> str | None:
    """The one of `checkpoints` that `wanted` means: the same folder, else (if that is gone) one of the same name."""
    if wanted is None:
        return None
    for path in checkpoints:
        if os.path.realpath(path) == os.path.realpath(wanted):
            return path
    if os.path.exists(wanted):
        return None
    return next((path for path in checkpoints if Path(path).name == Path(wanted).name), None)


def _hidden(final: Path, kind: str) -> Path:
    """A hidden sibling of `final` that does not exist yet."""
    plain = final.parent / f".{final.name}.{kind}-{os.getpid()}"
    if not os.path.lexists(plain):
        return plain
    numbered = (final.parent / f"{plain.name}-{number}" for number in count(1))
    return next(path for path in numbered if not os.path.lexists(path))


def _discard(folder: Path) -> None:
    """Delete a folder so that no moment shows half of it under its name: renamed first, then removed.

    Raises: OSError, when it cannot be renamed. What then cannot be removed stays hidden, for `recover`.
    """
    match = _HIDDEN.fullmatch(folder.name)
    if match is None or match["kind"] != "deleted":
        name = folder.name if match is None else match["name"]
        hidden = _hidden(folder.parent / name, "deleted")
        os.rename(folder, hidden)
        folder = hidden
    if folder.is_symlink():
        os.unlink(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s cannot be removed whole; it is tried again at the next start", folder)


def is_other_process(pid: int) -> bool:
    """Whether another process of this machine has the id `pid` now. False on Windows, where asking could end it."""
    if os.name != "posix" or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
