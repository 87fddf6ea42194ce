"""Reporter that writes logs to `<output_dir>/log.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.secrets import masked
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import Reporter, log_row
from paceline.core.metrics import jsonable
from paceline.core.retry_writer import RetryWriter, append_line, replace_whole, set_aside
from paceline.core.state import TrainerControl, TrainerState

FILE_NAME = "log.jsonl"


class JSONLReporter(Reporter):
    """Appends each row of logs, with `step`, `epoch` and `time` (seconds since 1970).

    A resumed run first removes the rows after its checkpoint, so that no step is repeated; a new run renames the file
    of an earlier one. A failed write is retried with the next row. NaN and infinity are written as Python's json does.
    """

    def __init__(self) -> None:
        self._outbox = RetryWriter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._outbox = RetryWriter()
        if not state.is_world_process_zero:
            return
        path = _path(args)
        if state.global_step == 0:
            self._outbox.put(path, partial(set_aside, path))
        else:
            self._outbox.put(path, partial(truncate, path, state.global_step))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        line = json.dumps(masked(jsonable({**log_row(logs, state), "time": round(time.time(), 3)}))) + "\n"
        # Opened for each row (about 30 us), so that a crash leaves nothing unwritten.
        self._outbox.retry()
        self._outbox.put(_path(args), partial(append_line, _path(args), line))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._outbox.close()


def truncate(path: Path, last_step: int) -> None:
    """Keeps the rows up to `last_step`. An incomplete last line, left by a crash, is removed too."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        replace_whole(path, "".join(line for line in file if _is_kept(line, last_step)))


def _is_kept(line: str, last_step: int) -> bool:
    try:
        return bool(line.endswith("\n") and json.loads(line)["step"] <= last_step)
    except (ValueError, KeyError, TypeError):
        return False


def _path(args: TrainingArguments) -> Path:
    return Path(str(args.output_dir), FILE_NAME)
