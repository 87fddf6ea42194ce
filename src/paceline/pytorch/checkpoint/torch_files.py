"""A reader of torch.save files, in the zip and the legacy format, that does not use torch's loader.

Lengths and offsets in a file are checked against the file's size before any memory is allocated or read.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.pickles import Buildable, DataUnpickler, Name, Refused
from paceline.pytorch.checkpoint.torch_values import Storage, find_global, set_state

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # local header of a zip record: signature, then lengths of name and extra
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_ALIGNMENT = 16  # alignment in bytes; content at other offsets is copied


def read_torch_file(source: Any, *, is_mapped: bool = False, extra: Mapping[str, Any] | None = None) -> Any:
    """Returns the contents of a torch.save file, on the CPU.

    Args:
        source: the path of a regular file, or a seekable binary stream.
        is_mapped: memory-map the values, so that they are read when used; zip format only.
        extra: additional globals that the file may name, path -> constructor.

    Raises:
        OSError: the file cannot be opened or read.
        Refused: the file holds values other than tensors, numbers and plain values, or wrong lengths.
        Exception: nearly any type, for damaged bytes.
    """
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    with open(path, "rb") if path is not None else nullcontext(source) as file:
        kind = _ZipFile if file.read(2) == b"PK" else _LegacyFile
        file.seek(0)
        return kind(file, path if is_mapped else None, extra or {}).read()


def _slice(whole: Any, start: int, end: int) -> torch.UntypedStorage:
    """Returns a part of a storage that shares its memory."""
    part: torch.UntypedStorage = whole[start:end]
    return part


class FilePart(io.RawIOBase):
    """A range of a file, as a file object.

    Args:
        file: the whole file.
        start, length: the range, in bytes.

    Raises: Refused, if the file is shorter.
    """

    def __init__(self, file: Any, start: int, length: int) -> None:
        if start + length > file.seek(0, os.SEEK_END):
            raise Refused("a part reaches beyond the end of its file")
        self._file = file
        self._start = start
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = view[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(wanted)
        self._place += count
        return count


class _File:
    def __init__(self, file: Any, mapped: Path | None, extra: Mapping[str, Any]) -> None:
        self.file = file
        self.mapped = mapped
        self.extra = extra
        file.seek(0, os.SEEK_END)
        self.size = file.tell()
        self.left = self.size  # bytes of the file that storages have not claimed yet
        file.seek(0)

    def unpickle(self, file: object) -> Any:
        return DataUnpickler(file, self.find, self.find_storage, set_state).load()

    def find(self, path: str) -> Any:
        """Returns the safe replacement of a global."""
        return find_global(path, self.extra)

    def find_storage(self, pid: Any) -> Storage:
        """Returns the storage of a persistent id: `("storage", type, key, place, number of elements, ...)`."""
        is_known = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"
        if not is_known or not isinstance(pid[1], torch.dtype) or not isinstance(pid[2], str):
            raise Refused("it refers to something that is no storage")
        if type(pid[4]) is not int or not 0 <= pid[4] < 1 << 60:
            raise Refused("a storage has no length")
        return Storage(self.content(pid[2], pid[4] * pid[1].itemsize, pid), pid[1])

    def content(self, key: str, num_bytes: int, pid: tuple[Any, ...]) -> torch.UntypedStorage:
        raise NotImplementedError

    def read_at(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Returns bytes of the file. Raises Refused if it is shorter."""
        if start < 0 or start + num_bytes > self.size:
            raise Refused(f"a storage of {num_bytes} bytes reaches beyond the end of the file")
        octets = torch.empty(num_bytes, dtype=torch.uint8)
        view, done = octets.numpy().data, 0
        self.file.seek(start)
        while done < num_bytes:  # one call reads at most 2 GiB
            count = self.file.readinto(view[done:])
            if not count:
                raise Refused("the file was cut short while it was read")
            done += count
        return octets.untyped_storage()


class _ZipFile(_File):
    """Reads the zip format: uncompressed records `NAME/data.pkl`, and `NAME/data/KEY` for each storage."""

    def __init__(self, file: Any, mapped: Path | None, extra: Mapping[str, Any]) -> None:
        super().__init__(file, mapped, extra)
        self.records: dict[str, zipfile.ZipInfo] = {}
        for record in zipfile.ZipFile(file).infolist():
            if record.filename in self.records:
                raise Refused(f"it has two records {record.filename!r}")
            self.records[record.filename] = record
        found = [name for name in self.records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise Refused("it has no data.pkl, or several")
        self.folder = found[0].removesuffix("data.pkl")
        self.contents: dict[str, torch.UntypedStorage] = {}
        self.whole: Any = None

    def read(self) -> Any:
        """Returns the value of the file."""
        order = self.records.get(f"{self.folder}byteorder")
        if order is not None and self.record(order) != b"little":
            raise Refused("its numbers are stored most significant byte first, which is not read")
        return self.unpickle(io.BytesIO(self.record(self.records[f"{self.folder}data.pkl"])))

    def record(self, record: zipfile.ZipInfo) -> bytes:
        """Returns the bytes of a small record."""
        start, length = self.place_of(record)
        self.file.seek(start)
        content: bytes = self.file.read(length)
        return content

    def place_of(self, record: zipfile.ZipInfo) -> tuple[int, int]:
        """Returns (first byte, number of bytes) of a record. Raises Refused."""
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise Refused(f"its record {record.filename!r} is compressed")
        self.file.seek(record.header_offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(self.file.read(_LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise Refused(f"its record {record.filename!r} is not where it should be")
        start = record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if start + record.file_size > self.size:
            raise Refused(f"its record {record.filename!r} reaches beyond the end of the file")
        return start, record.file_size

    def content(self, key: str, num_bytes: int, pid: tuple[Any, ...]) -> torch.UntypedStorage:
        """Returns one storage; each is read once."""
        record = self.records.get(f"{self.folder}data/{key}")
        if record is None or record.file_size < num_bytes:
            held = "none" if record is None else str(record.file_size)
            raise Refused(f"a storage says that it has {num_bytes} bytes, and the file has {held} of it")
        if key not in self.contents:
            self.left -= record.file_size
            if self.left < 0:
                raise Refused("its records overlap")
            self.contents[key] = self.bytes_of(*self.place_of(record))
        return self.contents[key]

    def bytes_of(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        if self.mapped is None or start % _ALIGNMENT or not num_bytes:
            return self.read_at(start, num_bytes)
        if self.whole is None:
            self.whole = torch.UntypedStorage.from_file(os.fspath(self.mapped), False, self.size)
        return _slice(self.whole, start, start + num_bytes)


class _Ignored(Buildable):
    def __init__(self, *values: Any) -> None:
        pass

    def built(self, state: object) -> _Ignored:
        return self


class _LegacyFile(_File):
    """Reads the legacy format: pickles of a magic number, a version, the system, the value and the storage keys.

    The storages follow, each after its length. The value is read twice. The first pass only records its storages, so
    that they are filled when the second pass checks the tensors over them.
    """

    def read(self) -> Any:
        """Returns the value of the file."""
        self.named: dict[str, tuple[torch.UntypedStorage, int]] = {}  # key -> (content, bytes of an element)
        if self.unpickle(self.file) != _LEGACY_MAGIC or self.unpickle(self.file) != _LEGACY_PROTOCOL:
            raise Refused("it is no file of torch.save")
        self.unpickle(self.file)
        start = self.file.tell()
        DataUnpickler(self.file, self.find_inert, self.find_storage).load()
        keys = self.unpickle(self.file)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or {*keys} != {*self.named}:
            raise Refused("it does not list its storages")
        for key in keys:
            content, width = self.named[key]
            (length,) = struct.unpack("<q", self.file.read(8))
            if length * width != content.nbytes():
                raise Refused("a storage is not as long as it should be")
            place = self.file.tell()
            content.copy_(self.read_at(place, content.nbytes()))
            self.file.seek(place + content.nbytes())
        self.file.seek(start)
        return self.unpickle(self.file)

    def find_inert(self, path: str) -> Any:
        """Returns the replacement of a global like `find`, but calls only build plain values, and no tensors."""
        found = self.find(path)
        is_made = path.partition(".")[0] in ("_codecs", "builtins", "collections")
        return Name(path, _Ignored) if isinstance(found, Name) and not is_made else found

    def content(self, key: str, num_bytes: int, pid: tuple[Any, ...]) -> torch.UntypedStorage:
        """Returns one storage, or a part of it."""
        if key not in self.named:
            self.left -= num_bytes
            if self.left < 0:
                raise Refused(f"a storage of {num_bytes} bytes is larger than what is left of the file")
            content = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
            self.named[key] = content, pid[1].itemsize
        whole = self.named[key][0]
        view = pid[5] if len(pid) > 5 else None
        if view is None:
            return whole
        if not isinstance(view, tuple) or len(view) != 3 or not all(type(each) is int for each in view[1:]):
            raise Refused("a storage is a part of another one, and does not say which")
        start, end = view[1] * pid[1].itemsize, (view[1] + view[2]) * pid[1].itemsize
        if not 0 <= start <= end <= whole.nbytes():
            raise Refused("a storage is a part of another one, and reaches beyond it")
        return _slice(whole, start, end)
