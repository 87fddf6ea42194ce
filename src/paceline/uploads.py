"""The Trainer's side of `output_store`: one process follows the output folder, and a run ends when the store has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.mirror import Mirror, Policy
from paceline.core.retention import retention_of
from paceline.core.stores import ObjectStore, bring_files, patiently

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def begin(trainer: Trainer) -> Mirror | None:
    """Start to follow the output folder, where there is a store and this is the process that writes to it.

    Raises:
        ImportError: the package for the store is missing; the message names the extra.
        StoreError: it cannot be reached or written to, which is better known before training.
    """
    args = trainer.args
    if args.output_store is None or not trainer.is_world_process_zero():
        return None
    store, folder = ObjectStore(args.output_store), Path(str(args.output_dir))
    patiently(store.check)
    patiently(lambda: bring_files(store, folder))
    reference = weakref.ref(trainer)

    def policy() -> Policy | None:
        owner = reference()
        if owner is None:
            return None
        return retention_of(owner.args), list(owner.state.log_history), owner.state.best_model_checkpoint

    return Mirror(store, folder, policy)


@contextmanager
def finished_uploads(trainer: Trainer) -> Iterator[None]:
    """When a run ends, also by an error, wait until the store has what there is."""
    try:
        yield
    except Exception:
        if trainer.mirror is not None:
            trainer.mirror.finish()
        raise
    if trainer.mirror is not None:
        trainer.mirror.finish()
