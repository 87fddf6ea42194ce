"""Selects the files of a push from the output folder and a published checkpoint, hard-linked during the upload."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.folders import PREFIX_CHECKPOINT_DIR, is_other_process
from paceline.checkpoint.inside import leads_outside, without_links_outside
from paceline.core.lineage import DIFF_FILE, PACKAGES_FILE, REPORT_FILE
from paceline.hub.described import CheckpointForm

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
LAST_CHECKPOINT = "last-checkpoint"  # the checkpoint's name in the repository; scripts resume from it

PUSHING_THREAD = "paceline-push"  # name of the threads that push

_OF_MACHINE = [name.replace(".", "*.", 1) for name in (DIFF_FILE, PACKAGES_FILE)]  # and those of earlier starts

_STAGED = re.compile(r"\.push-(\d+)-\w+")
_WEIGHTS = re.compile(r"(?:pytorch_model|model|adapter_model)[-.\w]*\.(?:safetensors|bin)(?:\.index\.json)?")


def files_of_output(folder: Path) -> dict[str, Path]:
    """Returns the files of an output folder by relative path.

    Checkpoints, the report, the user's uncommitted code and installed packages, hidden files and names that begin with
    _ are left out.
    """
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        is_top = inside == Path()
        folders[:] = [name for name in folders if _is_pushed(name, is_top)]
        for name in names:
            path = Path(place, name)
            if not _is_pushed(name, is_top) or not path.is_file():
                continue
            if leads_outside(path, folder):
                logger.warning("%s is a link to a file outside of %s: it is not pushed.", path, folder)
            else:
                found[(inside / name).as_posix()] = path
    return found


def _is_pushed(name: str, is_top: bool) -> bool:
    if name.startswith(".") or fnmatch.fnmatchcase(name, f"{PREFIX_CHECKPOINT_DIR}-*"):
        return False
    is_private = any(fnmatch.fnmatchcase(name, pattern) for pattern in _OF_MACHINE)
    return not (is_top and (name.startswith("_") or name == REPORT_FILE or is_private))


@dataclass(frozen=True)
class Staged:
    """A checkpoint staged for a push. Its files are hard-linked, so that rotation may delete it during the upload.

    Attributes:
        folder: a hidden folder in the output folder; `drop` removes it.
        output_dir: the output folder, whose files next to the checkpoints are pushed with the model.
        form: the structure of the checkpoint, which identifies the model's files.
        model_files: returns additional files of the model.
    """

    folder: Path
    output_dir: Path
    form: CheckpointForm
    model_files: Callable[[], dict[str, Path]]

    @classmethod
    def take(cls, checkpoint: Path, output_dir: Path, form: CheckpointForm) -> Staged:
        """Hard-links the files of a published checkpoint. Raises: OSError."""
        folder = Path(tempfile.mkdtemp(prefix=f".push-{os.getpid()}-", dir=output_dir))
        try:
            ignore = without_links_outside(checkpoint)
            shutil.copytree(checkpoint, folder / "checkpoint", copy_function=_link, ignore=ignore)
            (folder / "weights").mkdir()
            return cls(folder, output_dir, form, form.model_files(folder / "checkpoint", folder / "weights"))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def files(self, checkpoint_name: str | None) -> dict[str, Path]:
        """Maps paths in the repository to files: the model, the files next to the checkpoints, and a named checkpoint.

        The files next to the checkpoints are copied, because the run continues to write its logs. Raises: OSError.
        """
        source = self.folder / "checkpoint"
        held = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*")) if path.is_file()}
        rest = self.form.resume_files
        chosen = {name: path for name, path in held.items() if not any(fnmatch.fnmatch(name, one) for one in rest)}
        chosen.update(self.model_files())
        for name, path in files_of_output(self.output_dir).items():
            if name != CARD_NAME and (name in chosen or _WEIGHTS.fullmatch(name)):
                continue  # weights of an earlier save
            copy = self.folder / "beside" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                chosen[name] = Path(shutil.copy2(path, copy))
            except FileNotFoundError:
                continue  # deleted in the meantime
        if checkpoint_name is not None:
            chosen.update({f"{checkpoint_name}/{name}": path for name, path in held.items()})
        return chosen

    def drop(self) -> None:
        """Removes the staging folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def clear_staged(output_dir: Path) -> None:
    """Removes the staging folders of a killed run."""
    for path in output_dir.glob(".push-*"):
        match = _STAGED.fullmatch(path.name)
        if match is not None and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():  # in a container every run may have the same process id
        return any(thread.name == PUSHING_THREAD for thread in threading.enumerate())
    return is_other_process(pid)


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
