"""Reporter that writes logs to `<output_dir>/log.csv`; a new metric becomes a new column."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import FileReporter
from paceline.core.retry_writer import append_line, replace_whole
from paceline.core.state import TrainerControl, TrainerState

FILE_NAME = "log.csv"


class CSVReporter(FileReporter):
    """Appends each row of logs; cells of missing metrics are empty.

    A row with a new metric rewrites the file once with another column. A resumed run first removes the rows after its
    checkpoint; a new run renames the file of an earlier one.
    """

    file_name = FILE_NAME

    def __init__(self) -> None:
        super().__init__()
        self._path: Path | None = None  # the file that has the columns
        self._columns: list[str] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._path, self._columns = None, []
        super().on_train_begin(args, state, control)

    def truncate(self, path: Path, last_step: int) -> None:
        if path.exists():
            columns, rows = read(path)
            write(path, columns, [row for row in rows if _step(row) <= last_step])
            self._path, self._columns = path, columns

    def append(self, path: Path, row: dict[str, Any]) -> None:
        if path != self._path or not self._columns:  # after a run, a row may go to another folder
            self._columns = read(path)[0] if path.exists() else []
            self._path = path
        new = [name for name in row if name not in self._columns]
        if new:
            columns = [*self._columns, *new]
            write(path, columns, [*(read(path)[1] if path.exists() else []), row])
            self._columns = columns
            return
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns).writerow(row)
        append_line(path, line.getvalue())


def read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns columns and rows. An incomplete last row, left by a crash, is ignored."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read()
    # no splitlines: it would also split at characters, such as a form feed, that csv leaves without quotes
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows = list(reader)
    if rows and not text.endswith("\n"):
        rows.pop()
    return list(reader.fieldnames or ()), rows


def write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    replace_whole(path, text.getvalue())


def _step(row: dict[str, Any]) -> float:
    try:
        return float(row["step"])
    except (KeyError, TypeError, ValueError):
        return float("inf")
