"""The log in checkpoints: full blocks of rows are written once, and hard-linked from one checkpoint to the next."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manifest import KnownFile, identity_of
from paceline.core.log_text import BLOCK_FOLDER, INDEX_NAME, Block, LogText, StateText, StoredBlock
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"


def is_last_checkpoint(state: TrainerState, control: TrainerControl) -> bool:
    """True if the run ends with a checkpoint that is written now."""
    return control.should_training_stop or state.global_step >= state.max_steps


@dataclass(frozen=True)
class StateFile:
    """The state of one checkpoint, to be written with its log.

    Args:
        text: the state.
        log: the log of the run; holds the blocks of the last checkpoint, and of this one once it is written.
        final: the folder of the published checkpoint.
        is_whole: write all rows into one file, without blocks.
    """

    text: StateText
    log: LogText
    final: Path
    is_whole: bool

    def write(self, temporary: Path, known: dict[str, KnownFile]) -> None:
        """Writes the files; any thread may call it, again after an error.

        Args:
            temporary: the folder to write to.
            known: receives the linked files, for `manifest.seal`.

        Raises: OSError.
        """
        self.text.write(temporary / STATE_FILE, is_whole=self.is_whole)
        index = self.text.index()
        if self.is_whole or index is None:
            return
        (temporary / BLOCK_FOLDER).mkdir(exist_ok=True)
        (temporary / BLOCK_FOLDER / INDEX_NAME).write_bytes(index)
        stored = {}
        for block in self.text.blocks():
            stored[block.name] = self._write_block(block, temporary / block.name, known)
        if not self.log.stored:
            logger.info(
                "From %s on, %s of a checkpoint holds the newest rows of the log, and %s/ beside it those before them. "
                "That of the last step holds all; save_full_log_history=True writes all each time.",
                *(self.final, STATE_FILE, BLOCK_FOLDER),
            )
        self.log.stored = stored  # of a checkpoint that is not published, no path exists, and nothing is linked

    def _write_block(self, block: Block, target: Path, known: dict[str, KnownFile]) -> StoredBlock:
        target.unlink(missing_ok=True)  # left by a failed attempt, and perhaps shared with another checkpoint
        earlier = self.log.stored.get(block.name)
        if earlier is not None and block.digest is not None and block.digest == earlier.digest:
            sha256 = earlier.sha256
        else:  # rows without a digest are compared by their text
            sha256 = hashlib.sha256(block.text()).hexdigest()
        linked = _link(earlier, target) if earlier is not None and earlier.sha256 == sha256 else None
        if linked is not None:
            known[block.name] = linked
        else:
            target.write_bytes(block.text())
        return StoredBlock(self.final / block.name, block.digest, sha256, identity_of(target))


def _link(earlier: StoredBlock, target: Path) -> KnownFile | None:
    """Links the file of an earlier checkpoint to `target`. Returns None if it was deleted or cannot be linked."""
    known = KnownFile(earlier.sha256, earlier.identity)
    if not known.is_still(earlier.path):
        return None
    try:
        os.link(earlier.path, target)
    except OSError as error:
        logger.debug("no link to %s (%s): it is written again", earlier.path, error)
        return None
    return known
