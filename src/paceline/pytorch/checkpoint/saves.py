"""The saves of a run: one checkpoint that is being written, and the state kept between saves."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from paceline.checkpoint import folders
from paceline.checkpoint.manifest import KnownFile
from paceline.checkpoint.space import Place
from paceline.pytorch.checkpoint.background import HostBuffers, HostCopy, Writer
from paceline.pytorch.checkpoint.frozen_cache import FrozenPart
from paceline.pytorch.checkpoint.tensors import save_tensors

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One checkpoint that is being written; `run` may fail and be retried.

    Attributes:
        folder: the final path.
        temporary: the hidden folder for writing.
        place: checked for free space first.
        num_bytes: size of the checkpoint, without the small files that every checkpoint has.
        copy: the data still to write; None if everything has been written.
        known: files whose hash is known.
        is_best: True if the checkpoint holds the best model so far.
        is_in_memory: the hidden folder could not be created, so everything is in the copy.
    """

    in_shards: ClassVar[bool] = False  # True if each process writes its own shards

    folder: Path
    temporary: Path
    place: Place
    num_bytes: int = 0
    copy: HostCopy | None = None
    known: dict[str, KnownFile] = field(default_factory=dict)
    is_best: bool = False
    is_in_memory: bool = False

    @property
    def can_be_written(self) -> bool:
        """True if `run` can be retried: all data is in the copy or the hidden folder."""
        return self.copy is not None and (self.is_in_memory or self.temporary.is_dir())

    def run(self) -> None:
        """Writes and publishes the checkpoint. Raises OSError if the disk refuses."""
        if self.copy is not None:
            self.place.check(self.num_bytes)
            if self.is_in_memory:
                self.temporary.mkdir(parents=True, exist_ok=True)
            self.copy.write()
        folders.publish(self.temporary, self.folder, self.known)

    def later(self, write: Callable[[], Any]) -> None:
        """Calls `write` with the deferred writes, or immediately if nothing is deferred."""
        if self.copy is None:
            write()
        else:
            self.copy.add(write)

    def drop(self) -> None:
        """Deletes the hidden folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def hold(self, processing_class: Any) -> None:
        """Holds the files of a tokenizer or processor in memory, to be written with the rest."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as aside:
            try:
                processing_class.save_pretrained(aside)
            except OSError as error:
                logger.warning(
                    "%s will be without its processing class, which could not be written: %s", self.folder, error
                )
            for path in sorted(Path(aside).rglob("*")):
                if path.is_file():
                    content = path.read_bytes()
                    self.num_bytes += len(content)
                    self.later(partial(write_file, self.temporary / path.relative_to(aside), content))


@dataclass
class Saves:
    """The saves of one run.

    Attributes:
        writer: the thread that writes, and its finished tasks.
        buffers: the host memory of the copies.
        frozen: location of the stored frozen weights.
        job: the checkpoint whose contents are being collected.
        postponed: a best model that could not be written yet.
        failed: names of the checkpoints that could not be written since the last successful one.
        is_published: True if the last checkpoint was published when the save returned.
        random: the random states of all processes at the time of the save, by rank; None between saves.
        positions: the processes' positions in the data, if they differ.
        whole: model and optimizer state gathered from all processes; None if not sharded, and between saves.
        sharded: state of sharded checkpoints between saves, with a `close()`; None before the first.
        obstacle: the reason why this run cannot write asynchronously; None if it can.
    """

    writer: Writer = field(default_factory=Writer)
    buffers: HostBuffers = field(default_factory=HostBuffers)
    frozen: FrozenPart = field(default_factory=FrozenPart)
    job: Job | None = None
    postponed: Job | None = None
    failed: list[str] = field(default_factory=list)
    is_published: bool = True
    random: list[Any] | None = None
    positions: list[Any] | None = None
    whole: dict[str, Any] | None = None
    sharded: Any = None
    obstacle: str | None = None
    _place: Place | None = None
    _said: set[str] = field(default_factory=set)

    def place_of(self, output_dir: Path) -> Place:
        """Returns the place of the run's checkpoints; the same object for all saves into one folder."""
        if self._place is None or self._place.folder != output_dir:
            self._place = Place(output_dir)
        return self._place

    def say_once(self, sentence: str) -> None:
        """Logs a sentence once per run, since it would repeat at every save."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.info(sentence)

    # ---- one save

    def begin(self) -> None:
        """Waits for the previous save: only one runs at a time, and its memory is reused."""
        self.writer.join()
        self.is_published = False

    @contextmanager
    def gathered(self, random: list[Any], positions: list[Any] | None, whole: dict[str, Any] | None) -> Iterator[None]:
        """Returns a context that holds the state gathered from all processes while a checkpoint is collected."""
        self.random = random
        self.positions = positions
        self.whole = whole
        try:
            yield
        finally:
            self.random = self.positions = self.whole = None

    def of_shards(self, make: Callable[[], Any]) -> Any:
        """Returns the state of sharded checkpoints; `make` creates it at the first save."""
        if self.sharded is None:
            self.sharded = make()
        return self.sharded

    @contextmanager
    def taking(self, job: Job) -> Iterator[None]:
        """Sets `job` for the methods that write the parts of a checkpoint."""
        self.job = job
        try:
            yield
        finally:
            self.job = None

    def put(self, state: object, folder: str | Path, name: str) -> None:
        """Writes tensors and plain values to a file, or copies them to be written later."""
        job = self.job
        if job is not None and job.copy is not None and Path(folder) == job.temporary:
            job.copy.add_tensors(state, Path(folder, name))
        else:
            save_tensors(state, Path(folder, name))

    def published(self) -> None:
        """Records that a save returned with its checkpoint published."""
        self.failed.clear()
        self.is_published = True

    def expect(self) -> None:
        """Assumes that the next save publishes its checkpoint, since an overridden method does not report it."""
        self.is_published = True

    def published_elsewhere(self) -> None:
        """Records that another process writes, so that this process does not wait for the files."""
        self.is_published = True

    def write_in_front(self, reason: str) -> None:
        """Makes all further saves of this run synchronous."""
        self.buffers.clear()
        self.obstacle = reason

    # ---- a best model that the disk refused

    def postpone(self, job: Job) -> None:
        """Keeps a job and its memory to be written later; replaces an earlier postponed job."""
        if self.postponed is not None:
            self.postponed.drop()  # no longer the best
        self.postponed = job
        self.buffers = HostBuffers()

    def retry_postponed(self) -> None:
        """Tries to write the postponed job, if there is one; on either thread."""
        job = self.postponed
        if job is None:
            return
        try:
            job.run()
        except OSError as error:
            logger.warning("%s could not be written yet either: %s", job.folder, error)
            if not job.can_be_written:
                self.postponed = None
        else:
            logger.warning("%s, the best model when it was taken, has been written now.", job.folder)
            self.postponed = None

    def finish_postponed(self) -> Path | None:
        """Writes the postponed job at the end of a run; returns its folder if the disk accepted it."""
        job = self.postponed
        if job is None:
            return None
        written = None
        try:
            job.run()
        except OSError as error:
            logger.error("%s, the best model, could not be written and is lost: %s", job.folder, error)
            job.drop()
        else:
            written = job.folder
        self.postponed = None
        return written

    def close(self, folder: Path | None) -> None:
        """Waits for pending writes, and frees the memory of the copies. Raises nothing, since another error may be
        propagating.

        Args:
            folder: of the run; remains of an interrupted save are removed from it (torch raises in a signal handler
                when a worker dies, so an error can occur at any line). None if this process writes nothing there.
        """
        try:
            self.writer.join()
        except Exception:
            logger.exception("A callback failed in the on_save event of the last checkpoint.")
        if self.postponed is not None:
            self.postponed.drop()
            self.postponed = None
        self.buffers.clear()
        if self.sharded is not None:
            self.sharded.close()
        if folder is not None:
            folders.recover(folder, logger.info)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, and creates its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
