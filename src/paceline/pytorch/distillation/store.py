"""The files of a cache of teacher logits: parts of consecutive samples, each written whole, checked and mapped.

A part is a safetensors file. Its arrays hold the values of all items of its samples one after another; `offsets` says
which items are those of a sample, `rows` identifies the sample that the teacher read, and `sums` is a checksum of
its values, which is compared whenever they are read. The metadata name what the values were made from.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.pytorch.checkpoint.tensors import CheckpointError, replacing

logger = logging.getLogger(__name__)

UNTYPED: Any = safe_open
MOST_PARTS = 256
LEAST_SAMPLES = 64  # samples of a part, at least
OFFSETS, ROWS, SUMS = "offsets", "rows", "sums"
ORIGIN = "origin"  # of the metadata: key, part and number of classes
HELD = (("logits",), ("indices", "log_probabilities", "rest"))  # all logits, or the likeliest classes


@dataclass(frozen=True)
class Sample:
    """The values of the teacher for one sample.

    Attributes:
        row: identifies what the teacher read, a 64-bit integer.
        values: by name, `(items, ...)`.
    """

    row: int
    values: Mapping[str, Tensor]


class LogitStore:
    """The parts in one folder.

    Args:
        folder: the folder of the files; made when the first one is written.
        key: identifies what the values are made from; parts with another key are not used.
        num_samples: number of samples of the dataset.

    Attributes:
        num_parts: the number of parts; depends on `num_samples` only.
    """

    def __init__(self, folder: Path, key: str, num_samples: int) -> None:
        self.folder, self.key, self.num_samples = folder, key, num_samples
        self._length = max(LEAST_SAMPLES, -(-num_samples // MOST_PARTS))
        self.num_parts = -(-num_samples // self._length)
        self._opened: dict[int, OpenPart] = {}

    def path(self, part: int) -> Path:
        """Returns the file of a part."""
        return self.folder / f"part-{part:03d}.safetensors"

    def samples_of(self, part: int) -> range:
        """Returns the samples of a part."""
        first = part * self._length
        return range(first, min(first + self._length, self.num_samples))

    def find_missing(self) -> list[int]:
        """Returns the parts that have to be made: those without a file, and those whose file is not usable."""
        missing = []
        for part in range(self.num_parts):
            try:
                self._open(part)
            except FileNotFoundError:
                missing.append(part)
            except CheckpointError as error:
                logger.warning("%s: it is made again.", error)
                missing.append(part)
        return missing

    def write(self, part: int, samples: Sequence[Sample], num_classes: int) -> int:
        """Writes a part, whole or not at all; returns its bytes. Raises: OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        counts = [len(next(iter(sample.values.values()))) for sample in samples]
        tensors = {
            name: torch.cat([sample.values[name] for sample in samples]).contiguous() for name in samples[0].values
        }
        tensors[OFFSETS] = torch.tensor([0, *counts]).cumsum(0)
        tensors[ROWS] = torch.tensor([sample.row for sample in samples])
        numbered = zip(self.samples_of(part), samples, strict=True)
        tensors[SUMS] = torch.tensor([self._sum(index, sample) for index, sample in numbered])
        # one entry, since the order of several differs from file to file
        metadata = {ORIGIN: json.dumps([self.key, part, num_classes])}
        with replacing(self.path(part)) as temporary:
            try:
                save_file(tensors, temporary, metadata)
            except SafetensorError as error:  # of a full disk, too
                raise OSError(f"{self.path(part)} could not be written: {error}") from error
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        self._opened.pop(part, None)
        return self.path(part).stat().st_size

    def read(self, index: int) -> tuple[Sample, int]:
        """Returns the values of a sample, and the number of the teacher's classes.

        Raises:
            CheckpointError: the values are damaged. The file is deleted, so that the next run makes it again.
        """
        part = index // self._length
        try:
            held = self._open(part)
            sample = held.read(index - part * self._length)
            if self._sum(index, sample) != held.sums[index - part * self._length]:
                raise CheckpointError(f"{self.path(part)} is damaged: the logits of sample {index} have changed")
        except (CheckpointError, FileNotFoundError) as error:
            self.path(part).unlink(missing_ok=True)
            raise CheckpointError(
                f"distillation_cache: {error}. The file has been deleted: start the run again to make it again, with "
                "resume_from_checkpoint=True to continue."
            ) from error
        return sample, held.num_classes

    def _open(self, part: int) -> OpenPart:
        if part not in self._opened:
            self._opened[part] = OpenPart(self.path(part), self.key, part, len(self.samples_of(part)))
        return self._opened[part]

    def _sum(self, index: int, sample: Sample) -> int:
        """Returns the checksum of a sample's values, its place and its origin."""
        found = zlib.crc32(f"{self.key}:{index}:{sample.row}".encode())
        for name in sorted(sample.values):
            value = sample.values[name].contiguous().reshape(-1)
            if value.numel():
                found = zlib.crc32(value.view(torch.uint8).numpy().data, found)
        return found


class OpenPart:
    """A memory-mapped file of a part.

    Args:
        path: the file.
        key, part, num_samples: what it has to hold.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or holds something else.
    """

    def __init__(self, path: Path, key: str, part: int, num_samples: int) -> None:
        if not path.exists():
            raise FileNotFoundError(2, "no such file", str(path))
        try:
            opened: Any = UNTYPED(path, "pt")
            origin = json.loads(opened.metadata()[ORIGIN])
            names = tuple(sorted(set(opened.keys()) - {OFFSETS, ROWS, SUMS}))
            offsets, rows, sums = (opened.get_tensor(name) for name in (OFFSETS, ROWS, SUMS))
            self._slices: dict[str, Any] = {name: opened.get_slice(name) for name in names}
            lengths = {each.get_shape()[0] for each in self._slices.values()}
            self.num_classes = int(origin[2])
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from error
        self.offsets, self.rows, self.sums = offsets.tolist(), rows.tolist(), sums.tolist()
        if origin[:2] != [key, part]:
            raise CheckpointError(f"{path} holds the logits of another teacher, dataset or part")
        fits = names in HELD and len(self.rows) == len(self.sums) == len(self.offsets) - 1 == num_samples
        is_ordered = fits and self.offsets == sorted(self.offsets) and self.offsets[0] == 0
        if not is_ordered or lengths != {self.offsets[-1]}:
            raise CheckpointError(f"{path} is damaged: its arrays do not fit together")

    def read(self, place: int) -> Sample:
        """Returns the values of the sample at a place in the part."""
        first, last = self.offsets[place : place + 2]
        return Sample(self.rows[place], {name: each[first:last] for name, each in self._slices.items()})
