"""Preserves files that user code wrote to a checkpoint folder before the checkpoint is published there."""

from __future__ import annotations

import fnmatch
import logging
import shutil
from pathlib import Path

from paceline.checkpoint.manifest import MANIFEST_NAME, extra_files
from paceline.core.log_text import BLOCK_FOLDER

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # present in a complete checkpoint of any trainer

# files of another trainer's checkpoint, which would be mistaken for files of the new checkpoint
_OF_OTHER_TRAINERS = (
    "model*.safetensors*", "pytorch_model*", "adapter_model*", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*",
    STATE_FILE, f"{BLOCK_FOLDER}/*", "training_args.bin", "global_step*/*", "latest",
)  # fmt: skip


def keep_files(final: Path, temporary: Path) -> None:
    """Copies the files that user code wrote to `final` into `temporary`, which is about to replace it.

    These are the files that no manifest lists and that `temporary` does not have. From a complete checkpoint of another
    trainer, only files are kept that no trainer writes.

    Raises:
        OSError: copying fails; `final` is unchanged.
    """
    if not final.is_dir():
        return
    is_foreign = not (final / MANIFEST_NAME).exists() and (final / STATE_FILE).exists()
    patterns = _OF_OTHER_TRAINERS if is_foreign else ()
    kept = [name for name in extra_files(final) if not any(fnmatch.fnmatchcase(name, item) for item in patterns)]
    for name in kept:
        target = temporary / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(final / name, target)
            logger.info("%s, which existed before the checkpoint, is kept.", final / name)
