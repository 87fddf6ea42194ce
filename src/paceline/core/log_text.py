"""The text of a training state: `trainer_state.json`, with each row of its log encoded once.

The file holds every row logged so far, in JSON, because every reader of such a file expects them there; no file can
share them with another one. So a save writes them all, but it formats only the new ones: rows are kept as text in
compressed chunks, some 45 bytes a row, beside the rows themselves. A chunk whose rows have changed since is encoded
again.
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

CHUNK_ROWS = 256  # rows that are kept, compared and encoded together
HISTORY = "log_history"
FOLDER = "best_model_checkpoint"  # not masked: a resumed run looks for this folder

Row = Mapping[str, Any]


class Chunk:
    """Rows as text, compressed; encoded again if they have changed since.

    Args:
        rows: of the log.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._digest = digest_of(rows)
        self._packed = zlib.compress(encode_rows(rows), level=1)

    def text(self, rows: Sequence[Row]) -> bytes:
        """Returns the text of the rows as they are now.

        Args:
            rows: those that the chunk was made of, or others in their places.
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
    """A training state of one moment, ready to be written from any thread.

    Args:
        values: all fields but the log, in plain values.
        rows: the log; changes of its last rows from here on do not count.
        chunks: of its first rows.
    """

    def __init__(self, values: Mapping[str, Any], rows: Sequence[Row], chunks: Sequence[Chunk]) -> None:
        shown = masked(values)
        if FOLDER in values:
            shown[FOLDER] = values[FOLDER]
        text = json.dumps({**shown, HISTORY: []}, indent=2, sort_keys=True) + "\n"
        # deeper keys are indented further, and texts hold no line breaks: this is the key of the state itself
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
    """The chunks of a log from one save to the next."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def chunks_of(self, rows: Sequence[Row]) -> tuple[Chunk, ...]:
        """Returns the chunks of a log's first rows, all but at most the last 255; new ones are encoded here."""
        number = len(rows) // CHUNK_ROWS
        for index in range(len(self._chunks), number):
            self._chunks.append(Chunk(rows[index * CHUNK_ROWS : (index + 1) * CHUNK_ROWS]))
        return tuple(self._chunks[:number])


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Returns rows as they stand between the brackets of the log: JSON, indented, secrets masked; empty without any."""
    if not rows:
        return b""
    text = json.dumps(masked(jsonable(rows), HISTORY), indent=2, sort_keys=True)
    inner = text.removeprefix("[\n").removesuffix("\n]")
    return ("  " + inner.replace("\n", "\n  ")).encode()


def digest_of(rows: Sequence[Any]) -> bytes | None:
    """Returns a digest of the rows, None if they hold values that are not plain. It runs in one piece under the GIL."""
    try:
        return hashlib.blake2b(marshal.dumps(list(rows), 2), digest_size=16).digest()
    except ValueError:
        return None
