"""The store follows the run's folder: one thread that uploads what is new there, and deletes what no policy keeps.

What is to be done is read off the folder and the store each time, so nothing is lost by an error, a kill or an outage:
whoever looks next goes on. Checkpoints go first, the newest before older ones; each is held by links while it goes up,
so that neither rotation nor the next save touches it.
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

from paceline.core import folders
from paceline.core.manifest import MANIFEST_NAME
from paceline.core.retention import Retention, unwanted
from paceline.core.stores import ObjectStore, StoreError, digest_of, is_same_manifest

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # at the folder: a listing of a few names on a local disk
SECONDS_BETWEEN_FILES = 60.0  # between uploads of logs, each a request for each file that grew
SECONDS_BETWEEN_WORDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between tries while the store cannot be reached
PATIENCE = 900.0  # seconds that the end of a run waits for a store that cannot be reached

_HELD = re.compile(r"\.upload-(\d+)-checkpoint-\d+")

Policy = tuple[Retention, list[Mapping[str, Any]], str | None]


def keep_all() -> Policy | None:
    """The policy without one."""
    return Retention(), [], None


class Mirror:
    """Uploads a run's folder behind the training, on a thread of its own.

    An error is told once per outage and never raised; tries go on, at growing distances.

    Args:
        store: where to.
        folder: of the run.
        policy: what rotation goes by now: the policy, the rows logged so far, the path of the best checkpoint. None,
            when whoever writes into the folder is gone: a last look is then enough.

    Attributes:
        failure: of the last look, if it failed.
    """

    def __init__(self, store: ObjectStore, folder: Path, policy: Callable[[], Policy | None] = keep_all) -> None:
        self.store, self.folder, self.policy = store, folder, policy
        self.failure: Exception | None = None
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._sent: dict[str, str] = {}  # checkpoint -> digest of its manifest, as it is in the store
        self._seen: set[str] = set()  # checkpoints that were in the folder
        self._files: dict[str, tuple[int, int]] = {}  # bytes and nanoseconds of change of what was uploaded
        self._files_at = -SECONDS_BETWEEN_FILES
        self._pause = FIRST_PAUSE
        self._said: set[str] = set()
        self._is_closed = False
        self._has_cleared = False
        self._process = os.getpid()
        for thread in threading.enumerate():
            if isinstance(thread, Follower) and thread.mirror.folder == folder:
                thread.mirror.close()  # of an earlier Trainer in this folder, which this one follows from now on
        self._clear_held()
        Follower(self).start()
        self._wait_at_exit()

    # ---- what the run asks for

    def finish(self, patience: float = PATIENCE) -> bool:
        """Upload everything that is there now, and wait for it. Returns: whether the store has it all.

        Args:
            patience: seconds to go on trying while the store cannot be reached.

        Raises: KeyboardInterrupt; what is missing is then uploaded by the next run, from the folder.
        """
        start, pause, words_at = time.monotonic(), FIRST_PAUSE, time.monotonic()
        if self._lock.locked():
            logger.info("Waiting for what is being uploaded to %s; Ctrl-C leaves without it.", self.store.url)
        while not self.look(everything=True):
            waited = time.monotonic() - start
            is_lasting = isinstance(self.failure, StoreError) and self.failure.is_lasting
            if waited > patience or is_lasting:
                logger.error(
                    "%s does not have all of this run: it lies in %s, and the next start with this output_dir uploads "
                    "what is missing.",
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
        """Stop following the folder, after what is being uploaded; what is missing stays there."""
        self._is_closed = True
        self._wake.set()
        with self._lock:
            pass

    def look(self, everything: bool = False) -> bool:
        """Bring the store up to date. Returns: whether it is.

        Args:
            everything: the files beside the checkpoints too, however short ago they last went.
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

    # ---- one look

    def _begin(self) -> None:
        for name in self.store.clear_unfinished():
            logger.info("%s/%s was left unfinished by a run that was killed; it is removed.", self.store.url, name)
        self._has_cleared = True

    def _send_checkpoints(self) -> bool:
        """Upload what is missing, then rotate. Returns: whether anything changed."""
        has_changed = False
        failed: set[str] = set()
        while (name := self._next(failed)) is not None:
            try:
                with self._held(name) as held:
                    has_changed |= self._send(held, name)
            except FileNotFoundError:  # rotated away before it was held
                failed.add(name)
        present = {path.name for path in folders.list_checkpoints(self.folder)}
        gone = self._seen - present
        self._seen |= present
        if has_changed or gone:
            self._rotate(present)
        return has_changed

    def _send(self, held: Path, name: str) -> bool:
        """Upload a checkpoint, unless the store has it as it is. Returns: whether it had not."""
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
        """The newest checkpoint of the folder that the store does not have as it is here."""
        for path in reversed(folders.list_checkpoints(self.folder)):
            self._seen.add(path.name)
            digest = digest_of(path)
            if digest is None:
                self._say_once(f"{path} has no {MANIFEST_NAME}, so it is not uploaded to {self.store.url}.")
            elif path.name not in failed and self._sent.get(path.name) != digest:
                return path.name
        return None

    def _rotate(self, present: set[str]) -> None:
        """Delete from the store what no policy wants; never what is in the folder, which has its own rotation."""
        policy = self.policy()
        if policy is None:
            return
        retention, history, best = policy
        times = self.store.checkpoints()
        latest = max(times.values(), default=0.0)  # those of the folder are the newest, however late they were sent
        order = {name: time_ + latest + 1 if name in present else time_ for name, time_ in times.items()}
        for name in unwanted(order, retention, history, Path(best).name if best else None):
            if name not in present:
                self.store.delete_checkpoint(name)
                self._sent.pop(name, None)

    def _send_files(self) -> None:
        """Logs, records, the final model: what stands beside the checkpoints and has changed."""
        for name, path in files_beside(self.folder).items():
            try:
                found = path.stat()
                mark = (found.st_size, found.st_mtime_ns)
                if self._files.get(name) != mark:
                    self.store.upload(path, name)
                    self._files[name] = mark
            except FileNotFoundError:
                continue  # gone meanwhile
        self._files_at = time.monotonic()

    @contextmanager
    def _held(self, name: str) -> Iterator[Path]:
        """The files of a checkpoint, linked into a hidden folder. Raises: FileNotFoundError, where it is gone."""
        held = self.folder / f".upload-{os.getpid()}-{name}"
        shutil.rmtree(held, ignore_errors=True)
        try:
            try:
                shutil.copytree(self.folder / name, held, copy_function=_link)
            except shutil.Error as error:
                raise FileNotFoundError(str(error)) from error
            yield held
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _clear_held(self) -> None:
        """Remove what a run that was killed held."""
        for path in self.folder.glob(".upload-*"):
            match = _HELD.fullmatch(path.name)
            if match is not None and not folders.is_other_process(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)

    # ---- words and time

    def _note(self, error: Exception | None) -> None:
        before, self.failure = self.failure, error
        if error is None:
            self._pause = FIRST_PAUSE
            if before is not None:
                logger.warning("%s can be reached again, and has what it missed.", self.store.url)
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if before is None:
            logger.warning(
                "%s. Training goes on, the files are in %s, and uploading is tried again until it works.",
                error if isinstance(error, StoreError) else f"{type(error).__name__}: {error}",
                self.folder,
            )

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)

    def _wait_at_exit(self) -> None:
        """Let an interpreter that ends bring the store up to date: scripts write files after training too."""

        def finish() -> None:
            if self._is_closed or os.getpid() != self._process:  # a worker that was forked has threads of its own
                return
            with suppress(KeyboardInterrupt):
                self.finish(0.0 if self.failure is not None else PATIENCE)
            self.close()

        # `atexit` is too late: executors, such as file systems have, take no more work by then
        register: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # it is ending already
            register(finish)


class Follower(threading.Thread):
    """The thread of a mirror: looks now and then, and for the last time when nobody writes any more."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(name="paceline-store", daemon=True)
        self.mirror = mirror

    def run(self) -> None:
        """Look until the mirror is closed."""
        mirror, pause = self.mirror, SECONDS_BETWEEN_LOOKS
        while not mirror._is_closed:
            mirror._wake.wait(pause)
            is_last = mirror.policy() is None
            if not mirror._is_closed and mirror.look(everything=is_last) and is_last:
                mirror.close()
            pause = SECONDS_BETWEEN_LOOKS if mirror.failure is None else mirror._pause


def files_beside(folder: Path) -> dict[str, Path]:
    """The files of a run's folder by their path in it: those of no checkpoint, and nothing hidden."""
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
            if not name.startswith(".") and Path(place, name).is_file():
                found[(inside / name).as_posix()] = Path(place, name)
    return found


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target
