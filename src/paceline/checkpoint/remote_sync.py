"""Synchronization of a run's folder to an object store: a thread uploads new files and deletes rotated checkpoints.

Each pass derives the pending work from the folder and the store, so an error, a kill or an outage loses nothing: the
next pass continues. Checkpoints are uploaded first, the newest before older ones. Hard links protect a checkpoint
during its upload from rotation and the next save.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint import folders
from paceline.checkpoint.inside import leads_outside, without_links_outside
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.retention import Retention, unwanted
from paceline.checkpoint.stores import ObjectStore, StoreError, digest_of, is_same_manifest
from paceline.core.lineage import RunMark

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # each pass lists a few names on a local disk
SECONDS_BETWEEN_FILES = 60.0  # between uploads of logs, each with one request per changed file
SECONDS_BETWEEN_WORDS = 30.0  # between log lines while the end of a run waits
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between retries while the store is unreachable
PATIENCE = 900.0  # seconds that the end of a run waits for an unreachable store

_HELD = re.compile(r"\.upload-(\d+)-checkpoint-\d+")

Policy = tuple[Retention, list[Mapping[str, Any]], str | None, RunMark | None]


def keep_all() -> Policy | None:
    """Returns a policy that keeps all checkpoints."""
    return Retention(), [], None, None


class RemoteSync:
    """Uploads a run's folder asynchronously, on its own thread.

    An error is logged once per outage and never raised; retries continue at growing intervals.

    Args:
        store: the destination.
        folder: the run's folder.
        policy: returns the current input of rotation: the policy, the rows logged so far, the path of the best
            checkpoint, and the run (None before the first training). It returns None once the Trainer that writes to
            the folder is gone: the thread then ends after a last pass.

    Attributes:
        failure: the error of the last pass, if it failed.
    """

    def __init__(self, store: ObjectStore, folder: Path, policy: Callable[[], Policy | None] = keep_all) -> None:
        self.store, self.folder, self.policy = store, folder, policy
        self.failure: Exception | None = None
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._sent: dict[str, str] = {}  # checkpoint -> digest of its manifest in the store
        self._seen: set[str] = set()  # checkpoints seen in the folder
        self._files: dict[str, tuple[int, int]] = {}  # bytes and modification time (ns) of the uploaded files
        self._files_at = -SECONDS_BETWEEN_FILES
        self._pause = FIRST_PAUSE
        self._said: set[str] = set()
        self._is_closed = False
        self._has_cleared = False
        self._process = os.getpid()
        for thread in threading.enumerate():
            if isinstance(thread, Follower) and thread.remote_sync.folder == folder:
                thread.remote_sync.close()  # of an earlier Trainer in this folder; this object replaces it
        self._clear_held()
        Follower(self).start()
        self._wait_at_exit()

    # ---- called by the run

    def finish(self, patience: float = PATIENCE) -> bool:
        """Uploads everything in the folder and waits for completion. Returns: True if the store is complete.

        Args:
            patience: seconds of retries while the store is unreachable.

        Raises: KeyboardInterrupt; the next run then uploads the rest from the folder.
        """
        start, pause, words_at = time.monotonic(), FIRST_PAUSE, time.monotonic()
        if self._lock.locked():
            logger.info("Waiting for uploads to %s; Ctrl-C leaves without them.", self.store.url)
        while not self.look(everything=True):
            waited = time.monotonic() - start
            is_lasting = isinstance(self.failure, StoreError) and self.failure.is_lasting
            if waited > patience or is_lasting:
                logger.error(
                    "%s does not have all of this run: it is saved in %s, and the next start with this output_dir "
                    "uploads the rest.",
                    self.store.url,
                    self.folder,
                )
                return False
            if time.monotonic() - words_at > SECONDS_BETWEEN_WORDS:
                words_at = time.monotonic()
                logger.info("Still trying to reach %s; Ctrl-C leaves without it.", self.store.url)
            time.sleep(min(pause, max(0.0, patience - waited) + 0.01))
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def close(self) -> None:
        """Stops after the current upload; the remaining files stay in the folder."""
        self._is_closed = True
        self._wake.set()
        with self._lock:
            pass

    def look(self, everything: bool = False) -> bool:
        """Brings the store up to date. Returns: True on success.

        Args:
            everything: True also uploads the files next to the checkpoints, even if their last upload is recent.
        """
        with self._lock:
            try:
                if not self._has_cleared:
                    self._begin()
                has_sent = self._send_checkpoints()
                if has_sent or everything or time.monotonic() - self._files_at > SECONDS_BETWEEN_FILES:
                    self._send_files()
            except Exception as error:
                self._note(error)
                return False
            self._note(None)
            return True

    # ---- one pass

    def _begin(self) -> None:
        for name in self.store.clear_unfinished():
            logger.info("%s/%s was left incomplete by a killed run; it is removed.", self.store.url, name)
        self._has_cleared = True

    def _send_checkpoints(self) -> bool:
        """Uploads missing checkpoints, then rotates. Returns: True if anything changed."""
        has_changed = False
        failed: set[str] = set()
        while (name := self._next(failed)) is not None:
            try:
                with self._held(name) as held:
                    has_changed |= self._send(held, name)
            except FileNotFoundError:  # deleted by rotation before it was linked
                failed.add(name)
        present = {path.name for path in folders.list_checkpoints(self.folder)}
        gone = self._seen - present
        self._seen |= present
        if has_changed or gone:
            self._rotate(present)
        return has_changed

    def _send(self, held: Path, name: str) -> bool:
        """Uploads a checkpoint unless the store has an identical one. Returns: True if it was uploaded."""
        digest = digest_of(held)
        assert digest is not None
        manifest = self.store.read(f"{name}/{MANIFEST_NAME}")
        is_new = manifest is None or not is_same_manifest(held, manifest)
        if is_new:
            self.store.upload_checkpoint(held, name)
            logger.info("%s/%s is complete.", self.store.url, name)
        self._sent[name] = digest
        return is_new

    def _next(self, failed: set[str]) -> str | None:
        """Returns the newest checkpoint of the folder that is missing or different in the store."""
        for path in reversed(folders.list_checkpoints(self.folder)):
            self._seen.add(path.name)
            digest = digest_of(path)
            if digest is None:
                self._say_once(f"{path} has no {MANIFEST_NAME}, so it is not uploaded to {self.store.url}.")
            elif path.name not in failed and self._sent.get(path.name) != digest:
                return path.name
        return None

    def _rotate(self, present: set[str]) -> None:
        """Deletes from the store the checkpoints that no policy keeps, except those still in the folder."""
        policy = self.policy()
        if policy is None:
            return
        retention, history, best, run = policy
        for name in unwanted(self.store.checkpoints(), retention, history, Path(best).name if best else None, run=run):
            if name not in present:
                self.store.delete_checkpoint(name)
                self._sent.pop(name, None)

    def _send_files(self) -> None:
        """Uploads the changed files next to the checkpoints: logs, records, the final model."""
        for name, path in files_beside(self.folder).items():
            try:
                found = path.stat()
                mark = (found.st_size, found.st_mtime_ns)
                if self._files.get(name) != mark:
                    self.store.upload(path, name)
                    self._files[name] = mark
            except FileNotFoundError:
                continue  # deleted in the meantime
        self._files_at = time.monotonic()

    @contextmanager
    def _held(self, name: str) -> Iterator[Path]:
        """Links the files of a checkpoint into a hidden folder. Raises: FileNotFoundError, if it is gone."""
        held = self.folder / f".upload-{os.getpid()}-{name}"
        shutil.rmtree(held, ignore_errors=True)
        try:
            try:
                source = self.folder / name
                shutil.copytree(source, held, copy_function=_link, ignore=without_links_outside(source))
            except shutil.Error as error:
                raise FileNotFoundError(str(error)) from error
            yield held
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _clear_held(self) -> None:
        """Removes the hard links that a killed run left."""
        for path in self.folder.glob(".upload-*"):
            match = _HELD.fullmatch(path.name)
            if match is not None and not folders.is_other_process(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)

    # ---- log lines and waiting

    def _note(self, error: Exception | None) -> None:
        before, self.failure = self.failure, error
        if error is None:
            self._pause = FIRST_PAUSE
            if before is not None:
                logger.warning("%s can be reached again and is up to date.", self.store.url)
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if before is None:
            logger.warning(
                "%s. Training continues, the files are in %s, and the upload is retried until it succeeds.",
                error if isinstance(error, StoreError) else f"{type(error).__name__}: {error}",
                self.folder,
            )

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    def _wait_at_exit(self) -> None:
        """Brings the store up to date at interpreter exit, because scripts also write files after training."""

        def finish() -> None:
            if self._is_closed or os.getpid() != self._process:  # a forked worker does not inherit the thread
                return
            with suppress(KeyboardInterrupt):
                self.finish(0.0 if self.failure is not None else PATIENCE)
            self.close()

        # `atexit` is too late: the executors of file systems accept no more work by then
        register: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the interpreter is already ending
            register(finish)


class Follower(threading.Thread):
    """The thread of a `RemoteSync`: runs a pass at intervals, and a last one once the Trainer is gone."""

    def __init__(self, remote_sync: RemoteSync) -> None:
        super().__init__(name="paceline-store", daemon=True)
        self.remote_sync = remote_sync

    def run(self) -> None:
        """Runs passes until the `RemoteSync` is closed."""
        remote_sync, pause = self.remote_sync, SECONDS_BETWEEN_LOOKS
        while not remote_sync._is_closed:
            remote_sync._wake.wait(pause)
            is_last = remote_sync.policy() is None
            if not remote_sync._is_closed and remote_sync.look(everything=is_last) and is_last:
                remote_sync.close()
            pause = SECONDS_BETWEEN_LOOKS if remote_sync.failure is None else remote_sync._pause


def files_beside(folder: Path) -> dict[str, Path]:
    """Returns the files of a run's folder by relative path, except checkpoints, hidden files and links out of it."""
    found: dict[str, Path] = {}
    for place, inner, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        inner[:] = [
            name
            for name in inner
            if not name.startswith(".")
            and not (inside == Path() and name.startswith(f"{folders.PREFIX_CHECKPOINT_DIR}-"))
        ]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file() and not leads_outside(path, folder):
                found[(inside / name).as_posix()] = path
    return found


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
