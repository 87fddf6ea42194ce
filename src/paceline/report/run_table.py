"""Lists the runs below a folder, with their state, best metric, time and changed arguments."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.checkpoint.lock import is_held
from paceline.core.counts import is_count
from paceline.core.journal import JOURNAL_FILE
from paceline.core.lineage import KEY, RECORD_NAME
from paceline.core.record import jsonable
from paceline.report.differences import PLACES, BrokenRun, mapping, open_run
from paceline.report.run_data import RunData

RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_MOST_DEPTH = 8  # folders below the given one
_ENDS = {FINISHED, INTERRUPTED, FAILED}


@dataclass(frozen=True)
class RunRow:
    """One run of a table.

    Attributes:
        folder: its output folder.
        name: its path below the listed folder.
        state: `running`, `finished`, `interrupted` (stopped, or its process ended without a record) or `failed` (an
            error).
        step: the last known optimizer step.
        max_steps: the steps of the whole run; None if unknown.
        metric: the name of the metric of the best model; None without one.
        best: the best value of that metric; None if unknown.
        seconds: training time over all starts; None if unknown.
        started: time of the last start, in ISO 8601; empty if unknown.
        parent: name of the run that it was resumed from in another folder, or that run's id; None for no other.
        changed: the arguments that differ from their defaults.
        error: the error that ended it; None without one.
    """

    folder: Path
    name: str
    state: str
    step: int
    max_steps: int | None
    metric: str | None
    best: float | None
    seconds: float | None
    started: str
    parent: str | None
    changed: dict[str, Any]
    error: str | None = None


@dataclass
class RunTable:
    """The runs below a folder.

    Attributes:
        rows: the runs, in the order of their paths.
        problems: a sentence for each folder or file that could not be read.
    """

    rows: list[RunRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_runs(folder: Path, check: Callable[[Path], None] | None = None) -> RunTable:
    """Reads every run in a folder and below it; a file that cannot be read is a problem of the table.

    Args:
        folder: the folder.
        check: called with the folder of each run before its files are read; its ValueError is a problem, too.

    Raises:
        NotADirectoryError: it is not a folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder.")
    table = RunTable()
    defaults: dict[str, Any] = jsonable(TrainingArguments("runs").to_dict())
    runs: list[RunData] = []
    for place in run_folders(folder, table.problems):
        try:
            if check is not None:
                check(place)
            runs.append(open_run(place))
        except (BrokenRun, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            table.problems.append(f"{place}: {error}" if str(place) not in str(error) else str(error))
    owners: dict[str, str] = {}
    for run in runs:
        owners.update(dict.fromkeys(_own_starts(run), _name(run, folder)))
    for run in runs:
        table.rows.append(_row(run, folder, defaults, owners))
        table.problems += [f"{run.folder}: {problem}" for problem in run.problems]
    return table


def varying(rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Returns the changed arguments of each run, without those that all runs share if there are several."""
    if len(rows) < 2:
        return [dict(row.changed) for row in rows]
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in row.changed.items()} for row in rows]
    shared = set.intersection(*({*each.items()} for each in texts))
    return [
        {name: row.changed[name] for name, text in each.items() if (name, text) not in shared}
        for row, each in zip(rows, texts, strict=True)
    ]


def run_folders(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Yields the folders of runs: those with a record or a journal. Links are not followed."""

    def report(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for place, below, files in os.walk(folder, onerror=report):
        path = Path(place)
        depth = len(path.relative_to(folder).parts)
        is_deep = depth >= _MOST_DEPTH
        below[:] = [] if is_deep else sorted(name for name in below if not name.startswith((".", "checkpoint-")))
        if RECORD_NAME in files or JOURNAL_FILE in files:
            yield path


def _row(run: RunData, folder: Path, defaults: dict[str, Any], owners: dict[str, str]) -> RunRow:
    end = mapping(run.record.get("end"))
    metric, best = best_of(run, end)
    changed = {
        name: value
        for name, value in run.arguments.items()
        if name not in PLACES and (name not in defaults or value != defaults[name])
    }
    state = state_of(run, end)
    error, end_step = end.get("error"), end.get("step")
    return RunRow(
        folder=run.folder,
        name=_name(run, folder),
        state=state,
        step=max(run.last_step, end_step if is_count(end_step) else 0),
        max_steps=run.max_steps,
        metric=metric,
        best=best,
        seconds=seconds_of(run, end, is_running=state == RUNNING),
        started=str(run.record.get("started") or ""),
        parent=_parent(run, owners),
        changed=changed,
        error=str(error) if isinstance(error, str) and state == FAILED else None,
    )


def _name(run: RunData, folder: Path) -> str:
    path = run.folder.relative_to(folder)
    return path.as_posix() if path.parts else run.folder.resolve().name


def state_of(run: RunData, end: dict[str, Any]) -> str:
    """Returns the state of a run: running, or as its record states, or as its last step shows."""
    if is_held(run.folder):
        return RUNNING
    if isinstance(end.get("state"), str) and end["state"] in _ENDS:
        return str(end["state"])
    return FINISHED if run.is_finished else INTERRUPTED


def best_of(run: RunData, end: dict[str, Any]) -> tuple[str | None, float | None]:
    """Returns the metric of the best model and its value: of the record of the end, or of the newest checkpoint."""
    metric = end.get("metric_for_best_model") or mapping(run.record.get("plan")).get("metric_for_best_model")
    best = end.get("best_metric")
    if best is None:
        best = run.state.get("best_metric")
    return metric if isinstance(metric, str) else None, _finite(best)


def seconds_of(run: RunData, end: dict[str, Any], *, is_running: bool) -> float | None:
    """Returns the training time of all starts; of a run without an end, that up to its last journal row."""
    known = _finite(end.get("seconds"))
    if known is not None:
        return known
    before = _finite(mapping(run.record.get(KEY)).get("seconds"))
    try:
        started = datetime.datetime.fromisoformat(str(run.record.get("started")))
        last = datetime.datetime.now(datetime.UTC).timestamp()
        if not is_running:
            last = (run.folder / JOURNAL_FILE).stat().st_mtime
        passed = last - started.timestamp()
    except (ValueError, OSError):
        return None
    return max(passed, 0.0) + (before or 0.0)


def _finite(value: object) -> float | None:
    """Returns a number of a record; None for anything else, also for one that is not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < sys.float_info.max else None  # type: ignore[operator, arg-type]


def _own_starts(run: RunData) -> set[str]:
    """Returns the ids of the starts that were made in the folder of a run: the last one of each record."""
    earlier = run.record.get("history")
    found = set()
    for record in [run.record, *(earlier if isinstance(earlier, list) else ())]:
        starts = mapping(mapping(record).get(KEY)).get("starts")
        last = starts[-1] if isinstance(starts, list) and starts else None
        if isinstance(last, list) and last:
            found.add(str(last[0]))
    return found


def _parent(run: RunData, owners: dict[str, str]) -> str | None:
    """Returns the run in another folder that this one was resumed from; None if it was resumed in its own folder."""
    parent = mapping(run.record.get("parent"))
    start = parent.get("start")
    if not isinstance(start, str) or start in _own_starts(run):
        return None
    return owners.get(start, start[:12])
