"""Lists the events and the warnings of a run, from its record, its journal and its last page."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.journal import CHANGES_FILE, read_changes
from paceline.report.run_data import RunData

_MOST_SKIPPED = 500


def events_of(run: RunData) -> list[list[Any]]:
    """Returns (time, step, event) for starts, resumes, changed settings, skipped windows, and the end."""
    rows: list[list[Any]] = []
    history = run.record.get("history")
    records = [each for each in history if isinstance(each, dict)] if isinstance(history, list) else []
    for record in records:
        rows += [*_start(record), *_end(record)] if record else []
    rows += _start(run.record) if run.record else []
    try:
        changes = read_changes(run.folder / CHANGES_FILE)
    except OSError:
        changes = []
    rows += [[when_of(change.get("time")), change["step"], _words(change, {"time", "step"})] for change in changes]
    rows += [
        ["", each.get("step", ""), f"skipped after values that were not finite: {_words(each, {'step'})}"]
        for each in run.skipped[:_MOST_SKIPPED]
    ]
    return [*rows, *_end(run.record)]


def warnings_of(run: RunData) -> list[list[Any]]:
    """Returns (time, step, text) for the error of a failed run, losses that are not finite, notes and log messages."""
    rows: list[list[Any]] = []
    end = run.record.get("end")
    if isinstance(end, dict) and isinstance(end.get("error"), str):
        rows.append([when_of(end.get("time")), end.get("step", ""), end["error"]])
    losses = run.updates["loss"][run.updates["is_counted"] != 0]
    is_bad = ~np.isfinite(losses)
    if is_bad.any():
        first = run.updates["step"][run.updates["is_counted"] != 0][is_bad][0]
        text = f"the loss of {int(is_bad.sum()):,} of {len(losses):,} steps is not finite"
        rows.append(["", int(first), text])
    plan = run.record.get("plan")
    notes = plan.get("notes") if isinstance(plan, dict) else None
    rows += [["", "", str(note)] for note in notes] if isinstance(notes, list) else []
    messages = run.state.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and isinstance(message.get("text"), str):
            number = message.get("number")
            times = f" ({number} times)" if isinstance(number, int) and number > 1 else ""
            rows.append([when_of(message.get("time")), message.get("step", ""), message["text"] + times])
    return rows


def data_of(run: RunData) -> list[list[Any]]:
    """Returns (name, kind, number of samples) for each dataset of a run."""
    found = run.record.get("data")
    if not isinstance(found, dict):
        return []
    return [
        [name, str(each.get("kind", "")), "unknown" if each.get("length") is None else each["length"]]
        for name, each in found.items()
        if isinstance(each, dict)
    ]


def when_of(value: object) -> str:
    """Returns a time without its fraction, in UTC; a text stays as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return datetime.datetime.fromtimestamp(int(value), datetime.UTC).isoformat()
        except (ValueError, OverflowError, OSError):
            return ""
    return value if isinstance(value, str) else ""


def _end(record: Mapping[str, Any]) -> list[list[Any]]:
    end = record.get("end")
    if not isinstance(end, dict) or not end.get("state"):
        return []
    return [[when_of(end.get("time")), end.get("step", ""), str(end["state"])]]


def _start(record: Mapping[str, Any]) -> list[list[Any]]:
    extra = record.get("extra")
    step = extra.get("resumed_at_step") if isinstance(extra, dict) else None
    return [[when_of(record.get("started")), step or 0, "resumed" if step else "started"]]


def _words(row: Mapping[str, Any], left_out: set[str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in left_out)
