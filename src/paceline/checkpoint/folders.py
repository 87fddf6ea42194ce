"""Checkpoint folders: names, atomic publication by rename, recovery after a crash, rotation. Standard library only.

A folder is written under a hidden name next to its final one. One rename makes it visible when it is complete, with its
manifest, on disk. Hidden siblings, all removed or restored by `recover`:

    .NAME.incomplete-PID    being written; never read
    .NAME.replaced-PID      the old folder of the same name, until the new one is in place
    .NAME.deleted-PID       being deleted; a partly deleted folder must not be visible
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from paceline.checkpoint.kept_files import keep_files
from paceline.checkpoint.manifest import MANIFEST_NAME, KnownFile, extra_files, seal, sync_folder, verify
from paceline.core.lineage import is_part, mark_of, run_in

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
    "own_checkpoints",
    "publish",
    "recover",
    "rotate_checkpoints",
    "seal",
    "sort_checkpoints",
    "staged",
    "staging_place",
    "step_of",
    "surplus",
    "sync_folder",
    "verify",
]

logger = logging.getLogger(__name__)

PREFIX_CHECKPOINT_DIR = "checkpoint"

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>incomplete|replaced|deleted)-(?P<pid>\d+)(?:-\d+)?")
# Below this spread (seconds) over several checkpoints, modification times are considered unreliable.
_LEAST_MTIME_SPREAD = 1.0


def checkpoint_name(step: int) -> str:
    """Returns the folder name of the checkpoint at optimizer step `step`: `checkpoint-STEP`."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """Returns the step in a checkpoint's path or name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoint folders of a run, lowest step first; an empty list if `output_dir` does not exist."""
    return [Path(path) for path in sort_checkpoints(output_dir)]


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the path of the checkpoint with the highest step of the last run started in `folder`, or None.

    Checkpoints of earlier runs are skipped with a warning. The checkpoint is not verified.

    Raises: FileNotFoundError, if `folder` does not exist.
    """
    os.stat(folder)
    own, others = own_checkpoints(folder)
    report_others(own, others, logger.warning)
    return str(own[-1]) if own else None


def own_checkpoints(output_dir: str | os.PathLike[str]) -> tuple[list[Path], list[Path]]:
    """Returns the checkpoints of the run last started or resumed in a folder, and of other runs; lowest step first.

    Without a record of a run (`run.json`), all checkpoints count as the run's.
    """
    run = run_in(Path(output_dir))
    own: list[Path] = []
    others: list[Path] = []
    for path in list_checkpoints(output_dir):
        (own if run is None or is_part(run, path.name, mark_of(path)) else others).append(path)
    return own, others


def report_others(own: Sequence[Path], others: Sequence[Path], report: Callable[[str], None]) -> None:
    """Reports in one sentence the skipped checkpoints of other runs with a higher step than the run's newest."""
    later = [path for path in others if not own or step_of(path) > step_of(own[-1])]
    if later:
        names = ", ".join(path.name for path in later)
        report(
            f"{later[-1].parent}: {names} is skipped: it does not belong to the run started or resumed here last. "
            "Name it in resume_from_checkpoint to resume from it."
        )


def sort_checkpoints(
    output_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Returns the paths of the folders `PREFIX-NUMBER` in `output_dir`, oldest first: by number or modification time.

    Other names with this prefix (`checkpoint-12-copy`) are not checkpoints. `best_model_checkpoint` is moved to the
    second last place unless it is last. If all modification times are within one second, they are considered
    unreliable, and the numbers decide.
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
    """Deletes the oldest checkpoints until `save_total_limit` are left; None or a number below 1 deletes none.

    The newest and the best checkpoint are never deleted, so with a limit of 1 both may stay. The best one is recognized
    by any spelling of its path, and by its name alone if the run folder was moved. `pinned` paths stay too, and count
    towards the limit only if they are among the newest.

    Returns: the deleted paths. A failed deletion is logged.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return []
    checkpoints = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    return delete_oldest(checkpoints, save_total_limit, best_model_checkpoint, pinned)


def delete_oldest(
    checkpoints: Sequence[str],
    limit: int,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
    pinned: Collection[str] = (),
) -> list[str]:
    """Deletes the first of `checkpoints`, oldest first, until `limit` are left: see `rotate_checkpoints`."""
    if not checkpoints:
        return []
    best = _find(checkpoints, best_model_checkpoint)
    candidates, num_to_delete = surplus(checkpoints, limit, best, pinned)
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


def surplus(checkpoints: Sequence[str], limit: int, best: str | None, pinned: Collection[str]) -> tuple[list[str], int]:
    """Returns the checkpoints that may be deleted, in order, and the number of deletions that a limit requires.

    Args:
        checkpoints: all checkpoints, oldest first.
        limit: the number of checkpoints to keep.
        best: the best checkpoint. It is kept, as the newest is; both count towards the limit.
        pinned: further checkpoints to keep; they count only if they are among the newest.
    """
    protected = {checkpoints[-1], best} - {None}
    limit -= sum(path in pinned for path in checkpoints[-limit:])
    free = [path for path in checkpoints if path not in pinned]
    num_to_delete = len(free) - max(limit, len(protected.intersection(free)))
    return [path for path in free if path not in protected], num_to_delete


@contextmanager
def staged(final: str | os.PathLike[str], known: Mapping[str, KnownFile] | None = None) -> Iterator[Path]:
    """Creates a folder atomically: complete, or not at all.

    Yields a hidden, empty folder next to `final`. When the block ends, the folder gets a manifest, is synced to disk
    and renamed to `final`; an existing folder is kept until then. When the block raises, the hidden folder is removed
    and `final` is unchanged.

    Args:
        final: path of the folder.
        known: files whose hash is known when the block ends, for `manifest.seal`.

    Raises: OSError, if writing fails (ENOSPC, EROFS, ...); `final` is unchanged.
    """
    final = Path(final)
    temporary = begin(final)
    try:
        yield temporary
        publish(temporary, final, known)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_output_folder(folder: str | os.PathLike[str]) -> None:
    """Creates the output folder of a run.

    Raises:
        OSError: the folder cannot be created or written to; the message names the option.
    """
    try:
        _make_folders(Path(folder))
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        message = f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): name another folder"
        raise OSError(error.errno, message) from error


def _make_folders(folder: Path) -> None:
    """Creates a folder with its parents and syncs the new directory entries to disk where permitted."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    os.makedirs(folder, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # a folder with execute but no read permission
            sync_folder(path.parent)


def begin(final: str | os.PathLike[str]) -> Path:
    """Creates the hidden folder in which `final` is written. `publish` completes it; `staged` does both.

    Raises: NotADirectoryError, if `final` exists and is not a folder.
    """
    temporary = staging_place(final)
    _make_folders(temporary.parent)
    os.mkdir(temporary)
    return temporary


def staging_place(final: str | os.PathLike[str]) -> Path:
    """Returns the hidden path at which `final` is written; creates nothing.

    Raises: NotADirectoryError, if `final` exists and is not a folder.
    """
    final = Path(final)
    if os.path.lexists(final) and not final.is_dir():
        raise NotADirectoryError(f"{final} exists and is not a folder: move it away or save elsewhere")
    return _hidden(final, "incomplete")


def publish(temporary: Path, final: Path, known: Mapping[str, KnownFile] | None = None) -> None:
    """Seals `temporary` (see `manifest.seal`) and renames it to `final`. An older `final` is then deleted.

    Files that user code wrote to `final` are kept (see `keep_files`).
    """
    keep_files(final, temporary)
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
    """Removes the folder that `begin` created, without publishing it."""
    shutil.rmtree(temporary, ignore_errors=True)


def recover(output_dir: str | os.PathLike[str], report: Callable[[str], None], *, only: str | None = None) -> None:
    """Cleans up `output_dir` after a crash. Call it before a run starts, on one rank, with no save in progress.

    A replaced folder whose successor was not published is restored. Unfinished files and folders and partly deleted
    folders are removed, except those of another process that is alive. `report` gets one sentence for each. Failures
    are reported, not raised. `only` limits the cleanup to the folder of that name.
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
            report(f"{path} is left from a crash and cannot be removed: {error}")


def newest_valid(output_dir: str | os.PathLike[str], report: Callable[[str], None]) -> Path | None:
    """Returns the valid checkpoint with the highest step of the run last started, or None.

    `report` gets one sentence with the reason for each skipped checkpoint, and one for files of the returned checkpoint
    that its manifest does not list. Reads the whole checkpoint once.
    """
    own, others = own_checkpoints(output_dir)
    report_others(own, others, report)
    for folder in reversed(own):
        problems = verify(folder)
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            report(f"{folder} is skipped: {'; '.join(problems[:3])}{more}")
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
        report(f"{final} is restored: a crash had interrupted its replacement")
    elif kind == "incomplete" and is_other_process(pid):
        report(f"{path} is left alone: process {pid}, which may be writing it, is alive")
    else:
        if path.is_dir():
            _discard(path)
        else:  # an incomplete `run.json`
            path.unlink()
        report(f"{path} is removed: it was left by a crash")


def _find(checkpoints: Sequence[str], wanted: str | os.PathLike[str] | None) -> str | None:
    """Returns the checkpoint that is the folder `wanted` or, if that folder is gone, has the same name; else None."""
    if wanted is None:
        return None
    for path in checkpoints:
        if os.path.realpath(path) == os.path.realpath(wanted):
            return path
    if os.path.exists(wanted):
        return None
    return next((path for path in checkpoints if Path(path).name == Path(wanted).name), None)


def _hidden(final: Path, kind: str) -> Path:
    """Returns the path of a hidden sibling of `final` that does not exist yet."""
    plain = final.parent / f".{final.name}.{kind}-{os.getpid()}"
    if not os.path.lexists(plain):
        return plain
    numbered = (final.parent / f"{plain.name}-{number}" for number in count(1))
    return next(path for path in numbered if not os.path.lexists(path))


def _discard(folder: Path) -> None:
    """Deletes a folder: renames it to a hidden name first, so that a partly deleted folder is never visible.

    Raises: OSError, if it cannot be renamed. Files that cannot be removed stay hidden, for `recover`.
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
        logger.warning("%s cannot be removed completely; the next start retries it", folder)


def is_other_process(pid: int) -> bool:
    """True if another process of this machine has the id `pid`. False on Windows, where the check could end it."""
    if os.name != "posix" or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
