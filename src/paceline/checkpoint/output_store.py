"""Mirrors the output folder to `output_store`, from the creation of the Trainer; a run ends after its last upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.stores import ObjectStore, bring_files, patiently
from paceline.core.optional import LateModule

if TYPE_CHECKING:
    from paceline.checkpoint import remote_sync
else:
    remote_sync = LateModule("paceline.checkpoint.remote_sync")


def begin(url: str, folder: Path, policy: Callable[[], remote_sync.Policy | None]) -> remote_sync.RemoteSync:
    """Checks the store, downloads missing logs and records from it, and starts mirroring the output folder to it.

    Args:
        url: the URL of the store.
        folder: the output folder.
        policy: returns which checkpoints are kept; None once nothing is written anymore.

    Raises:
        ImportError: the package for the store is missing; the message names the extra.
        StoreError: the store cannot be reached or written to.
    """
    store = ObjectStore(url)
    patiently(store.check)
    patiently(lambda: bring_files(store, folder))
    return remote_sync.RemoteSync(store, folder, policy)


@contextmanager
def finished_uploads(mirror: remote_sync.RemoteSync | None) -> Iterator[None]:
    """Waits at the end of a run, or after an error, until all files are uploaded."""
    try:
        yield
    except Exception:
        if mirror is not None:
            mirror.finish()
        raise
    if mirror is not None:
        mirror.finish()
