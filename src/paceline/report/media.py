"""Reads the figures and tables of a run from its output folder."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from paceline.core.media import MEDIA_FOLDER, PNG_START, shown_cell

FILE = re.compile(r"(?P<name>.+)-(?P<step>\d{1,18})\.(?P<kind>png|json)")
MOST_BYTES = 2**20  # largest size of one file that is shown
MOST_BYTES_SHOWN = 2 * 2**20  # largest size of all figures together
MOST_FILES = 100_000


@dataclass(frozen=True)
class Shown:
    """The newest figure or table of a name.

    Attributes:
        name: its name.
        step: optimizer steps done.
        num_earlier: files of the same name and kind of earlier steps.
        picture: a figure as a data URI; empty for a table.
        columns: the columns of a table.
        rows: the rows of a table, as text.
        problem: the reason why it is not shown; empty if it is.
    """

    name: str
    step: int
    num_earlier: int
    picture: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    problem: str = ""


def read_media(folder: Path) -> Iterator[Shown]:
    """Yields the newest figure or table of each name, in the order of names."""
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    try:
        paths = [path for path, _ in zip((folder / MEDIA_FOLDER).iterdir(), range(MOST_FILES), strict=False)]
    except OSError:
        return
    for path in paths:
        match = FILE.fullmatch(path.name)
        if match is not None:
            found.setdefault((unquote(match["name"]), match["kind"]), []).append((int(match["step"]), path))
    num_bytes = 0
    for (name, kind), files in sorted(found.items()):
        step, path = max(files)
        earlier = len(files) - 1
        try:
            size = path.stat().st_size
            if not path.is_file() or size > MOST_BYTES or num_bytes + size > MOST_BYTES_SHOWN:
                yield Shown(name, step, earlier, problem=f"{path.name}: too large to be shown here")
                continue
            content = path.read_bytes()
        except OSError as error:
            yield Shown(name, step, earlier, problem=f"{path.name}: {error.strerror}")
            continue
        num_bytes += size
        yield picture_of(name, step, earlier, content) if kind == "png" else table_of(name, step, earlier, content)


def picture_of(name: str, step: int, num_earlier: int, content: bytes) -> Shown:
    """Returns a figure."""
    if not content.startswith(PNG_START):
        return Shown(name, step, num_earlier, problem="the file is no PNG")
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Shown(name, step, num_earlier, picture=uri)


def table_of(name: str, step: int, num_earlier: int, content: bytes) -> Shown:
    """Returns a table."""
    try:
        table = json.loads(content)
        columns = [str(column) for column in table["columns"]]
        rows = [[shown_cell(cell) for cell in row] for row in table["rows"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Shown(name, step, num_earlier, problem="the file is no table")
    return Shown(name, step, num_earlier, columns=columns, rows=rows)
