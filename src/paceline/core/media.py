"""Figures and tables of a run: files beside its checkpoints, which the report shows and the trackers receive."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from paceline.args.secrets import masked
from paceline.core.metrics import jsonable
from paceline.core.optional import require

logger = logging.getLogger(__name__)

MEDIA_FOLDER = "media"  # in the output folder
PNG_START = b"\x89PNG\r\n\x1a\n"
MAX_CHARACTERS = 100  # length of a name


@dataclass(frozen=True)
class Media:
    """A figure or a table at a step.

    Attributes:
        name: such as "eval/confusion".
        step: optimizer steps done.
        path: its file, a PNG or a JSON.
        columns: the names of a table's columns; empty for a figure.
        rows: the rows of a table, of plain values.
    """

    name: str
    step: int
    path: Path
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()

    @property
    def is_figure(self) -> bool:
        """True for a figure."""
        return self.path.suffix == ".png"

    def as_markdown(self) -> str:
        """Returns a table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(in_markdown(cell) for cell in line) + " |" for line in lines)


def make_figure(folder: Path, name: str, step: int, figure: Any) -> Media:
    """Writes a figure to the media of an output folder.

    Args:
        folder: the output folder.
        name: the figure's name; a second figure of this name and step replaces the first.
        step: optimizer steps done.
        figure: a figure of matplotlib, an image of Pillow, an array or tensor, or the path of a PNG file. Arrays are
            `(height, width)` or `(height, width, 3 or 4)`; floats are 0 to 1, integers 0 to 255.

    Raises:
        ValueError: the name, or an array's shape or range, is invalid.
        TypeError: the figure is of another type.
    """
    media = Media(name, step, path_of(folder, name, step, ".png"))
    write(media.path, png_of(figure))
    return media


def make_table(folder: Path, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Media:
    """Writes a table to the media of an output folder. Cells become plain values; tokens and passwords are masked.

    Raises:
        ValueError: the name is invalid, or a row has not one cell for each column.
    """
    path = path_of(folder, name, step, ".json")
    heads = [str(column) for column in columns]
    for index, row in enumerate(rows):
        if len(row) != len(heads):
            raise ValueError(f"log_table: row {index} of {name!r} has {len(row)} cells, for {len(heads)} columns.")
    cells = masked(jsonable([[encodable(cell) for cell in row] for row in rows]))
    write(path, json.dumps({"columns": heads, "rows": cells}, ensure_ascii=False).encode(errors="backslashreplace"))
    return Media(name, step, path, heads, cells)


def encodable(cell: object) -> object:
    """Returns a cell; lone surrogates in a text, which cannot be encoded, become "?"."""
    return cell.encode("utf-8", "replace").decode("utf-8") if isinstance(cell, str) else cell


def path_of(folder: Path, name: str, step: int, suffix: str) -> Path:
    """Returns the file of a figure or table.

    Raises:
        ValueError: the name is empty or too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CHARACTERS:
        raise ValueError(f"name={name!r} is invalid: expected a text of 1 to {MAX_CHARACTERS} characters.")
    return folder / MEDIA_FOLDER / f"{quote(name, safe=' ')}-{step}{suffix}"


def write(path: Path, content: bytes) -> None:
    """Writes a file; a failure, such as a full disk, is logged as a warning and does not end the run."""
    partial = path.with_suffix(f"{path.suffix}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # the name is too long, or the disk is read-only
            partial.unlink(missing_ok=True)
        logger.warning("%s could not be written, and the run goes on: %s", path, error)


def png_of(figure: Any) -> bytes:
    """Returns a figure as PNG; see `make_figure`."""
    if isinstance(figure, str | Path):
        content = Path(figure).read_bytes()
        if not content.startswith(PNG_START):
            raise ValueError(f"log_figure: {figure} is no PNG file.")
        return content
    target = BytesIO()
    if hasattr(figure, "savefig"):
        figure.savefig(target, format="png", bbox_inches="tight")
        return target.getvalue()
    if hasattr(figure, "save") and hasattr(figure, "getbands"):
        figure.save(target, format="PNG")
        return target.getvalue()
    if not hasattr(figure, "__array__"):
        raise TypeError(
            f"log_figure: {type(figure).__name__} is none of: a figure of matplotlib, an image of Pillow, an array, a "
            "tensor, the path of a PNG file."
        )
    if hasattr(figure, "detach"):
        figure = figure.detach().cpu()
    require("PIL.Image", "plots").fromarray(pixels_of(np.asarray(figure))).save(target, format="PNG")
    return target.getvalue()


def pixels_of(array: np.ndarray) -> np.ndarray:
    """Returns an array as 8-bit pixels; see `make_figure`."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise ValueError(
            f"log_figure: an array of shape {array.shape} is no picture: (height, width) or (height, width, 3 or 4)."
        )
    highest = 1 if array.dtype.kind in "fb" else 255
    if array.dtype.kind not in "fbiu" or not (np.min(array) >= 0 and np.max(array) <= highest):
        raise ValueError("log_figure: values outside of 0 to 1 (floats) or 0 to 255 (integers), or not finite.")
    return np.round(np.asarray(array, dtype=np.float64) * (255 / highest)).astype(np.uint8)


def shown_cell(cell: object) -> str:
    """Returns a cell of a table as text; None, a cell without a value, is empty."""
    return "" if cell is None else str(cell)


def in_markdown(cell: object) -> str:
    """Returns a cell of a Markdown table."""
    return shown_cell(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
