"""The part of a model that does not train: stored once, and linked from one checkpoint to the next."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import num_bytes
from paceline.core.manifest import KnownFile, entry_of

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20  # below, a file of its own saves nothing

_COLUMNS = 4096


@dataclass(frozen=True)
class Stored:
    """A file with frozen weights.

    Attributes:
        path: where it is, in a published checkpoint.
        prints: what the weights in it looked like, by name.
        known: its hash, and which file that was the hash of.
    """

    path: Path
    prints: Mapping[str, bytes]
    known: KnownFile


class FrozenPart:
    """Remembers where the frozen weights of a run lie."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self.stored: Stored | None = None
        self._written: tuple[dict[str, bytes], str] | None = None

    def names(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Names -> bytes of what in `tensors` is a parameter that does not train; none where that is little.

        Buffers are not: training changes them.
        """
        frozen = {
            name: tensors[name]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and name in tensors and tensors[name].data_ptr() == parameter.data_ptr()
        }
        trained = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad}
        sizes = {name: num_bytes(tensor) for name, tensor in frozen.items() if tensor.data_ptr() not in trained}
        return sizes if sum(sizes.values()) >= self.least_bytes else {}

    def place(
        self, prints: Mapping[str, bytes], target: Path, later: Callable[[Callable[[], None]], None]
    ) -> dict[str, KnownFile] | None:
        """Put the stored file at `target`, where it holds these very weights.

        Args:
            later: is given what copies the file, where it cannot be linked.

        Returns: what is known of it, by its name, for `manifest.seal`; None when the weights must be written.
        """
        stored = self.stored
        if stored is None or stored.prints != prints or not stored.known.is_still(stored.path):
            return None
        try:
            os.link(stored.path, target)
        except OSError as error:
            logger.info("no link to %s (%s): it is copied", stored.path, error)
            later(partial(_copy, stored.path, target))
            return {}
        return {target.name: stored.known}

    def written(self, prints: dict[str, bytes], name: str) -> None:
        """The weights are in the file `name` of the checkpoint that will be published next."""
        self._written = prints, name

    def published(self, folder: Path) -> None:
        """The checkpoint is in its place."""
        if self._written is None:
            return
        prints, name = self._written
        self._written = None
        known = entry_of(folder / name)
        self.stored = None if known is None else Stored(folder / name, prints, known)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def fingerprint(tensor: Tensor) -> bytes:
    """A digest of a tensor's bits, computed where it lies: sums over rows and over columns of its bits as a matrix.

    Reads the tensor twice. One changed value always shows; it is no protection against intent.
    """
    data = tensor.detach().contiguous().view(-1)
    if data.data_ptr() % 8:
        data = data.clone()
    octets = data.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    rows = words.numel() // _COLUMNS
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in (matrix.sum(0), matrix.sum(1), rest, octets[whole:]):
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
