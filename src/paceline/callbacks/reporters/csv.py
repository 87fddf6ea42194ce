"""Every row of logs as a line of `<output_dir>/log.csv`; a new metric becomes a new column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from paceline.callbacks.reporters.base import Reporter, log_row, set_aside
from paceline.core.metrics import jsonable
from paceline.core.state import TrainerControl, TrainerState

FILE_NAME = "log.csv"


class CSVReporter(Reporter):
    """Appends each row; cells of metrics that a row does not have are empty.

    A row with a metric that was not there before rewrites the file, once, with one more column. A run that resumes
    first takes out the rows after its checkpoint; a run that starts anew sets the file of the one before aside.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._columns = []
        if not state.is_world_process_zero:
            return
        path = _path(args)
        if state.global_step == 0:
            set_aside(path)
        elif path.exists():
            columns, rows = read(path)
            kept = [row for row in rows if _step(row) <= state.global_step]
            write(path, columns, kept)
            self._columns = columns

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = _path(args)
        row = jsonable(log_row(logs, state))
        if not self._columns and path.exists():
            self._columns = read(path)[0]
        new = [name for name in row if name not in self._columns]
        if new:
            rows = read(path)[1] if path.exists() else []
            columns = [*self._columns, *new]
            write(path, columns, [*rows, row])
            self._columns = columns
            return
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows. A last row that was cut off when the process died is left out."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read()
    reader = csv.DictReader(text.splitlines(keepends=True))
    rows = list(reader)
    if rows and not text.endswith("\n"):
        rows.pop()
    return list(reader.fieldnames or ()), rows


def write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Put a whole new file in place of the old one."""
    temporary = path.with_name(f".{path.name}.rewritten")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def _step(row: dict[str, Any]) -> float:
    try:
        return float(row["step"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def _path(args: Any) -> Path:
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / FILE_NAME
