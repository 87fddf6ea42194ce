"""The files of a checkpoint beside its weights and training state: configuration, tokenizer, custom code."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.inside import leads_outside
from paceline.checkpoint.manifest import MANIFEST_NAME

logger = logging.getLogger(__name__)

# files of a checkpoint that are not copied, because they are weights or training state; neither are folders (shards)
_LEFT = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.distcp", ".*",
    MANIFEST_NAME, "trainer_state.json", "progress.json", "sharded.json", "run.json", "journal.bin", "log.jsonl",
    "log.csv", "events.out.*", "packages*.txt", "uncommitted*.diff",
    "soup.json", "README.md", "latest", "latest_universal", "zero_to_*.py",
)  # fmt: skip


def chosen_files(checkpoint: Path, files_from: Path | None) -> Iterator[Path]:
    """Yields the files that are neither weights nor training state: configuration, tokenizer, custom code."""
    seen: set[str] = set()
    for place in (checkpoint, files_from):
        if place is None:
            continue
        for path in sorted(place.iterdir()):
            is_left = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT)
            if is_left or path.name in seen or not path.is_file():
                continue
            if leads_outside(path, place):
                logger.warning("%s is a link to a file outside of %s: it is not copied.", path, place)
            else:
                seen.add(path.name)
                yield path
