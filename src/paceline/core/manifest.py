"""The manifest of a folder: which files belong to it and what was in them. Standard library only.

`manifest.json` lists every file with its size and SHA-256. It is written in one canonical form and carries a digest of
itself, so that a changed byte anywhere, the manifest included, is noticed by `verify`.
It proves that nothing was damaged; it does not prove who wrote it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_STATE_NAME = "trainer_state.json"
_BYTES_FOR_THREADS = 16 << 20
_UNFINISHED_NAME = "checkpoint-is-incomplete.txt"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_ZIP_START = b"PK\x03\x04"
# What a file system answers when it has no fsync for this kind of file; any other error is a failed write.
_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}


@dataclass(frozen=True)
class KnownFile:
    """The hash of a file that has not changed since: same place on the disk, same length, same time of change.

    Attributes:
        sha256: of its content.
        identity: device, number, bytes and nanoseconds of the last change of the file that was hashed.
    """

    sha256: str
    identity: tuple[int, int, int, int]

    def is_still(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` is the file that was hashed, as it was then."""
        try:
            return _identity(path) == self.identity
        except OSError:
            return False


def entry_of(path: str | os.PathLike[str]) -> KnownFile | None:
    """What the manifest beside a file just sealed knows of it; None where it does not list it."""
    path = Path(path)
    files = _read_manifest(path.parent)
    if isinstance(files, str) or path.name not in files:
        return None
    return KnownFile(files[path.name]["sha256"], _identity(path))


def hash_and_sync(path: str | os.PathLike[str]) -> tuple[str, int]:
    """(SHA-256, bytes) of a file that was just written, which is brought to the disk."""
    with _open_for_sync(Path(path)) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        _fsync(file.fileno())
        return digest, os.fstat(file.fileno()).st_size


def known_file(path: str | os.PathLike[str], sha256: str, size: int) -> KnownFile:
    """What another process hashed, as a file of this machine. Raises: OSError, when it is not there, or not whole."""
    with open(path, "rb") as file:  # a network's file system looks anew when it opens
        found = os.fstat(file.fileno())
    if found.st_size != size:
        raise OSError(errno.EIO, f"it has {found.st_size} bytes, and the process that wrote it wrote {size}", str(path))
    return KnownFile(sha256, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


def known_files(folder: str | os.PathLike[str]) -> dict[str, KnownFile]:
    """What the manifest of a folder just verified knows of its files, by name."""
    folder = Path(folder)
    files = _read_manifest(folder)
    if isinstance(files, str):
        return {}
    return {name: KnownFile(entry["sha256"], _identity(folder / name)) for name, entry in files.items()}


def _identity(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def seal(folder: str | os.PathLike[str], known: Mapping[str, KnownFile] | None = None) -> Path:
    """Hash every file of `folder`, write its manifest, and bring files and folders to the disk (fsync).

    Costs one reading of each file, from the page cache if it was just written; none for those that are `known`, by
    name, and have not changed since: they were read, and brought to the disk, under another name.

    Returns: the path of the manifest.
    Raises: OSError, when a file cannot be read or the disk refuses the data.
    """
    folder = Path(folder)
    files: dict[str, dict[str, Any]] = {}
    for name in _files_of(folder):
        earlier = (known or {}).get(name)
        if earlier is not None and earlier.is_still(folder / name):
            files[name] = {"sha256": earlier.sha256, "size": earlier.identity[2]}
            continue
        digest, size = hash_and_sync(folder / name)
        files[name] = {"sha256": digest, "size": size}
    path = folder / MANIFEST_NAME
    with open(path, "wb") as file:
        file.write(_manifest_bytes(files))
        file.flush()
        _fsync(file.fileno())
    for parent, _, _ in os.walk(folder, topdown=False):
        sync_folder(parent)
    return path


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the names in `folder` to the disk, where the system can do that (Windows cannot)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Problems of a checkpoint folder, one sentence each; an empty list means that it is good.

    With a manifest, each file listed must be there with its size and SHA-256 (`extra_files` names those not listed).
    Without one (a checkpoint of another trainer), only the structure can be looked at: JSON parses, safetensors and
    zip files are as long as their own headers say, every shard of an index is there. Never raises for what it finds.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"{folder} is not a folder"]
    if not os.path.lexists(folder / MANIFEST_NAME):
        return _structural_problems(folder)
    files = _read_manifest(folder)
    if isinstance(files, str):
        return [files]

    def check(name: str) -> str | None:
        return _file_problem(folder, name, files[name]["size"], files[name]["sha256"])

    if sum(entry["size"] for entry in files.values()) < _BYTES_FOR_THREADS:
        problems = list(map(check, files))
    else:  # hashing and reading let other threads run
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            problems = list(pool.map(check, files))
    return [problem for problem in problems if problem is not None]


def extra_files(folder: str | os.PathLike[str]) -> list[str]:
    """Files in `folder` that its manifest does not list (all but the manifest, if it cannot be read), sorted."""
    folder = Path(folder)
    files = _read_manifest(folder)
    listed = set() if isinstance(files, str) else set(files)
    return [name for name in _files_of(folder) if name not in listed]


def _open_for_sync(path: Path) -> io.BufferedReader | io.BufferedRandom:
    """For reading; on Windows, which flushes only what was opened for writing, for both."""
    return open(path, "r+b") if os.name == "nt" else open(path, "rb")


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _files_of(folder: Path) -> list[str]:
    """Regular files below `folder` but for its manifest: relative paths with forward slashes, sorted."""
    return sorted(name for name in _walk(folder) if name != MANIFEST_NAME)


def _walk(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file():  # a pipe or a socket has no content to hash, and reading one may never end
                yield path.relative_to(folder).as_posix()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True).encode("ascii")


def _manifest_bytes(files: dict[str, dict[str, Any]]) -> bytes:
    body = {"algorithm": "sha256", "files": files, "format": MANIFEST_FORMAT}
    return _canonical({**body, "digest": hashlib.sha256(_canonical(body)).hexdigest()}) + b"\n"


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]] | str:
    """The files of the manifest, or a sentence that says why there are none."""
    path = folder / MANIFEST_NAME
    try:
        if not path.is_file():
            return f"{MANIFEST_NAME} is missing"
        raw = path.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        return f"{MANIFEST_NAME} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError):
        return f"{MANIFEST_NAME} is damaged: it is not JSON"
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
        return f"{MANIFEST_NAME} is damaged: it lists no files"
    if value.get("format") != MANIFEST_FORMAT:
        return f"{MANIFEST_NAME} has format {value.get('format')!r}; this version reads format {MANIFEST_FORMAT}"
    files: dict[str, dict[str, Any]] = value["files"]
    if _manifest_bytes(files) != raw:
        return f"{MANIFEST_NAME} is damaged: it does not match its own digest"
    if not all(_is_entry(name, entry) for name, entry in files.items()):
        return f"{MANIFEST_NAME} is damaged: it has an entry that is no file of this folder"
    return files


def _is_entry(name: str, entry: Any) -> bool:
    is_inside = not os.path.isabs(name) and ".." not in name.split("/") and "\\" not in name and "\0" not in name
    if not is_inside or not isinstance(entry, dict):
        return False
    return isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)


def _file_problem(folder: Path, name: str, size: int, digest: str) -> str | None:
    path = folder / name
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes instead of {size}"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} is damaged: its content is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _structural_problems(folder: Path) -> list[str]:
    names = _files_of(folder)
    problems = []
    if _UNFINISHED_NAME in names:
        problems.append(f"{_UNFINISHED_NAME} says that writing did not end")
    if _STATE_NAME not in names:
        problems.append(f"{_STATE_NAME} is missing: writing did not end, or this is no checkpoint")
    for name in names:
        try:
            problem = _structural_problem(folder, name)
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror or error}"
        if problem is not None:
            problems.append(problem)
    return problems


def _structural_problem(folder: Path, name: str) -> str | None:
    path = folder / name
    if name.endswith(".json"):
        return _json_problem(path, name)
    if name.endswith(".safetensors"):
        return _safetensors_problem(path, name)
    if name.endswith(_TORCH_SUFFIXES):
        return _zip_problem(path, name)
    return None


def _json_problem(path: Path, name: str) -> str | None:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return f"{name} is damaged: it is not JSON"
    if not name.endswith(".index.json") or not isinstance(value, dict):
        return None
    weight_map = value.get("weight_map")
    shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    missing = sorted(shard for shard in shards if not (path.parent / shard).is_file())
    return f"{name} names shards that are missing: {', '.join(missing)}" if missing else None


def _safetensors_problem(path: Path, name: str) -> str | None:
    """Whether the header (8 bytes of length, then JSON with `data_offsets`) accounts for every byte of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{name} is cut short: its header alone needs more than its {size} bytes"
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
        return f"{name} is damaged: its header cannot be read"
    return None if size == expected else f"{name} has {size} bytes instead of {expected}"


def _zip_problem(path: Path, name: str) -> str | None:
    """torch writes zip files, whose directory stands at the end; the tar and pickle forms before it have no length."""
    with open(path, "rb") as file:
        start = file.read(len(_ZIP_START))
    if not start:
        return f"{name} is empty"
    if start != _ZIP_START:
        return None
    try:
        with zipfile.ZipFile(path):
            return None
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"{name} is damaged or cut short: its zip directory cannot be read"
