"""The text of a training state, `trainer_state.json`; each row of its log is encoded once.

Encoded rows are kept in memory as compressed text, in chunks, at about 45 bytes per row. A chunk is encoded again if
its rows have changed.

In the checkpoints of a long run the file holds the newest rows only, so that a save writes a bounded number of bytes.
The rows before them lie beside it in blocks, files that later checkpoints link (`paceline.checkpoint.log_blocks`).
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.secrets import masked
from paceline.core.counts import is_count
from paceline.core.metrics import jsonable

CHUNK_ROWS = 256  # number of rows that are encoded, compressed and compared together
CHUNKS_PER_BLOCK = 16  # 4,096 rows, 0.7 MB
BLOCK_FOLDER = "log_history"  # of the blocks and their index, beside the file
INDEX_NAME = "index.json"
HISTORY = "log_history"
FOLDER = "best_model_checkpoint"  # not masked: a resumed run looks for this folder

Row = Mapping[str, Any]

_BLOCK_NAME = re.compile(r"rows-(\d{1,15})-(\d{1,15})\.json")
_MOST_BLOCK_BYTES = 1 << 30  # a block of 4,096 rows of five numbers has 0.7 MB


class Chunk:
    """The compressed text of log rows. It is encoded again if the rows have changed.

    Args:
        rows: consecutive rows of the log.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._digest = digest_of(rows)
        self._packed = zlib.compress(encode_rows(rows), level=1)

    def update(self, rows: Sequence[Row]) -> bytes | None:
        """Encodes the rows again if they have changed. Returns their digest; None if they have none.

        Args:
            rows: the rows that the chunk was made of; they may have been changed or replaced.
        """
        digest = digest_of(rows)
        if digest is None or digest != self._digest:
            copied = [dict(row) for row in rows]  # another thread may change them meanwhile
            self._digest = digest_of(copied)
            self._packed = zlib.compress(encode_rows(copied), level=1)
        return self._digest

    def text(self) -> bytes:
        """Returns the text of the rows at the last update."""
        return zlib.decompress(self._packed)


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a log in a file of their own.

    Attributes:
        name: path of the file, relative to the folder of the state's file.
        digest: digest of the rows; None if they have none.
        text: returns the content of the file, a JSON array.
    """

    name: str
    digest: bytes | None
    text: Callable[[], bytes]


@dataclass(frozen=True)
class StoredBlock:
    """The file of a block in a checkpoint.

    Attributes:
        path: its path once the checkpoint is published.
        digest: digest of its rows.
        sha256: hash of its content.
        identity: device, inode, bytes and modification time (ns) of the file.
    """

    path: Path
    digest: bytes | None
    sha256: str
    identity: tuple[int, int, int, int]


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

    def write(self, path: str | os.PathLike[str], *, is_whole: bool = True) -> None:
        """Writes the file atomically.

        Args:
            is_whole: write all rows; False leaves out those of `blocks`.

        Raises: OSError.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(self._head.encode())
            start = b"[\n"
            for part in self._parts(0 if is_whole else self._num_blocks * CHUNKS_PER_BLOCK):
                file.write(start)
                file.write(part)
                start = b",\n"
            if start == b",\n":
                file.write(b"\n  ]")
                file.write(self._tail.removeprefix("[]").encode())
            else:
                file.write(self._tail.encode())
        temporary.replace(path)

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks of rows that `write` can leave out: all full ones but the last."""
        for index in range(self._num_blocks):
            first = index * CHUNKS_PER_BLOCK
            digests = [self._update(at) for at in range(first, first + CHUNKS_PER_BLOCK)]
            name = f"rows-{first * CHUNK_ROWS + 1}-{(first + CHUNKS_PER_BLOCK) * CHUNK_ROWS}.json"
            digest = b"".join(one for one in digests if one is not None) if None not in digests else None
            yield Block(f"{BLOCK_FOLDER}/{name}", digest, partial(self._block_text, first))

    def index(self) -> bytes | None:
        """Returns the content of the index of all blocks, after `write`; None without blocks.

        It has the number of their rows, and a digest of the row after them, which shows that a state's file and the
        blocks beside it belong together.
        """
        if not self._num_blocks:
            return None
        first = self._num_blocks * CHUNKS_PER_BLOCK
        following = json.loads(b"[" + self._chunks[first].text() + b"]")[0]
        return json.dumps({"num_rows": first * CHUNK_ROWS, "next_row": row_digest(following)}).encode()

    @property
    def _num_blocks(self) -> int:
        return max(len(self._chunks) // CHUNKS_PER_BLOCK - 1, 0)

    def _block_text(self, first: int) -> bytes:
        texts = [chunk.text() for chunk in self._chunks[first : first + CHUNKS_PER_BLOCK]]
        return b"[\n" + b",\n".join(texts) + b"\n]\n"

    def _update(self, index: int) -> bytes | None:
        return self._chunks[index].update(self._old[index * CHUNK_ROWS : (index + 1) * CHUNK_ROWS])

    def _parts(self, first: int) -> Iterator[bytes]:
        for index in range(first, len(self._chunks)):
            self._update(index)
            yield self._chunks[index].text()
        if self._new:
            yield self._new


@dataclass
class LogText:
    """The text of a log, kept between saves.

    Attributes:
        stored: the blocks in the last checkpoint, by name.
    """

    stored: dict[str, StoredBlock] = field(default_factory=dict)
    _chunks: list[Chunk] = field(default_factory=list)

    def chunks_of(self, rows: Sequence[Row]) -> tuple[Chunk, ...]:
        """Returns the chunks of all rows but at most the last 255. New chunks are encoded here."""
        number = len(rows) // CHUNK_ROWS
        for index in range(len(self._chunks), number):
            self._chunks.append(Chunk(rows[index * CHUNK_ROWS : (index + 1) * CHUNK_ROWS]))
        return tuple(self._chunks[:number])


def earlier_rows(path: Path, rows: Sequence[Any]) -> list[Any]:
    """Returns the rows that precede those in a state's file.

    They are empty without an index of blocks beside the file, and if the index belongs to another file: one written
    with all rows into a copy of a checkpoint, for example.

    Args:
        path: the state's file.
        rows: the rows in the file.

    Raises:
        ValueError: the index or a block is missing or damaged; the message names it.
        OSError: a file cannot be read.
    """
    folder = path.parent / BLOCK_FOLDER
    if not rows or not (folder / INDEX_NAME).exists():
        return []
    index = _read_json(folder / INDEX_NAME)
    number = index.get("num_rows") if isinstance(index, dict) else None
    if not is_count(number):
        raise ValueError(f"{folder / INDEX_NAME} should hold a number of rows.")
    if index.get("next_row") != row_digest(rows[0]):
        return []
    matches = [_BLOCK_NAME.fullmatch(name) for name in os.listdir(folder)]
    lasts = {int(match[1]): int(match[2]) for match in matches if match is not None}
    found: list[Any] = []
    while len(found) < number:
        first = len(found) + 1
        last = lasts.get(first, 0)
        if last < first:
            raise ValueError(f"{folder} lacks the file of rows {first} and following, of {number}.")
        block = _read_json(folder / f"rows-{first}-{last}.json")
        if not isinstance(block, list) or not all(isinstance(row, dict) for row in block):
            raise ValueError(f"{folder / f'rows-{first}-{last}.json'} should hold a list of log rows.")
        if len(block) != last - first + 1 or last > number:
            raise ValueError(f"{folder / f'rows-{first}-{last}.json'} holds {len(block)} rows.")
        found += block
    return found


def row_digest(row: object) -> str:
    """Returns a digest of a row read from JSON."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> Any:
    if not path.is_file() or path.stat().st_size > _MOST_BLOCK_BYTES:
        raise ValueError(f"{path} is no file of log rows.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error


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
