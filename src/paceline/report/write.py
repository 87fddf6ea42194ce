"""Writes the report of one or several runs to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.lineage import REPORT_FILE
from paceline.core.retry_writer import replace_whole
from paceline.report.chart_forms import find_form
from paceline.report.page import make_page
from paceline.report.run_data import read_run

COMPARISON_FILE = "comparison.html"


def write_report(
    folders: Sequence[Path],
    output: Path | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    state: Mapping[str, Any] | None = None,
    charts: str = "svg",
) -> Path:
    """Writes the report of a run, or a comparison of several runs.

    Args:
        folders: the output folders of the runs.
        output: the file to write; by default `report.html` in the folder of one run, and `comparison.html` in the
            first folder of several runs.
        rows: the logged rows of a run in this process, if `folders` holds only that run's folder.
        state: the trainer state of that run, without its rows.
        charts: the form of the charts, "svg" or "bokeh".

    Returns: the path of the file.
    Raises:
        OSError: a folder cannot be read, or the file cannot be written.
        ValueError: there is no such form of charts.
        ImportError: the library of the charts is missing.
    """
    form = find_form(charts)
    page = make_page([read_run(folder, rows, state) for folder in folders], form=form)
    path = folders[0] / (REPORT_FILE if len(folders) == 1 else COMPARISON_FILE) if output is None else output
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, page)
    return path
