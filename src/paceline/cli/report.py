"""`paceline report`: writes the report of a run, or a comparison of several runs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli.display import say
from paceline.cli.errors import UsageError
from paceline.report.chart_forms import FORMS
from paceline.report.write import write_report


def run(words: Sequence[str]) -> int:
    """Writes a report and prints its path.

    Raises:
        UsageError: no folder is given, a folder holds no run, the form of charts or its library is missing, or the file
            cannot be written.
    """
    words = list(words)
    output = take_value(words, ("-o", "--output"), "the file to write")
    charts = take_charts(words)
    unknown = [word for word in words if word.startswith("-")]
    if unknown or not words:
        raise UsageError(f"report takes folders of runs{f', not {unknown[0]!r}' if unknown else ''}")
    try:
        path = write_report([Path(word) for word in words], None if output is None else Path(output), charts=charts)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    say(str(path))
    return 0


def take_charts(words: list[str]) -> str:
    """Removes `--charts FORM` from the words of a command; returns the form, "svg" without one.

    Raises: UsageError, if the form is missing.
    """
    return take_value(words, ("--charts",), f"the form of the charts: {' or '.join(FORMS)}") or "svg"


def take_value(words: list[str], names: Sequence[str], meaning: str) -> str | None:
    """Removes `--name value` or `--name=value` from the words of a command; returns the value, None without one.

    A value that begins with "-" is given with "=".

    Raises: UsageError, if the value is missing.
    """
    found = None
    for place in reversed(range(len(words))):
        name, equals, value = words[place].partition("=")
        if name not in names:
            continue
        if not equals:
            value = words[place + 1] if place + 1 < len(words) else ""
            if value.startswith("-"):
                raise UsageError(f"{name} takes {meaning}, not the option {value}")
        if not value:
            raise UsageError(f"{name} takes {meaning}")
        found = found or value
        del words[place : place + (1 if equals else 2)]
    return found
