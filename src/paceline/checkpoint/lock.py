"""A lock file that admits one training at a time to an output folder, held by rank 0. Standard library only.

The file names its holder and is touched every few seconds. A holder on this machine is looked up in the process table;
one that the system hides from this user (/proc mounted with `hidepid`) is alive if it touched the file in the last
`PATIENCE` seconds. A holder elsewhere counts as dead if the file is not touched for `PATIENCE` seconds by the clock of
the waiting process, so no two clocks are compared. The file is created with O_EXCL, which also works on network file
systems without locks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

LOCK_NAME = ".paceline.lock"
SECONDS_BETWEEN_SIGNS = 5.0
SECONDS_BETWEEN_LOOKS = 0.5  # interval of checks for the file that `FolderLock.listen` names
PATIENCE = 30.0  # seconds without a heartbeat from a holder on another machine
GRACE = 3.0  # seconds to wait for a holder on this machine, which may just have been killed

_STEP = 2 * 10**9  # nanoseconds, the coarsest resolution of file times


class FolderInUse(RuntimeError):
    """Another process trains in this output folder; the message names it and the remedy."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: the host name.
        machine: the boot id and the PID namespace (of a container); empty if unknown.
        pid: the process id.
        started: the start time of the process as its system reports it; empty if unknown.
        since: the time of acquisition, for messages.
        token: identifies one acquisition of the lock.
        path: the path of the lock file; the lock in a copy of the folder is void.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str
    token: str
    path: str

    @property
    def is_here(self) -> bool:
        """True if the process is on this machine and in this PID namespace, so that it can be looked up."""
        return os.name == "posix" and (self.host, self.machine) == (platform.node(), _machine())

    @property
    def is_this_process(self) -> bool:
        """True if the holder is the current process."""
        return self.is_here and self.pid == os.getpid() and self.started == _started(self.pid)

    def is_alive(self) -> bool:
        """True if the process, which is on this machine, has not ended. A reused process id is detected.

        A process that the system hides from this user is alive if its heartbeat is younger than `PATIENCE` seconds.
        """
        started = _started(self.pid)
        if started == "":
            return _age(Path(self.path)) < PATIENCE
        return started == self.started


class FolderLock:
    """A lock that this process holds until `release`.

    Attributes:
        lost_to: description of the process that took over the lock after a long pause of this process, or None.
    """

    def __init__(self, path: Path, holder: Holder, owns: bool = True) -> None:
        self.path, self.holder = path, holder
        self.lost_to: str | None = None
        self.listener: tuple[Path, Callable[[], None]] | None = None
        self._signs = _Signs(self) if owns else None  # a nested training of this process owns no lock
        if self._signs is not None:
            self._signs.start()

    def check(self) -> None:
        """Raises FolderInUse if another process has taken over the folder."""
        if self.lost_to is not None:
            raise FolderInUse(
                f"{self.path.parent} was taken over by {self.lost_to} while this process did not respond (it was "
                "stopped, or the disk was unavailable): this training ends so that they do not mix. Use another folder."
            )

    def listen(self, name: str, notice: Callable[[], None]) -> None:
        """Calls `notice` on the heartbeat thread, again and again, while the folder holds a file of this name."""
        self.listener = self.path.with_name(name), notice

    def release(self) -> None:
        """Releases the lock."""
        if self._signs is None or self.holder.pid != os.getpid():  # a forked worker must not release its parent's lock
            return
        self._signs.end()
        with suppress(OSError):
            if _read(self.path)[0] == self.holder:
                self.path.unlink()


class _Signs(threading.Thread):
    """The heartbeat thread: touches the lock file, checks that it is still this process's, and looks for a file."""

    def __init__(self, lock: FolderLock) -> None:
        super().__init__(name="paceline-lock", daemon=True)
        self.lock, self._stop_event = lock, threading.Event()

    def run(self) -> None:
        signed = time.monotonic()
        while not self._stop_event.wait(min(SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_SIGNS)):
            self.look()
            if time.monotonic() - signed < SECONDS_BETWEEN_SIGNS:
                continue
            signed = time.monotonic()
            with suppress(OSError):  # the disk may become available again
                self.touch()

    def look(self) -> None:
        """Calls the listener if its file is there."""
        listener = self.lock.listener
        if listener is not None and os.path.lexists(listener[0]):
            listener[1]()

    def touch(self) -> None:
        """Writes one heartbeat."""
        holder, _, changed = _read(self.lock.path)
        if holder is not None and holder != self.lock.holder:
            self.lock.lost_to = describe(holder)
            return
        signed = max(time.time_ns(), changed + _STEP)  # of a clock that was set back, too, it is another time
        os.utime(self.lock.path, ns=(signed, signed))

    def end(self) -> None:
        """Stops the heartbeat."""
        self._stop_event.set()
        self.join()


def acquire(folder: Path) -> FolderLock | None:
    """Acquires the lock of an output folder. Returns None, with a warning, if no file can be created there.

    The lock of a killed process is taken over at once on the same machine, else after `PATIENCE` seconds.

    Raises:
        FolderInUse: another process trains there.
    """
    path = path_in(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not (own := _create(path)):
            try:
                holder, content, changed = _read(path)
            except FileNotFoundError:
                continue
            if holder is not None and holder.is_this_process:
                if _is_signed_for(path):
                    return FolderLock(path, holder, owns=False)
            elif not _is_gone(path, holder, content, changed):
                continue
            _take_away(path, content)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): another training in it would not be detected.", folder, error)
        return None
    return FolderLock(path, own)


def path_in(folder: Path) -> Path:
    """Returns the absolute path of a folder's lock file."""
    return folder.resolve() / LOCK_NAME


def holder_in(folder: Path) -> str | None:
    """Describes the other process on this machine that trains in a folder, without waiting; None if there is none."""
    path = path_in(folder)
    try:
        holder, _, _ = _read(path)
    except OSError:
        return None
    if holder is None or holder.path != str(path) or not holder.is_here or holder.is_this_process:
        return None
    return describe(holder) if holder.is_alive() else None


def is_held(folder: Path) -> bool:
    """True if a process trains in a folder: this one, another of this machine, or one elsewhere with a heartbeat."""
    path = path_in(folder)
    try:
        holder, _, _ = _read(path)
        age = _age(path)
    except OSError:
        return False
    if holder is None or holder.path != str(path):
        return False
    return holder.is_alive() if holder.is_here else age < PATIENCE


def describe(holder: Holder | None) -> str:
    """Describes a holder for messages."""
    if holder is None:
        return "an unknown process"
    return f"process {holder.pid} on {holder.host}, since {holder.since}"


def _is_gone(path: Path, holder: Holder | None, content: bytes, before: int) -> bool:
    """Waits until the holder of a lock, read with this content and modification time, has ended.

    Returns: False if the lock was replaced or removed. Raises: FolderInUse, if the holder is alive.
    """
    is_here = holder is not None and holder.is_here and holder.path == str(path)
    if not is_here:
        logger.warning(
            "%s is locked by %s: waiting up to %.0f s for a heartbeat.", path.parent, describe(holder), PATIENCE
        )
    begun = time.monotonic()
    while time.monotonic() - begun < (GRACE if is_here else PATIENCE):
        if is_here and holder is not None and not holder.is_alive():
            return True
        time.sleep(min(0.1, GRACE / 10) if is_here else min(1.0, PATIENCE / 10))
        try:
            _, now, changed = _read(path)
        except FileNotFoundError:
            return False
        if now != content:
            return False
        if not is_here and changed != before:
            is_here = True  # there was a heartbeat: the holder is alive
            break
    if is_here:
        raise FolderInUse(
            f"output_dir={str(path.parent)!r} is in use: {describe(holder)}, trains in it. Two trainings in one folder "
            "would mix their logs and delete each other's checkpoints. End that one, wait for it, or set another "
            f"output_dir. If it has certainly ended, delete {path}."
        )
    logger.warning("%s: no heartbeat from %s: its lock is taken over.", path.parent, describe(holder))
    return True


def _create(path: Path) -> Holder | None:
    """Creates the lock file if there is none. Raises: OSError, if writing fails."""
    since, pid = time.strftime("%Y-%m-%d %H:%M:%S"), os.getpid()
    holder = Holder(platform.node(), _machine(), pid, _started(pid) or "", since, uuid.uuid4().hex, str(path))
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    try:
        with open(descriptor, "wb", buffering=0) as file:
            file.write(json.dumps(asdict(holder)).encode())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return holder


def _take_away(path: Path, content: bytes) -> None:
    """Removes a stale lock file with this content; a newer lock of another process stays."""
    aside = path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
    with _alone(path.parent), suppress(FileNotFoundError):
        if path.read_bytes() != content:
            return
        os.rename(path, aside)
        if aside.read_bytes() != content:
            with suppress(OSError):
                os.link(aside, path)
        aside.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context manager that serializes the removal of stale locks between processes, if the disk supports `flock`."""
    if fcntl is None:
        yield
        return
    descriptor, begun = os.open(folder, os.O_RDONLY), time.monotonic()
    try:
        while time.monotonic() - begun < GRACE:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[Holder | None, bytes, int]:
    """Returns (holder, content, modification time in nanoseconds); the holder is None for malformed content."""
    with open(path, "rb") as file:  # opening revalidates the cache of a network file system
        content, changed = file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
    try:
        holder = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None, content, changed
    texts = (holder.host, holder.machine, holder.started, holder.since, holder.token, holder.path)
    is_one = type(holder.pid) is int and 0 < holder.pid < 2**31 and all(isinstance(text, str) for text in texts)
    return holder if is_one else None, content, changed


def _age(path: Path) -> float:
    """Returns the seconds since the last heartbeat in a lock file; infinity if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _is_signed_for(path: Path) -> bool:
    """True if a training of this process holds the lock; False if a training ended without releasing it."""
    return any(isinstance(thread, _Signs) and thread.lock.path == path for thread in threading.enumerate())


def _machine() -> str:
    """Returns the boot id of this machine and the PID namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Returns the start time of a process of this machine; None if it does not exist or is a zombie, empty if there
    is one whose start time this user cannot see, as with /proc mounted with `hidepid`.
    """
    try:
        fields = _stat(pid).rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return "" if _exists(pid) else None
    except IndexError:
        return None
    return _started_by_ps(pid)


def _stat(pid: int) -> str:
    """Returns Linux's record of a process. Raises OSError if there is no such process, or it is hidden."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")


def _exists(pid: int) -> bool:
    """True if there is a process with this id, of any user; for systems with /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _started_by_ps(pid: int) -> str | None:
    """Returns the start time on systems without /proc; empty if unknown."""
    try:
        command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    state, _, started = done.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()
