"""Reads the data of a run from its output folder: record, journal, logged rows and checkpoints.

Files may be missing, incomplete or damaged: `RunData.problems` lists unreadable files, and the rest is shown.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint import folders
from paceline.core.counts import is_count, is_number
from paceline.core.journal import FORMAT, JOURNAL_FILE, SKIPPED_FILE
from paceline.core.lineage import KEY, RECORD_NAME, REPORT_FILE, mark_from
from paceline.core.log_text import HISTORY, earlier_rows
from paceline.core.record import jsonable
from paceline.report.measured import TIME_KEYS, has_measurements, is_measured

STATE_FILE = "trainer_state.json"  # in a checkpoint
LOG_FILE = "log.jsonl"  # written by the jsonl reporter
LOG_START = '<script type="application/json" id="log">'  # precedes the rows that a page keeps of its run
_TIMES = {"step", "epoch", "time", *TIME_KEYS}
_MOST_KEPT = 2_000  # maximum rows that a page keeps
_MOST_BYTES = 2**30  # maximum size of a file to read


@dataclass(frozen=True)
class CheckpointSize:
    """A checkpoint in the folder.

    Attributes:
        name: the folder's name.
        step: the optimizer step of the checkpoint.
        num_bytes: size of its readable files.
        is_best: True if the run recorded it as its best checkpoint.
    """

    name: str
    step: int
    num_bytes: int
    is_best: bool


@dataclass(frozen=True)
class RunData:
    """The data of one run.

    Attributes:
        folder: the output folder of the run.
        record: the content of `run.json`; empty if it is missing.
        updates: the journal, one row for each optimizer step, of dtype `paceline.core.journal.FORMAT`.
        rows: the logged rows in their order, each with `step`.
        state: the newest `trainer_state.json` without its rows.
        checkpoints: the run's checkpoints, lowest step first.
        skipped: the accumulation windows that a rewind skipped.
        problems: a sentence for each file that could not be read.
    """

    folder: Path
    record: dict[str, Any]
    updates: np.ndarray
    rows: list[dict[str, Any]]
    state: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[CheckpointSize] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the run; secrets were masked when they were written."""
        return _mapping(self.record.get("arguments"))

    @property
    def name(self) -> str:
        """`run_name`, or the name of the folder."""
        name = self.arguments.get("run_name")
        return name if isinstance(name, str) and name else self.folder.resolve().name

    @property
    def last_step(self) -> int:
        """The last known optimizer step."""
        steps = [int(row["step"]) for row in self.rows[-1:]]
        if len(self.updates):
            steps.append(int(self.updates["step"][-1]))
        steps += [checkpoint.step for checkpoint in self.checkpoints[-1:]]
        return max(steps, default=0)

    @property
    def last_epoch(self) -> float | None:
        """The epoch after the last known step, as logged with it, or else by the journal; None if unknown.

        Of data without a length the journal gives whole epochs only.
        """
        logged = next((row for row in reversed(self.rows) if is_number(row.get("epoch"))), None)
        known = None if logged is None else float(logged["epoch"])
        if not len(self.updates) or (logged is not None and logged["step"] >= self.updates["step"][-1]):
            return known
        epoch = int(self.updates["epoch"][-1])
        length = _mapping(self.record.get("plan")).get("updates_per_epoch")
        if not is_count(length) or not length:
            return max(float(epoch), known or 0.0)
        return epoch + min(int((self.updates["epoch"] == epoch).sum()) / length, 1.0)

    @property
    def first_step(self) -> int:
        """The optimizer step that the last start of the run began at; 0 if unknown."""
        mark = mark_from(self.record.get(KEY))
        return 0 if mark is None else mark.starts[-1][1]

    @property
    def max_steps(self) -> int | None:
        """The optimizer steps of the whole run; None if unknown."""
        known = [self.state.get("max_steps"), _mapping(self.record.get("plan")).get("max_steps")]
        step = self.state.get("global_step")
        if is_count(step) and step <= self.first_step:  # of an earlier start, which may have had another length
            known.reverse()
        for value in known:
            if is_count(value) and value > 0:
                return value
        return None

    @property
    def is_finished(self) -> bool:
        """True if the last known step is the last one of the run."""
        return self.max_steps is not None and self.last_step >= self.max_steps


def read_run(
    folder: Path, rows: Sequence[Mapping[str, Any]] | None = None, state: Mapping[str, Any] | None = None
) -> RunData:
    """Reads the data of a run.

    Args:
        folder: the output folder of the run.
        rows: the logged rows of a run in this process; None reads them from files.
        state: the trainer state of a run in this process, without its rows.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder.")
    problems: list[str] = []
    checkpoints = folders.own_checkpoints(folder)[0]
    record = _mapping(_read_json(folder / RECORD_NAME, problems))
    updates = _read_journal(folder / JOURNAL_FILE, problems)
    if not record and not len(updates) and not checkpoints and rows is None:
        raise FileNotFoundError(
            f"{folder} holds no run: there is no {RECORD_NAME}, no {JOURNAL_FILE} and no checkpoint in it. Name the "
            "output_dir of a run."
        )
    if rows is None or state is None:
        state = _newest_state(checkpoints, problems)
        rows = _logged_rows(folder, state, problems)
        kept = _kept_log(folder / REPORT_FILE, record)
        if kept is not None and kept[0] and _last_step(kept[0]) >= _last_step(rows):
            logged = [row for row in rows if "loss" in row]
            is_timed = any(map(has_measurements, logged))  # the same seconds are not counted twice
            rows = [*logged, *(row for row in kept[0] if not (is_timed and is_measured(row)))]
            state = {**state, **kept[1]}
    else:
        state = _with_earlier_messages(state, _kept_log(folder / REPORT_FILE, record))
    best = state.get("best_model_checkpoint")
    best_name = Path(best).name if isinstance(best, str) else None
    return RunData(
        folder=folder,
        record=record,
        updates=updates,
        rows=[dict(row) for row in rows if _is_step(row.get("step"))],
        state={key: value for key, value in state.items() if key != HISTORY},
        checkpoints=[
            CheckpointSize(path.name, folders.step_of(path), _num_bytes(path), path.name == best_name)
            for path in checkpoints
        ],
        skipped=_read_lines(folder / SKIPPED_FILE, problems),
        problems=problems,
    )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Returns the names of runs. One that several have is followed by the shortest end of the path that tells it apart.

    If a run is named after its folder, this end stands alone, for instance `a/run` beside `b/run`.
    """
    alike: dict[str, set[tuple[str, ...]]] = {}
    for run in runs:
        alike.setdefault(run.name, set()).add(run.folder.resolve().parts)
    names = []
    for run in runs:
        places, parts = alike[run.name], run.folder.resolve().parts
        if len(places) == 1:
            names.append(run.name)
            continue
        length = next(size for size in itertools.count(1) if len({place[-size:] for place in places}) == len(places))
        end = Path(*parts[-length:]).as_posix()
        names.append(end if parts[-1] == run.name else f"{run.name}, {end}")
    return names


def numbers_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (steps, values) of every number in the rows but times, by key, in the order of the steps.

    If two rows have the same step, for instance after a manual evaluation, the later row counts.
    """
    keys = dict.fromkeys(key for row in rows for key in row if key not in _TIMES)
    found = {}
    for key in keys:
        points = ((row["step"], row[key]) for row in rows if key in row)
        numbers = {
            int(step): _as_float(value)
            for step, value in points
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if numbers:
            found[key] = numbers
    return {
        key: (np.array(sorted(points), np.float64), np.array([points[step] for step in sorted(points)]))
        for key, points in found.items()
    }


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_text(path: Path, problems: list[str]) -> str:
    """Returns a file's text. If it cannot be read, adds a problem and returns an empty text."""
    try:
        if not path.is_file():
            if path.is_symlink() or path.exists():
                problems.append(f"{name_in(path)} is not a regular file and was not read.")
            return ""
        if path.stat().st_size > _MOST_BYTES:
            problems.append(f"{name_in(path)} is larger than 1 GiB and was not read.")
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{name_in(path)} could not be read: {error.strerror}.")
        return ""


def name_in(path: Path) -> str:
    """Returns the name of a file for a message, of one in a checkpoint with that of the checkpoint."""
    return f"{path.parent.name}/{path.name}" if path.name == STATE_FILE else path.name


def _read_json(path: Path, problems: list[str]) -> Any:
    text = _read_text(path, problems)
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        problems.append(f"{name_in(path)} is damaged: it is not valid JSON.")
        return None


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Returns the objects in a JSON-lines file. One damaged line, such as one cut by a crash, is ignored silently."""
    lines = _read_text(path, problems).splitlines()
    try:  # all lines at once is twice as fast
        values = json.loads(f"[{','.join(lines)}]")
        if len(values) == len(lines) and all(isinstance(value, dict) for value in values):
            return list(values)
    except (ValueError, RecursionError):
        pass
    found = []
    num_damaged = 0
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            num_damaged += 1
    if num_damaged > 1:
        problems.append(f"{path.name}: {num_damaged} lines are no JSON objects and were left out.")
    return found


def _read_journal(path: Path, problems: list[str]) -> np.ndarray:
    try:
        content = path.read_bytes() if path.is_file() else b""
        if not path.is_file() and (path.is_symlink() or path.exists()):
            problems.append(f"{path.name} is not a regular file and was not read.")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
        content = b""
    whole = len(content) // FORMAT.itemsize * FORMAT.itemsize
    updates = np.frombuffer(content[:whole], dtype=FORMAT)
    is_sound = (updates["step"] > 0) & (updates["step"] < 2**53)
    if not is_sound.all():
        problems.append(f"{path.name} is damaged: {int((~is_sound).sum())} rows have invalid step numbers.")
    return updates[is_sound]


def _newest_state(checkpoints: Sequence[Path], problems: list[str]) -> dict[str, Any]:
    for path in reversed(checkpoints):
        state = _mapping(_read_json(path / STATE_FILE, problems))
        if state:
            return {**state, HISTORY: _saved_rows(path / STATE_FILE, state.get(HISTORY), problems)}
    return {}


def _saved_rows(path: Path, newest: object, problems: list[str]) -> list[Any]:
    """Returns the rows of a checkpoint's log; without those of damaged files, which are added to the problems."""
    rows = newest if isinstance(newest, list) else []
    try:
        return [*earlier_rows(path, rows), *rows]
    except (OSError, ValueError) as error:
        problems.append(f"Earlier rows of {name_in(path)} could not be read: {error}")
        return rows


def _logged_rows(folder: Path, state: Mapping[str, Any], problems: list[str]) -> Sequence[Mapping[str, Any]]:
    """Returns the rows of `log.jsonl`, or those of the newest checkpoint if they reach a later step."""
    logged = [row for row in _read_lines(folder / LOG_FILE, problems) if _is_step(row.get("step"))]
    saved = [row for row in state.get(HISTORY, ()) if isinstance(row, dict) and _is_step(row.get("step"))]
    return saved if _last_step(saved) > _last_step(logged) else logged


def log_to_keep(run: RunData) -> dict[str, Any]:
    """Returns the data that a page keeps for the next page: rows of evaluations and summaries, and the run's state.

    Without a reporter and a later checkpoint these are stored nowhere else. Training rows are left out, because the
    journal has every step.
    """
    kept = {"metric_for_best_model", "best_metric", "best_model_checkpoint", "max_steps", "global_step", "messages"}
    mark = mark_from(run.record.get(KEY))
    return {
        "run": _mapping(run.record.get(KEY)).get("id"),
        "start": None if mark is None else mark.starts[-1][0],
        "rows": [jsonable(row) for row in run.rows if "loss" not in row][-_MOST_KEPT:],
        "state": {name: jsonable(value) for name, value in run.state.items() if name in kept},
    }


def _kept_log(page: Path, record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Returns the rows and the state that an earlier page of the same run keeps; None if there is no such page.

    If the run was resumed since, these are the rows up to the step it went on from, and the messages.
    """
    text = _read_text(page, [])
    _, _, rest = text.partition(LOG_START)
    try:
        kept = json.loads(rest.partition("</script>")[0])
        is_same = isinstance(kept, dict) and kept["run"] == _mapping(record.get(KEY)).get("id")
        if not is_same:
            return None
        rows = [row for row in kept["rows"] if isinstance(row, dict) and _is_step(row.get("step"))]
        state = _mapping(kept["state"])
        resumed = _step_resumed_at(record, kept.get("start"))
        if resumed is not None:
            rows = [row for row in rows if row["step"] <= resumed]
            state = {name: value for name, value in state.items() if name in ("messages", "metric_for_best_model")}
        return rows, state
    except (ValueError, RecursionError, LookupError, TypeError):
        return None


def _step_resumed_at(record: Mapping[str, Any], start: object) -> int | None:
    """Returns the lowest step that a run was resumed at after one of its starts; None without a later start."""
    mark = mark_from(record.get(KEY))
    names = [name for name, _ in mark.starts] if mark is not None else []
    if mark is None or start not in names:
        return None
    return min((step for _, step in mark.starts[names.index(str(start)) + 1 :]), default=None)


def _with_earlier_messages(
    state: Mapping[str, Any], kept: tuple[object, Mapping[str, Any]] | None
) -> Mapping[str, Any]:
    """Returns the state with the messages that the run logged before it was resumed, as its last page keeps them."""
    earlier = kept[1].get("messages") if kept is not None else None
    if not isinstance(earlier, list):
        return state
    return {**state, "messages": [*earlier, *(state.get("messages") or ())][-_MOST_KEPT:]}


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int:
    return int(rows[-1]["step"]) if rows else -1


def _num_bytes(folder: Path) -> int:
    try:
        return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0
