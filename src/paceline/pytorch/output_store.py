"""The mirror of the output folder in `output_store`: begun with the Trainer; a run ends with its last upload."""

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
    """Starts mirroring the output folder.

    Args:
        url: of the store.
        folder: the output folder.
        policy: returns what is kept of the checkpoints; None when nothing is written any more.

    Raises:
        ImportError: the package for the store is missing; the message names the extra.
        StoreError: it cannot be reached or written to.
    """
    store = ObjectStore(url)
    patiently(store.check)
    patiently(lambda: bring_files(store, folder))
    return remote_sync.RemoteSync(store, folder, policy)


@contextmanager
def finished_uploads(mirror: remote_sync.RemoteSync | None) -> Iterator[None]:
    """Waits, at the end of a run or after an error, until the store has all files."""
    try:
        yield
    except Exception:
        if mirror is not None:
            mirror.finish()
        raise
    if mirror is not None:
        mirror.finish()
