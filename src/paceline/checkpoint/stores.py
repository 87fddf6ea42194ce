"""Object stores for runs: upload, download and completeness of checkpoints.

A store has no rename, so a checkpoint's manifest is written last and deleted first: a checkpoint with a manifest is
complete. A marker object exists during uploads and deletions, so that the next run can remove the remains of a killed
one.
Access is through fsspec, whose package for the scheme (s3fs, gcsfs, adlfs) is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.args.places import staging_folder
from paceline.args.secrets import describe_error
from paceline.checkpoint import folders
from paceline.checkpoint.inside import is_inner_name, leads_outside
from paceline.checkpoint.manifest import MANIFEST_NAME, known_files, verify
from paceline.core.lineage import PROGRESS_FILE, RECORD_NAME, RunMark, is_part, mark_of, parse_mark, run_in
from paceline.core.optional import require

logger = logging.getLogger(__name__)

MARKER_NAME = "upload-is-incomplete.txt"
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

_CHECKPOINT = re.compile(re.escape(folders.PREFIX_CHECKPOINT_DIR) + r"-[0-9]+")
_NO_BUCKET = re.compile(r"(?i)(bucket|container)[^/]* (does not exist|not found)|NoSuchBucket|ContainerNotFound")
# errors that a retry does not fix: wrong names, missing permissions
_LASTING = ("NoCredentials", "PartialCredentials", "Forbidden", "Unauthorized", "InvalidAccessKeyId", "ClientAuth")


class StoreError(OSError, ValueError):
    """A store is unreachable or refused a request.

    Attributes:
        is_lasting: True if a retry would not help: there is no such bucket, or no permission.
    """

    def __init__(self, words: str, is_lasting: bool = False) -> None:
        super().__init__(words)
        self.is_lasting = is_lasting


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL and the path in it.

    Raises:
        ImportError: the package for this scheme is missing; the message names the extra that installs it.
        ValueError: the scheme is unknown.
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
            f"output_dir={url!r}: fsspec knows no scheme {scheme!r} ({describe_error(error)}): use s3://, gs://, az:// "
            "or another one that it lists."
        ) from error
    except Exception as error:  # some connect or look up credentials in the constructor
        raise StoreError(f"{url} cannot be opened ({describe_error(error)})", is_lasting=is_lasting(error)) from None
    return file_system, path


def is_lasting(error: BaseException) -> bool:
    """True if a retry would fail the same way."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return True
    return any(name.startswith(_LASTING) for name in names) or "NoSuchBucket" in str(error)


class ObjectStore:
    """The objects of one run in a store. Names are paths below its URL, with forward slashes. Nothing is cached.

    Every method raises StoreError if the store is unreachable or refuses a request.

    Args:
        url: the URL of the run, such as `s3://bucket/run`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, path = open_file_system(self.url)
        self._root = path.rstrip("/")

    def check(self) -> None:
        """Writes and deletes a small object, so that a wrong name, permission or network fails before training."""
        self.write(".writable", b"paceline asks whether it may write here\n")
        with suppress(StoreError):  # a store without permission to delete is valid
            self.delete([".writable"])

    def checkpoints(self) -> dict[str, RunMark | None]:
        """Maps the names of the complete checkpoints to their run marks; None for a checkpoint without a mark."""
        found = {}
        for name in self._top():
            if _CHECKPOINT.fullmatch(name) is not None:
                with self._asking(f"look at {name}"), suppress(FileNotFoundError):
                    self._files.info(self._path(f"{name}/{MANIFEST_NAME}"))
                    found[name] = parse_mark(self.read(f"{name}/{PROGRESS_FILE}"))
        return found

    def clear_unfinished(self) -> list[str]:
        """Deletes the remains of interrupted uploads and deletions. Returns: the names of the deleted checkpoints."""
        cleared = []
        for name in self._top():
            if _CHECKPOINT.fullmatch(name) is None or self.read(f"{name}/{MARKER_NAME}") is None:
                continue
            if self.read(f"{name}/{MANIFEST_NAME}") is not None:  # it was complete except for the marker
                self.delete([f"{name}/{MARKER_NAME}"])
                continue
            self.delete_checkpoint(name)
            cleared.append(name)
        return cleared

    def names(self, below: str = "") -> list[str]:
        """Returns the names of all objects below a name; an empty list if there are none."""
        place = self._path(below)
        with self._asking(f"list {below or 'it'}"):
            try:
                found = self._files.find(place)
            except FileNotFoundError:
                return []
        start = len(self._root.strip("/")) + 1
        return sorted(str(path).strip("/")[start:] for path in found)

    def files_beside(self) -> list[str]:
        """Returns the names of all objects that belong to no checkpoint."""
        names: list[str] = []
        for top in self._top():
            if _CHECKPOINT.fullmatch(top) is None and not top.startswith("."):
                names += self.names(top)
        return names

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object; None if it does not exist."""
        with self._asking(f"read {name}"):
            try:
                content: bytes = self._files.cat_file(self._path(name))
            except (FileNotFoundError, IsADirectoryError):
                return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes an object atomically."""
        with self._asking(f"write {name}"):
            self._files.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file. Raises: FileNotFoundError, if the file is gone."""
        if not path.is_file():
            raise FileNotFoundError(path)
        with self._asking(f"write {name}"):
            self._files.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Downloads an object to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._asking(f"read {name}"):
            self._files.get_file(self._path(name), str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects in this order; missing ones are no error."""
        for name in names:
            with self._asking(f"delete {name}"), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

    def upload_checkpoint(self, folder: Path, name: str) -> None:
        """Uploads the files of a checkpoint, the manifest last.

        Args:
            folder: a complete checkpoint, which must not change during the upload.
            name: the checkpoint's name; an existing one is replaced.
        """
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.write(f"{name}/{MARKER_NAME}", b"This checkpoint is being uploaded or deleted; it is incomplete.\n")
        stale = set(self.names(name)) - {f"{name}/{file}" for file in files} - {f"{name}/{MARKER_NAME}"}
        self.delete([f"{name}/{MANIFEST_NAME}", *sorted(stale)])
        for file in files:
            if file != MANIFEST_NAME:
                self.upload(folder / file, f"{name}/{file}")
        self.upload(folder / MANIFEST_NAME, f"{name}/{MANIFEST_NAME}")
        self.delete([f"{name}/{MARKER_NAME}"])

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint, the manifest first, so that a partly deleted one never counts as complete."""
        self.write(f"{name}/{MARKER_NAME}", b"This checkpoint is being uploaded or deleted; it is incomplete.\n")
        own = {f"{name}/{MANIFEST_NAME}", f"{name}/{MARKER_NAME}"}
        rest = [found for found in self.names(name) if found not in own]
        self.delete([f"{name}/{MANIFEST_NAME}", *rest, f"{name}/{MARKER_NAME}"])

    def download_checkpoint(self, name: str, folder: Path) -> list[str]:
        """Downloads a checkpoint into a hidden folder, verifies it and publishes it by one rename.

        Returns: the problems that the verification found; if there are any, no folder is created.
        Raises: OSError, if writing fails.
        """
        found_names = self.names(name)
        outside = [found for found in found_names if not is_below(name, found)]
        if outside:
            return [f"the store has an object {outside[0]!r:.200}, which is not a file of a checkpoint"]
        temporary = folders.begin(folder)
        try:
            for found in found_names:
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
        """Returns the names at the top level, of objects and of the folders that object names imply."""
        with self._asking("list it"):
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Converts the errors of any library to StoreError, except FileNotFoundError."""
        with suppress(Exception):  # the cache is optional
            self._files.invalidate_cache()
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise StoreError(f"{self.url}: cannot {what} ({describe_error(error)})", True) from None
            raise
        except StoreError:
            raise
        except Exception as error:
            words = f"{self.url}: cannot {what} ({describe_error(error)})"
            raise StoreError(words, is_lasting=is_lasting(error)) from None


def patiently(ask: Callable[[], Any], patience: float = 60.0) -> Any:
    """Calls `ask` with retries for `patience` seconds while the store is unreachable. Raises: the last StoreError."""
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
    """Returns the newest complete checkpoint: `local`, or a newer one downloaded from the store to `output_dir`.

    Only checkpoints of the run that `run.json` in `output_dir` (or else in the store) names are considered.

    Raises: StoreError, OSError.
    """
    least = -1 if local is None else folders.step_of(local)
    run = run_in(output_dir) or parse_mark(store.read(RECORD_NAME))
    marks = store.checkpoints()
    for name in sorted(marks, key=folders.step_of, reverse=True):
        if folders.step_of(name) <= least:
            break
        if not is_part(run, name, marks[name]):
            report(f"{store.url}/{name} is skipped: it does not belong to the run started or resumed here last")
            continue
        problems = store.download_checkpoint(name, output_dir / name)
        if not problems:
            report(f"{name} is resumed from {store.url}: it was downloaded to {output_dir}")
            return output_dir / name
        report(f"{store.url}/{name} is skipped: {'; '.join(problems[:3])}")
    return local


def bring_files(store: ObjectStore, output_dir: Path) -> None:
    """Downloads missing files next to the checkpoints (logs, the record), without weights.

    Raises: StoreError, OSError.
    """
    for name in store.files_beside():
        if not is_inner_name(name) or leads_outside((output_dir / name).parent, output_dir):
            logger.warning("%s has an object %r, which is not a file of a run: it is ignored.", store.url, name)
            continue
        path = output_dir / name
        if not path.exists() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
            temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
            store.download(name, temporary)
            os.replace(temporary, path)


def bring_named(url: str, own: str | None, output_dir: Path) -> Path:
    """Downloads the checkpoint of a URL and returns its local folder.

    Args:
        url: the URL of the checkpoint.
        own: the URL of this run; its checkpoints are downloaded to `output_dir`, others to their staging folder.
        output_dir: the output folder of this run.

    Raises: StoreError, also if the checkpoint does not exist or is damaged.
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
    """Downloads the newest complete and the best checkpoint of a run if needed. Returns the newest, or None.

    Raises: StoreError, OSError.
    """
    store = ObjectStore(url)
    local = folders.newest_valid(output_dir, report)
    found: Path | None = patiently(lambda: newest_in_store(store, output_dir, local, report))
    if found is not None:
        patiently(lambda: bring_best(store, output_dir, found))
    return found


def bring_best(store: ObjectStore, output_dir: Path, checkpoint: Path) -> None:
    """Downloads the best checkpoint named by `checkpoint` if it is only in the store. Raises: StoreError, OSError."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
        name = Path(state["best_model_checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    marks, run = store.checkpoints(), mark_of(checkpoint)
    if not (output_dir / name).is_dir() and name in marks and is_part(run, name, marks[name]):
        store.download_checkpoint(name, output_dir / name)


def is_below(checkpoint: str, name: str) -> bool:
    """True if `name` is a valid name of a file in the checkpoint."""
    return name.startswith(f"{checkpoint}/") and is_inner_name(name.removeprefix(f"{checkpoint}/"))


def is_same_manifest(folder: Path, manifest: bytes) -> bool:
    """True if a folder has this manifest, and so the same files."""
    try:
        return (folder / MANIFEST_NAME).read_bytes() == manifest
    except OSError:
        return False


def digest_of(folder: Path) -> str | None:
    """Returns the digest of a checkpoint's manifest, which identifies one save; None without a manifest."""
    try:
        return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError:
        return None
