"""`paceline runs`: a table of the runs below a folder. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text
from paceline.cli.errors import UsageError, suggest
from paceline.cli.tables import draw_table
from paceline.cli.verify import say
from paceline.core.record import jsonable
from paceline.report.run_table import RunRow, RunTable, list_runs, varying

SORTS: dict[str, Callable[[RunRow], Any]] = {
    "best": lambda row: row.best,
    "name": lambda row: row.name,
    "started": lambda row: row.started or None,
    "state": lambda row: row.state,
    "step": lambda row: row.step,
    "time": lambda row: row.seconds,
}


def run(words: Sequence[str]) -> int:
    """Prints the table of the runs below a folder.

    Returns:
        0; problems of single runs are named and do not count.

    Raises:
        UsageError: no folder is given, it is none, or there is no such column to sort by.
    """
    folder, sort, is_json = read_options(words)
    try:
        table = list_runs(folder)
    except OSError as error:
        raise UsageError(str(error)) from error
    table.rows = sort_rows(table.rows, sort)
    if is_json:
        print(json.dumps(to_json(table), indent=2))
    else:
        say(mask_text(describe(table, folder)))
    return 0


def read_options(words: Sequence[str]) -> tuple[Path, str, bool]:
    """Returns folder, sort column and whether JSON is wanted.

    Raises:
        UsageError: a word is unknown or missing.
    """
    rest, folders, sort, is_json = list(words), [], "started", False
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--json":
            is_json = True
        elif name == "--sort":
            if not equals and not rest:
                raise UsageError(f"--sort needs a column: {', '.join(SORTS)}")
            sort = value if equals else rest.pop(0)
        elif word.startswith("-"):
            raise UsageError(f"runs takes a folder, --sort and --json, not {word}")
        else:
            folders.append(Path(word))
    if len(folders) != 1:
        raise UsageError("runs needs one folder: paceline runs FOLDER [--sort COLUMN] [--json]")
    if sort.removeprefix("-") not in SORTS:
        raise UsageError(f"--sort {sort}: there is no such column{suggest(sort, SORTS)}")
    return folders[0], sort, is_json


def sort_rows(rows: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Returns the rows sorted by a column; `-COLUMN` reverses the order. Rows without a value come last."""
    key = SORTS[sort.removeprefix("-")]
    known = [row for row in rows if key(row) is not None and key(row) == key(row)]
    unknown = [row for row in rows if row not in known]
    return [*sorted(known, key=key, reverse=sort.startswith("-")), *unknown]


def to_json(table: RunTable) -> dict[str, Any]:
    """Returns a table as JSON values."""
    found: dict[str, Any] = jsonable(
        {
            "runs": [{**vars(row), "folder": str(row.folder)} for row in table.rows],
            "problems": table.problems,
        }
    )
    return found


def describe(table: RunTable, folder: Path) -> str:
    """Describes a table for people."""
    lines = []
    if table.rows:
        rows = [
            [row.name, row.state, _steps(row), _best(row), _time(row.seconds), _changes(changed)]
            for row, changed in zip(table.rows, varying(table.rows), strict=True)
        ]
        lines = draw_table(["name", "state", "step", "best", "time", "changed"], rows, widest={"changed": 90})
        lines += [f"{row.name} failed: {row.error}" for row in table.rows if row.error]
        lines += [f"{row.name} was resumed from {row.parent}" for row in table.rows if row.parent]
    else:
        lines.append(f"There are no runs in {folder}.")
    lines += [f"warning: {problem}" for problem in table.problems]
    return "\n".join(lines)


def _steps(row: RunRow) -> str:
    return f"{row.step:,}" + (f" of {row.max_steps:,}" if row.max_steps else "")


def _best(row: RunRow) -> str:
    return "" if row.best is None else f"{row.metric or 'metric'} {row.best:.6g}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _changes(changed: dict[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in sorted(changed.items()))
