"""Tells whether the files of a run have changed, from their sizes and times."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.checkpoint import folders
from paceline.checkpoint.lock import is_held
from paceline.core.journal import CHANGES_FILE, JOURNAL_FILE, SKIPPED_FILE
from paceline.core.lineage import PACKAGES_FILE, RECORD_NAME, REPORT_FILE
from paceline.report.run_data import LOG_FILE

RUN_FILES = (RECORD_NAME, JOURNAL_FILE, LOG_FILE, REPORT_FILE, SKIPPED_FILE, CHANGES_FILE, PACKAGES_FILE)
CHECKPOINTS = f"{folders.PREFIX_CHECKPOINT_DIR}-*"


def version_of(place: Path) -> str:
    """Identifies the state of a run's files by their sizes and times, and whether it is trained now."""
    marks = [str(is_held(place))]
    for name in RUN_FILES:
        try:
            status = (place / name).stat()
            marks.append(f"{status.st_size} {status.st_mtime_ns}")
        except OSError:
            marks.append("")
    try:
        marks += sorted(path.name for path in place.glob(CHECKPOINTS))
    except OSError:
        marks.append("")
    return digest(*marks)


def digest(*texts: str) -> str:
    """Returns a hash of texts, which may hold bytes that are no text."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]
