"""The text of a training state, `trainer_state.json`; each row of its log is encoded once.

Every reader expects the file to hold all rows logged so far, in JSON. So each save writes them all, but it encodes only
the new ones: older rows are also kept in memory as compressed text, in chunks, at about 45 bytes per row. A chunk is
encoded again if its rows have changed.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.args.secrets import masked
from paceline.core.metrics import jsonable

CHUNK_ROWS = 256  # number of rows that are encoded, compressed and compared together
HISTORY = "log_history"
FOLDER = "best_model_checkpoint"  # not masked: a resumed run looks for this folder

Row = Mapping[str, Any]


class Chunk:
    """The compressed text of log rows. It is encoded again if the rows have changed.

    Args:
        rows: consecutive rows of the log.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._digest = digest_of(rows)
        self._packed = zlib.compress(encode_rows(rows), level=1)

    def text(self, rows: Sequence[Row]) -> bytes:
        """Returns the text of the rows as they are now.

        Args:
            rows: the rows that the chunk was made of; they may have been changed or replaced.
        """
        digest = digest_of(rows)
        if digest is not None and digest == self._digest:
            return zlib.decompress(self._packed)
        copied = [dict(row) for row in rows]  # another thread may change them meanwhile
        self._digest = digest_of(copied)
        text = encode_rows(copied)
        self._packed = zlib.compress(text, level=1)
        return text


class StateText:
    """A snapshot of a training state that any thread can write.

    Args:
        values: all fields except the log, as plain values.
        rows: the log. Rows after the chunks are encoded now, so later changes to them have no effect.
        chunks: the encoded chunks of the log's first rows.
    """

    def __init__(self, values: Mapping[str, Any], rows: Sequence[Row], chunks: Sequence[Chunk]) -> None:
        shown = masked(values)
        if FOLDER in values:
            shown[FOLDER] = values[FOLDER]
        text = json.dumps({**shown, HISTORY: []}, indent=2, sort_keys=True) + "\n"
        # only a top-level key has this indentation, and JSON strings hold no line breaks
        self._head, name, self._tail = text.partition(f'\n  "{HISTORY}": ')
        self._head += name
        self._chunks = chunks
        self._old = rows[: len(chunks) * CHUNK_ROWS]
        self._new = encode_rows(rows[len(self._old) :])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically. Raises: OSError."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(self._head.encode())
            start = b"[\n"
            for part in self._parts():
                file.write(start)
                file.write(part)
                start = b",\n"
            if start == b",\n":
                file.write(b"\n  ]")
                file.write(self._tail.removeprefix("[]").encode())
            else:
                file.write(self._tail.encode())
        temporary.replace(path)

    def _parts(self) -> Iterator[bytes]:
        for index, chunk in enumerate(self._chunks):
            yield chunk.text(self._old[index * CHUNK_ROWS : (index + 1) * CHUNK_ROWS])
        if self._new:
            yield self._new


class LogText:
    """Keeps the encoded chunks of a log between saves."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def chunks_of(self, rows: Sequence[Row]) -> tuple[Chunk, ...]:
        """Returns the chunks of all rows but at most the last 255. New chunks are encoded here."""
        number = len(rows) // CHUNK_ROWS
        for index in range(len(self._chunks), number):
            self._chunks.append(Chunk(rows[index * CHUNK_ROWS : (index + 1) * CHUNK_ROWS]))
        return tuple(self._chunks[:number])


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Returns the rows as indented JSON without the enclosing brackets, secrets masked; empty without rows."""
    if not rows:
        return b""
    text = json.dumps(masked(jsonable(rows), HISTORY), indent=2, sort_keys=True)
    inner = text.removeprefix("[\n").removesuffix("\n]")
    return ("  " + inner.replace("\n", "\n  ")).encode()


def digest_of(rows: Sequence[Any]) -> bytes | None:
    """Returns a digest of the rows; None if they hold values that marshal cannot encode.

    Marshal holds the GIL throughout, so other threads cannot change the rows meanwhile.
    """
    try:
        return hashlib.blake2b(marshal.dumps(list(rows), 2), digest_size=16).digest()
    except ValueError:
        return None
