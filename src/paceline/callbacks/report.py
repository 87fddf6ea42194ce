"""Writes the report of a run when it ends."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import os
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.args.places import output_folder
from paceline.args.secrets import mask_text
from paceline.args.training import TrainingArguments
from paceline.callbacks.memory import accelerator_bytes, process_bytes
from paceline.core.events import TrainerCallback
from paceline.core.ledger import PREFIX, RESOURCE_PREFIX
from paceline.core.lineage import REPORT_FILE
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

MOST_MEASUREMENTS = 256  # rows that are kept for the report, about 100 bytes each; an even number
MOST_MESSAGES = 200
_MAX_CHARACTERS = 500  # length of a message
GB = 2**30
MEMORY = {
    f"{RESOURCE_PREFIX}{name}_memory_gb": read
    for name, read in (("process", process_bytes), ("accelerator", accelerator_bytes))
}


class Messages(logging.Handler):
    """Keeps the warnings of a run: of equal ones the first, with its number.

    Args:
        state: the state of the run, of which the step is read.
    """

    emits_nothing = True  # for `args.secrets.has_handlers`

    def __init__(self, state: TrainerState) -> None:
        super().__init__(logging.WARNING)
        self._state, self._process = state, os.getpid()
        self._found: dict[str, dict[str, Any]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._process:
            return
        try:
            text = mask_text(record.getMessage())[:_MAX_CHARACTERS]
        except Exception:  # a message whose arguments do not fit it: other handlers report it
            return
        if text in self._found:
            self._found[text]["number"] += 1
        elif len(self._found) < MOST_MESSAGES:
            step = self._state.global_step
            self._found[text] = {"time": record.created, "step": step, "text": text, "number": 1}

    def take(self) -> list[dict[str, Any]]:
        """Returns the messages."""
        return list(self._found.values())


class Measurements:
    """Measurements of a run in a bounded number of rows, each of which covers the same number of log rows.

    The seconds of these log rows are added up; of other entries the latest counts.
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}  # NaN where a row has no such entry
        self._size = 0
        self._stride = 1  # log rows in a full row
        self._filled = 1  # log rows in the last row

    def add(self, entries: Mapping[str, float]) -> None:
        """Adds the entries of a log row."""
        if self._filled == self._stride:
            for column in self._columns.values():
                column.append(math.nan)
            self._size, self._filled = self._size + 1, 0
        self._filled += 1
        for key, value in entries.items():
            if key not in self._columns:
                self._columns[key] = array("d", [math.nan]) * self._size
            self._columns[key][-1] = joined(key, self._columns[key][-1], value)
        if self._size == MOST_MEASUREMENTS and self._filled == self._stride:
            for key, column in self._columns.items():
                pairs = zip(column[::2], column[1::2], strict=True)
                self._columns[key] = array("d", [joined(key, *pair) for pair in pairs])
            self._size, self._stride = self._size // 2, 2 * self._stride
            self._filled = self._stride

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows."""
        found = []
        for place in range(self._size):
            row: dict[str, Any] = {key: column[place] for key, column in self._columns.items()}
            row = {key: value for key, value in row.items() if not math.isnan(value)}
            found.append({**row, "step": int(row["step"])})
        return found


def joined(key: str, earlier: float, later: float) -> float:
    """Returns an entry of two log rows together; NaN is none."""
    if math.isnan(earlier) or math.isnan(later):
        return earlier if math.isnan(later) else later
    return earlier + later if key.startswith(PREFIX) else later


class ReportCallback(TrainerCallback):
    """Writes `report.html` to the output folder at the end of a training: curves, evaluations, configuration.

    A training that an error ends leaves a report too. This is a default callback, which one in `callbacks` replaces;
    `trainer.remove_callback(ReportCallback)` disables it. `paceline report RUN` writes the report at any time.

    Args:
        charts: the form of the charts: "svg", or "bokeh" with the extra `report`.

    Raises:
        ValueError: there is no such form of charts.
        ImportError: the library of the charts is missing.
    """

    may_fail = True
    reads_checkpoint = False

    def __init__(self, charts: str = "svg") -> None:
        if charts != "svg":  # imported late, as `_write_page` does
            importlib.import_module("paceline.report.chart_forms").find_form(charts)
        self.charts = charts
        self._messages: Messages | None = None
        self._measured = Measurements()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()
        self._measured = Measurements()
        if state.is_world_process_zero:
            self._messages = Messages(state)
            logging.getLogger("paceline").addHandler(self._messages)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self._messages is None or not logs:
            return
        row = {
            key: float(value)
            for key, value in logs.items()
            if key.startswith((PREFIX, RESOURCE_PREFIX)) and isinstance(value, int | float)
        }
        if not any(key.startswith(PREFIX) for key in row):
            return
        for name, read in MEMORY.items():
            count = read()
            if count is not None:
                row.setdefault(name, round(count / GB, 4))
        self._measured.add({"step": state.global_step, "time": round(time.time(), 3), **row})

    def on_media(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the report anew for a figure or table that is recorded after the training."""
        folder = output_folder(args)
        if self._messages is None and state.is_world_process_zero and (folder / REPORT_FILE).exists():
            _write_page(folder, charts=self.charts)

    def on_run_closed(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the report, once the record of the run states how it ended."""
        if self._messages is not None:
            self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        messages = self._stop()
        values = {field.name: getattr(state, field.name, None) for field in dataclasses.fields(state)}
        values["metric_for_best_model"] = args.metric_for_best_model
        values["messages"] = messages
        rows = [*self._measured.rows(), *(values.pop("log_history") or ())]
        _write_page(output_folder(args), rows=rows, state=values, charts=self.charts)

    def _stop(self) -> list[dict[str, Any]]:
        """Ends the collection of messages, and returns them."""
        messages, self._messages = self._messages, None
        if messages is None:
            return []
        logging.getLogger("paceline").removeHandler(messages)
        return messages.take()


def _write_page(folder: Path, **content: Any) -> None:
    """Writes the page of a run; a full or read-only disk is a warning."""
    # imported late: the page is not needed before the end of a run
    write = importlib.import_module("paceline.report.write").write_report
    try:
        write([folder], **content)
    except OSError as error:
        logger.warning("The report could not be written (%s); `paceline report %s` writes it later.", error, folder)
