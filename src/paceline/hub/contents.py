"""What goes into a push: files of the output folder, and of a published checkpoint, held while they are sent."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.folders import PREFIX_CHECKPOINT_DIR, is_other_process
from paceline.hub.described import CheckpointForm

if TYPE_CHECKING:
    from paceline.hub.names import HubNames

CARD_NAME = "README.md"
LAST_CHECKPOINT = "last-checkpoint"  # the name in the repository that scripts resume from

PUSHING_THREAD = "paceline-push"  # the name of each thread that pushes

_STAGED = re.compile(r"\.push-(\d+)-\w+")
_WEIGHTS = re.compile(r"(?:pytorch_model|model|adapter_model)[-.\w]*\.(?:safetensors|bin)(?:\.index\.json)?")


def output_of(trainer: HubNames) -> Path:
    """The output folder, with its full name: what is pushed, and where the card is."""
    return Path(trainer._get_output_dir(None)).absolute()


def files_of_output(folder: Path) -> dict[str, Path]:
    """The files of an output folder by their path in it: no checkpoints, nothing hidden, nothing that begins with _."""
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        is_top = inside == Path()
        folders[:] = [name for name in folders if _is_pushed(name, is_top)]
        for name in names:
            path = Path(place, name)
            if _is_pushed(name, is_top) and path.is_file():
                found[(inside / name).as_posix()] = path
    return found


def _is_pushed(name: str, is_top: bool) -> bool:
    if name.startswith(".") or fnmatch.fnmatchcase(name, f"{PREFIX_CHECKPOINT_DIR}-*"):
        return False
    return not (is_top and name.startswith("_"))


@dataclass(frozen=True)
class Staged:
    """A checkpoint held for a push: its files are linked, so that it may be rotated away while they are sent.

    Attributes:
        folder: hidden, in the output folder; gone after `drop`.
        output_dir: what stands beside the checkpoints is pushed with the model.
        form: what of it is the model.
        model_files: further files of the model.
    """

    folder: Path
    output_dir: Path
    form: CheckpointForm
    model_files: Callable[[], dict[str, Path]]

    @classmethod
    def take(cls, checkpoint: Path, output_dir: Path, form: CheckpointForm) -> Staged:
        """Link the files of a published checkpoint. Raises: OSError."""
        folder = Path(tempfile.mkdtemp(prefix=f".push-{os.getpid()}-", dir=output_dir))
        try:
            shutil.copytree(checkpoint, folder / "checkpoint", copy_function=_link)
            (folder / "weights").mkdir()
            return cls(folder, output_dir, form, form.model_files(folder / "checkpoint", folder / "weights"))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def files(self, checkpoint_name: str | None) -> dict[str, Path]:
        """Path in the repository -> file, for the model and what stands beside it, and for the checkpoint if named.

        The files beside it are copied now: a run goes on writing to its logs. Raises: OSError.
        """
        source = self.folder / "checkpoint"
        held = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*")) if path.is_file()}
        rest = self.form.resume_files
        chosen = {name: path for name, path in held.items() if not any(fnmatch.fnmatch(name, one) for one in rest)}
        chosen.update(self.model_files())
        for name, path in files_of_output(self.output_dir).items():
            if name != CARD_NAME and (name in chosen or _WEIGHTS.fullmatch(name)):
                continue  # of an earlier save
            copy = self.folder / "beside" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                chosen[name] = Path(shutil.copy2(path, copy))
            except FileNotFoundError:
                continue  # gone meanwhile
        if checkpoint_name is not None:
            chosen.update({f"{checkpoint_name}/{name}": path for name, path in held.items()})
        return chosen

    def drop(self) -> None:
        """Let go of the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def clear_staged(output_dir: Path) -> None:
    """Remove what the pushes of a run that was killed have left."""
    for path in output_dir.glob(".push-*"):
        match = _STAGED.fullmatch(path.name)
        if match is not None and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():  # in a container, every run's
        return any(thread.name == PUSHING_THREAD for thread in threading.enumerate())
    return is_other_process(pid)


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
