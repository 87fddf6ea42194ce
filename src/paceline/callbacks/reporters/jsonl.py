"""Reporter that writes logs to `<output_dir>/log.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from paceline.callbacks.reporters.base import FileReporter
from paceline.core.retry_writer import append_line, replace_whole
from paceline.core.state import TrainerState

FILE_NAME = "log.jsonl"


class JSONLReporter(FileReporter):
    """Appends each row of logs, with `step`, `epoch` and `time` (seconds since 1970).

    A resumed run first removes the rows after its checkpoint, so that no step is repeated; a new run renames the file
    of an earlier one. A failed write is retried with the next row. NaN and infinity are written as Python's json does.
    """

    file_name = FILE_NAME

    def row(self, logs: dict[str, Any], state: TrainerState) -> dict[str, Any]:
        """See `FileReporter`."""
        return {**super().row(logs, state), "time": round(time.time(), 3)}

    def append(self, path: Path, row: dict[str, Any]) -> None:
        """See `FileReporter`. Opens the file for each row (about 30 us), so that a crash loses no row."""
        append_line(path, json.dumps(row) + "\n")

    def truncate(self, path: Path, last_step: int) -> None:
        """See `FileReporter`. An incomplete last line, left by a crash, is removed too."""
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                replace_whole(path, "".join(line for line in file if _is_kept(line, last_step)))


def _is_kept(line: str, last_step: int) -> bool:
    try:
        return bool(line.endswith("\n") and json.loads(line)["step"] <= last_step)
    except (ValueError, KeyError, TypeError):
        return False
