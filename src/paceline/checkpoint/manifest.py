"""The manifest of a folder: its files with their sizes and checksums. Standard library only.

`manifest.json` lists every file with its size and SHA-256. It is written in one canonical form and contains a digest of
itself, so that `verify` detects a changed byte anywhere, also in the manifest.
A manifest detects damage; it does not authenticate the author.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.inside import is_inner_name, leads_outside

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_STATE_NAME = "trainer_state.json"
_BYTES_FOR_THREADS = 16 << 20
_SHARD = re.compile(r"-\d+-of-\d+")
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_MOST_JSON_BYTES = 1 << 28  # tokenizer vocabularies, the largest JSON files, have about 50 MB
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors' own reader
_UNFINISHED_NAME = "checkpoint-is-incomplete.txt"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_ZIP_START = b"PK\x03\x04"
# errors of file systems without fsync for this kind of file; any other error means a failed write
_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}


@dataclass(frozen=True)
class KnownFile:
    """The hash of a file, valid while its inode, size and modification time are unchanged.

    Attributes:
        sha256: the hash of its content.
        identity: device, inode, bytes and modification time (ns) of the file that was hashed.
    """

    sha256: str
    identity: tuple[int, int, int, int]

    def is_still(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` is the file that was hashed, unchanged."""
        try:
            return identity_of(path) == self.identity
        except OSError:
            return False


def entry_of(path: str | os.PathLike[str]) -> KnownFile | None:
    """Returns the manifest's entry of a file whose folder was just sealed; None if the file is not listed."""
    path = Path(path)
    files = _read_manifest(path.parent)
    if isinstance(files, str) or path.name not in files:
        return None
    return KnownFile(files[path.name]["sha256"], identity_of(path))


def hash_and_sync(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Returns (SHA-256, bytes) of a file just written, after a sync to disk."""
    with _open_for_sync(Path(path)) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        _fsync(file.fileno())
        return digest, os.fstat(file.fileno()).st_size


def known_file(path: str | os.PathLike[str], sha256: str, size: int) -> KnownFile:
    """Returns the entry of a file that another process wrote and hashed. Raises: OSError, if its size differs."""
    with open(path, "rb") as file:  # opening revalidates the cache of a network file system
        found = os.fstat(file.fileno())
    if found.st_size != size:
        raise OSError(errno.EIO, f"it has {found.st_size} bytes, and the process that wrote it wrote {size}", str(path))
    return KnownFile(sha256, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


def known_files(folder: str | os.PathLike[str]) -> dict[str, KnownFile]:
    """Returns the manifest's entries of a folder just verified, by name."""
    folder = Path(folder)
    files = _read_manifest(folder)
    if isinstance(files, str):
        return {}
    return {name: KnownFile(entry["sha256"], identity_of(folder / name)) for name, entry in files.items()}


def identity_of(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Returns device, inode, bytes and modification time (ns) of a file. Raises: OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def seal(folder: str | os.PathLike[str], known: Mapping[str, KnownFile] | None = None) -> Path:
    """Hashes every file of `folder`, writes its manifest, and syncs files and folders to disk (fsync).

    Costs one read of each file, from the page cache if it was just written. Unchanged `known` files (by name) are not
    read: they were hashed and synced before.

    Returns: the path of the manifest.
    Raises: OSError, if reading or writing fails.
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
    """Syncs the directory entries of `folder` to disk; does nothing on Windows, which cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the problems of a checkpoint folder, one sentence each; an empty list means that it is valid.

    With a manifest, each listed file must exist with its size and SHA-256 (`extra_files` names the others).
    If the user replaced the weights by another format (shards with an index), only their structure is checked, and
    this is logged.
    Without a manifest (a checkpoint of another trainer) only the structure is checked: JSON parses, safetensors and zip
    files have the lengths in their headers, every shard of an index exists. Problems are returned, never raised.
    """
    try:
        return _problems(Path(folder))
    except (OSError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return [f"{folder} cannot be verified: {type(error).__name__}: {error}"]


def _problems(folder: Path) -> list[str]:
    if not folder.is_dir():
        return [f"{folder} is not a folder"]
    if not os.path.lexists(folder / MANIFEST_NAME):
        return _structural_problems(folder)
    files = _read_manifest(folder)
    if isinstance(files, str):
        return [files]

    replaced = _replaced_weights(folder, files)
    files = {name: entry for name, entry in files.items() if name not in replaced}

    def check(name: str) -> str | None:
        return _file_problem(folder, name, files[name]["size"], files[name]["sha256"])

    if sum(entry["size"] for entry in files.values()) < _BYTES_FOR_THREADS:
        problems = list(map(check, files))
    else:  # hashing and reading release the GIL
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            problems = list(pool.map(check, files))
    return [problem for problem in problems if problem is not None]


def _replaced_weights(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """Returns the listed weight files that are missing, if a complete unlisted set in another format exists.

    This happens after `save_pretrained(checkpoint, max_shard_size=...)` or a merge of the shards.
    """
    gone = [name for name in files if _WEIGHTS.fullmatch(name) and not os.path.lexists(folder / name)]
    if not gone:
        return []
    new = [name for name in extra_files(folder) if _WEIGHTS.fullmatch(name)]
    wholes = [name for name in new if _SHARD.search(name) is None]
    if not wholes or any(_structural_problem(folder, name) is not None for name in new):
        return []
    logger.warning(
        "%s: %s was replaced by %s, which the manifest does not list: its content cannot be verified.",
        *(folder, ", ".join(gone), ", ".join(new)),
    )
    return gone


def extra_files(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the files in `folder` that its manifest does not list, sorted; all files if it cannot be read."""
    folder = Path(folder)
    files = _read_manifest(folder)
    listed = set() if isinstance(files, str) else set(files)
    return [name for name in _files_of(folder) if name not in listed]


def _open_for_sync(path: Path) -> io.BufferedReader | io.BufferedRandom:
    """Opens a file for reading; on Windows also for writing, which a flush requires there."""
    return open(path, "r+b") if os.name == "nt" else open(path, "rb")


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _files_of(folder: Path) -> list[str]:
    """Returns the regular files below `folder` except its manifest: relative paths with forward slashes, sorted."""
    return sorted(name for name in _walk(folder) if name != MANIFEST_NAME)


def _walk(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file():  # a pipe or a socket has no content to hash, and reading it may block
                yield path.relative_to(folder).as_posix()


def _canonical(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True).encode("ascii")


def _manifest_bytes(files: dict[str, dict[str, Any]]) -> bytes:
    body = {"algorithm": "sha256", "files": files, "format": MANIFEST_FORMAT}
    return _canonical({**body, "digest": hashlib.sha256(_canonical(body)).hexdigest()}) + b"\n"


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]] | str:
    """Returns the entries of the manifest, or a sentence with the reason why it is invalid."""
    path = folder / MANIFEST_NAME
    try:
        if not path.is_file():
            return f"{MANIFEST_NAME} is missing"
        if path.stat().st_size > _MOST_JSON_BYTES:
            return f"{MANIFEST_NAME} is damaged: it is larger than the limit"
        raw = path.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        return f"{MANIFEST_NAME} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError, MemoryError):
        return f"{MANIFEST_NAME} is damaged: it is not JSON"
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
        return f"{MANIFEST_NAME} is damaged: it lists no files"
    if value.get("format") != MANIFEST_FORMAT:
        return f"{MANIFEST_NAME} has format {value.get('format')!r}; this version reads format {MANIFEST_FORMAT}"
    files: dict[str, dict[str, Any]] = value["files"]
    if _manifest_bytes(files) != raw:
        return f"{MANIFEST_NAME} is damaged: it does not match its own digest"
    if not all(_is_entry(name, entry) for name, entry in files.items()):
        return f"{MANIFEST_NAME} is damaged: it lists a path outside of this folder"
    return files


def _is_entry(name: str, entry: object) -> bool:
    if not is_inner_name(name) or not isinstance(entry, dict):
        return False
    size = entry.get("size")
    return type(size) is int and size >= 0 and isinstance(entry.get("sha256"), str)


def _file_problem(folder: Path, name: str, size: int, digest: str) -> str | None:
    path = folder / name
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        if leads_outside(path, folder):
            return f"{name} is a link to a file outside of the folder"
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes instead of {size}"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} is damaged: checksum mismatch"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _structural_problems(folder: Path) -> list[str]:
    names = _files_of(folder)
    problems = []
    if _UNFINISHED_NAME in names:
        problems.append(f"{_UNFINISHED_NAME} exists: writing did not finish")
    if _STATE_NAME not in names:
        problems.append(f"{_STATE_NAME} is missing: writing did not finish, or this is no checkpoint")
    for name in names:
        try:
            problem = _structural_problem(folder, name)
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror or error}"
        except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            problem = f"{name} is damaged: {type(error).__name__}: {error}"
        if problem is not None:
            problems.append(problem)
    return problems


def _structural_problem(folder: Path, name: str) -> str | None:
    path = folder / name
    if leads_outside(path, folder):
        return f"{name} is a link to a file outside of the folder"
    if name.endswith(".json"):
        return _json_problem(path, name)
    if name.endswith(".safetensors"):
        return _safetensors_problem(path, name)
    if name.endswith(_TORCH_SUFFIXES):
        return _zip_problem(path, name)
    return None


def _json_problem(path: Path, name: str) -> str | None:
    if path.stat().st_size > _MOST_JSON_BYTES:
        return f"{name} is damaged: it is larger than the limit for JSON files"
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, MemoryError):
        return f"{name} is damaged: it is not JSON"
    if not name.endswith(".index.json") or not isinstance(value, dict):
        return None
    weight_map = value.get("weight_map")
    shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    outside = sorted(shard for shard in shards if not is_inner_name(shard))
    if outside:
        return f"{name} names {outside[0]!r:.200}, which is not a file of its folder"
    missing = sorted(shard for shard in shards if not os.path.isfile(path.parent / shard))
    return f"{name} names shards that are missing: {', '.join(missing)}" if missing else None


def _safetensors_problem(path: Path, name: str) -> str | None:
    """Checks that the header (8 bytes of length, then JSON with `data_offsets`) covers every byte of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            return f"{name} is damaged: its header is larger than the limit"
        if size < 8 or length > size - 8:
            return f"{name} is truncated: its header alone needs more than its {size} bytes"
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
        return f"{name} is damaged: its header cannot be read"
    return None if size == expected else f"{name} has {size} bytes instead of {expected}"


def _zip_problem(path: Path, name: str) -> str | None:
    """Checks the directory at the end of torch's zip files; the older tar and pickle formats have no length."""
    with open(path, "rb") as file:
        start = file.read(len(_ZIP_START))
    if not start:
        return f"{name} is empty"
    if start != _ZIP_START:
        return None
    try:
        with zipfile.ZipFile(path):
            return None
    except OSError:
        raise
    except Exception:  # zipfile raises many types for damaged bytes
        return f"{name} is damaged or truncated: its zip directory cannot be read"
