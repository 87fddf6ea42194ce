"""`paceline report`: writes the report of a run, or a comparison of several runs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli.display import say
from paceline.cli.errors import UsageError
from paceline.report.write import write_report


def run(words: Sequence[str]) -> int:
    """Writes a report and prints its path.

    Raises:
        UsageError: no folder is given, a folder holds no run, or the file cannot be written.
    """
    words = list(words)
    output: Path | None = None
    for name in ("-o", "--output"):
        if name in words:
            place = words.index(name)
            if place + 1 >= len(words):
                raise UsageError(f"{name} takes the file to write")
            output = Path(words[place + 1])
            del words[place : place + 2]
    unknown = [word for word in words if word.startswith("-")]
    if unknown or not words:
        raise UsageError(f"report takes folders of runs{f', not {unknown[0]!r}' if unknown else ''}")
    try:
        path = write_report([Path(word) for word in words], output)
    except OSError as error:
        raise UsageError(str(error)) from error
    say(str(path))
    return 0
