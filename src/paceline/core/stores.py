"""An object store as a place for runs: what of a checkpoint is complete there, and moving files to and fro.

A store has no rename, so a checkpoint's manifest is written last and deleted first: what has one is whole. While files
go up or away, a marker stands beside them, by which the next run clears what a killed one has left.
Through fsspec, whose package for the scheme (s3fs, gcsfs, adlfs) is asked for when it is first needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.args.places import staging_folder
from paceline.core import folders
from paceline.core.manifest import MANIFEST_NAME, known_files, verify
from paceline.core.optional import require

MARKER_NAME = "upload-is-incomplete.txt"
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

_CHECKPOINT = re.compile(re.escape(folders.PREFIX_CHECKPOINT_DIR) + r"-[0-9]+")
# parts of a message that let somebody in: signed requests, and what stands behind such a name
_SECRETS = re.compile(
    r"(?i)((?:x-amz-(?:signature|credential|security-token)|signature|sig|token|secret|password|key|authorization)"
    r"[\w-]*['\"]?\s*[=:]\s*['\"]?)[^\s&'\",;)]+"
)
_SECRET_NAMES = re.compile(r"(?i)(secret|token|password|credential|_key|key_id|sas|connection_string)")
_NO_BUCKET = re.compile(r"(?i)(bucket|container)[^/]* (does not exist|not found)|NoSuchBucket|ContainerNotFound")
# what no later try changes: wrong names, missing rights
_LASTING = ("NoCredentials", "PartialCredentials", "Forbidden", "Unauthorized", "InvalidAccessKeyId", "ClientAuth")


class StoreError(OSError, ValueError):
    """A store could not be reached, or refused.

    Attributes:
        is_lasting: trying again would not help: there is no such bucket, or no right to it.
    """

    def __init__(self, words: str, is_lasting: bool = False) -> None:
        super().__init__(words)
        self.is_lasting = is_lasting


def in_words(error: BaseException) -> str:
    """The first line of what an error says, with its type, and nothing in it that lets somebody in."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAMES.search(name):
            text = text.replace(value, "...")
    return _SECRETS.sub(r"\1...", text)[:300]


def open_file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        ImportError: the package for this scheme is missing; the message names the extra that installs it.
        ValueError: nobody knows the scheme.
    """
    scheme = url.partition("://")[0].lower()
    fsspec = require("fsspec", "object-stores")
    options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f'pip install "paceline[{extra}]"' if extra else "install the package that fsspec names"
        raise ImportError(f"output_dir={url!r} needs a package that is missing: {remedy} ({error})") from error
    except ValueError as error:
        raise ValueError(
            f"output_dir={url!r}: fsspec knows no scheme {scheme!r} ({in_words(error)}): use s3://, gs://, az:// or "
            "another one that it lists."
        ) from error
    except Exception as error:  # some connect, or look for credentials, when they are made
        raise StoreError(f"{url} cannot be opened ({in_words(error)})", is_lasting=is_lasting(error)) from None
    return file_system, path


def is_lasting(error: BaseException) -> bool:
    """Whether trying again would end the same way."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return True
    return any(name.startswith(_LASTING) for name in names) or "NoSuchBucket" in str(error)


class ObjectStore:
    """The place of one run in a store. Names are paths below it, with forward slashes; each call asks the store anew.

    Every method raises StoreError where the store cannot be reached or refuses.

    Args:
        url: such as `s3://bucket/run`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, path = open_file_system(self.url)
        self._root = path.rstrip("/")

    def check(self) -> None:
        """Write and delete a small object: what is wrong with name, rights or network is known before training."""
        self.write(".writable", b"paceline asks whether it may write here\n")
        with suppress(StoreError):  # a store that keeps everything is one too
            self.delete([".writable"])

    def checkpoints(self) -> dict[str, float]:
        """Names of the complete checkpoints -> seconds at which each was published; 0 where the store does not say."""
        found = {}
        for name in self._top():
            if _CHECKPOINT.fullmatch(name) is not None:
                with self._asking(f"look at {name}"), suppress(FileNotFoundError):
                    found[name] = _time_of(self._files.info(self._path(f"{name}/{MANIFEST_NAME}")))
        return found

    def clear_unfinished(self) -> list[str]:
        """Delete what killed uploads and deletions have left. Returns: names of the checkpoints it was of."""
        cleared = []
        for name in self._top():
            if _CHECKPOINT.fullmatch(name) is None or self.read(f"{name}/{MARKER_NAME}") is None:
                continue
            if self.read(f"{name}/{MANIFEST_NAME}") is not None:  # it was whole, but for the marker
                self.delete([f"{name}/{MARKER_NAME}"])
                continue
            self.delete_checkpoint(name)
            cleared.append(name)
        return cleared

    def names(self, below: str = "") -> list[str]:
        """Every object below a name; none where there is nothing."""
        place = self._path(below)
        with self._asking(f"list {below or 'it'}"):
            try:
                found = self._files.find(place)
            except FileNotFoundError:
                return []
        start = len(self._root.strip("/")) + 1
        return sorted(str(path).strip("/")[start:] for path in found)

    def files_beside(self) -> list[str]:
        """Every object that belongs to no checkpoint."""
        names: list[str] = []
        for top in self._top():
            if _CHECKPOINT.fullmatch(top) is None and not top.startswith("."):
                names += self.names(top)
        return names

    def read(self, name: str) -> bytes | None:
        """What an object holds; None where there is none."""
        with self._asking(f"read {name}"):
            try:
                content: bytes = self._files.cat_file(self._path(name))
            except (FileNotFoundError, IsADirectoryError):
                return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whole or not at all."""
        with self._asking(f"write {name}"):
            self._files.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """A file, as an object. Raises: FileNotFoundError, where the file is gone."""
        if not path.is_file():
            raise FileNotFoundError(path)
        with self._asking(f"write {name}"):
            self._files.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """An object, as a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._asking(f"read {name}"):
            self._files.get_file(self._path(name), str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in this order; those that are gone are no error."""
        for name in names:
            with self._asking(f"delete {name}"), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def upload_checkpoint(self, folder: Path, name: str) -> None:
        """The files of a checkpoint, the manifest last.

        Args:
            folder: complete, and left alone meanwhile.
            name: of the checkpoint; one of that name is replaced.
        """
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.write(f"{name}/{MARKER_NAME}", b"This checkpoint is being uploaded or deleted; it is no whole one.\n")
        stale = set(self.names(name)) - {f"{name}/{file}" for file in files} - {f"{name}/{MARKER_NAME}"}
        self.delete([f"{name}/{MANIFEST_NAME}", *sorted(stale)])
        for file in files:
            if file != MANIFEST_NAME:
                self.upload(folder / file, f"{name}/{file}")
        self.upload(folder / MANIFEST_NAME, f"{name}/{MANIFEST_NAME}")
        self.delete([f"{name}/{MARKER_NAME}"])

    def delete_checkpoint(self, name: str) -> None:
        """A checkpoint, the manifest first, so that no moment shows half of it as whole."""
        self.write(f"{name}/{MARKER_NAME}", b"This checkpoint is being uploaded or deleted; it is no whole one.\n")
        own = {f"{name}/{MANIFEST_NAME}", f"{name}/{MARKER_NAME}"}
        rest = [found for found in self.names(name) if found not in own]
        self.delete([f"{name}/{MANIFEST_NAME}", *rest, f"{name}/{MARKER_NAME}"])

    def download_checkpoint(self, name: str, folder: Path) -> list[str]:
        """Bring a checkpoint to this machine: into a hidden folder, verified, and published by one rename.

        Returns: what is wrong with it, by the hashes of its manifest; there is then no folder.
        Raises: OSError, where the disk refuses.
        """
        temporary = folders.begin(folder)
        try:
            for found in self.names(name):
                self.download(found, temporary / found.removeprefix(f"{name}/"))
            (temporary / MARKER_NAME).unlink(missing_ok=True)
            problems = verify(temporary)
            if not problems:
                folders.publish(temporary, folder, known_files(temporary))
            return problems
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _top(self) -> list[str]:
        """Names directly below, of objects and of what is a folder by their names."""
        with self._asking("list it"):
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Errors of whatever library, as StoreError; FileNotFoundError as it is."""
        with suppress(Exception):  # a cache that cannot be emptied is none
            self._files.invalidate_cache()
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise StoreError(f"{self.url} does not let itself {what} ({in_words(error)})", True) from None
            raise
        except StoreError:
            raise
        except Exception as error:
            words = f"{self.url} does not let itself {what} ({in_words(error)})"
            raise StoreError(words, is_lasting=is_lasting(error)) from None


def patiently(ask: Callable[[], Any], patience: float = 60.0) -> Any:
    """Ask a store, again where it cannot be reached, for so many seconds. Raises: StoreError, of the last try."""
    start, pause = time.monotonic(), 0.5
    while True:
        try:
            return ask()
        except StoreError as error:
            if error.is_lasting or time.monotonic() - start + pause > patience:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 10.0)


# ---- from the store to the run's own folder


def newest_in_store(
    store: ObjectStore, output_dir: Path, local: Path | None, report: Callable[[str], None]
) -> Path | None:
    """The newest whole checkpoint: `local`, or a newer one of the store, which is brought into `output_dir`.

    Raises: StoreError, OSError.
    """
    least = -1 if local is None else folders.step_of(local)
    for name in sorted(store.checkpoints(), key=folders.step_of, reverse=True):
        if folders.step_of(name) <= least:
            break
        problems = store.download_checkpoint(name, output_dir / name)
        if not problems:
            report(f"{name} is gone on from as it is in {store.url}: it was brought to {output_dir}")
            return output_dir / name
        report(f"{store.url}/{name} is passed over: {'; '.join(problems[:3])}")
    return local


def bring_files(store: ObjectStore, output_dir: Path) -> None:
    """What stands beside the checkpoints (logs, the record) where it is missing here; weights are not needed.

    Raises: StoreError, OSError.
    """
    for name in store.files_beside():
        path = output_dir / name
        if not path.exists() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
            temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
            store.download(name, temporary)
            os.replace(temporary, path)


def bring_named(url: str, own: str | None, output_dir: Path) -> Path:
    """The checkpoint that a URL names, as a folder of this machine.

    Args:
        own: URL of this run, whose checkpoints have their place in `output_dir`.

    Raises: StoreError, also where there is none, or it is damaged.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    store = ObjectStore(parent)
    folder = (output_dir if parent == own else Path(staging_folder(parent))) / name
    manifest = store.read(f"{name}/{MANIFEST_NAME}")
    if manifest is not None and is_same_manifest(folder, manifest) and not verify(folder):
        return folder
    problems = store.download_checkpoint(name, folder)
    if problems:
        raise StoreError(f"Can't resume from {url}: {'; '.join(problems[:3])}.", is_lasting=True)
    return folder


def bring_run(url: str, output_dir: Path, report: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run, of its folder or its store, and the best one, in the folder; None: none.

    Raises: StoreError, OSError.
    """
    store = ObjectStore(url)
    local = folders.newest_valid(output_dir, report)
    found: Path | None = patiently(lambda: newest_in_store(store, output_dir, local, report))
    if found is not None:
        patiently(lambda: bring_best(store, output_dir, found))
    return found


def bring_best(store: ObjectStore, output_dir: Path, checkpoint: Path) -> None:
    """The best checkpoint, as this one names it, where it is in the store and not here. Raises: StoreError, OSError."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
        name = Path(state["best_model_checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not (output_dir / name).is_dir() and name in store.checkpoints():
        store.download_checkpoint(name, output_dir / name)


def is_same_manifest(folder: Path, manifest: bytes) -> bool:
    """Whether a folder has this manifest: then it holds, or should hold, the same files."""
    try:
        return (folder / MANIFEST_NAME).read_bytes() == manifest
    except OSError:
        return False


def digest_of(folder: Path) -> str | None:
    """What tells one writing of a checkpoint from another; None where there is no manifest."""
    try:
        return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError:
        return None


def _time_of(info: Mapping[str, Any]) -> float:
    """When an object was written, by whichever name a file system has for that."""
    for name in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0
