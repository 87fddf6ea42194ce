"""Every row of logs as a line of JSON in `<output_dir>/log.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from paceline.callbacks.reporters.base import Reporter, log_row, set_aside
from paceline.core.metrics import jsonable
from paceline.core.state import TrainerControl, TrainerState

FILE_NAME = "log.jsonl"


class JSONLReporter(Reporter):
    """Appends each row, with `step`, `epoch` and `time` (seconds since 1970).

    A run that resumes first takes out the rows after its checkpoint, so that no step is there twice; a run that starts
    anew sets the file of the one before aside. NaN and infinity are written as Python's json writes and reads them.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        path = _path(args)
        if state.global_step == 0:
            set_aside(path)
        elif path.exists():
            truncate(path, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        line = json.dumps(jsonable({**log_row(logs, state), "time": round(time.time(), 3)})) + "\n"
        # Opened for each row, some 30 us: nothing is left open, or unwritten, by a run that dies.
        with _path(args).open("a", encoding="utf-8") as file:
            file.write(line)


def truncate(path: Path, last_step: int) -> None:
    """Keep the rows up to `last_step`. A line that was cut off when the process died is dropped too."""
    temporary = path.with_name(f".{path.name}.rewritten")
    with path.open(encoding="utf-8", errors="replace") as old, temporary.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                is_kept = json.loads(line)["step"] <= last_step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if is_kept:
                new.write(line)
    temporary.replace(path)


def _path(args: Any) -> Path:
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / FILE_NAME
