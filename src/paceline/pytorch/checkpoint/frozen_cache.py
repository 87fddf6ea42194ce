"""The frozen weights of a model, which are stored once and hard-linked from one checkpoint to the next."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import KnownFile, entry_of
from paceline.pytorch.checkpoint.weights import address_of, num_bytes

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20  # smaller frozen parts are not worth a separate file

_HOST_PIECE, _DEVICE_PIECE = 1 << 24, 1 << 27  # bytes hashed at a time
_STEP, *_FACTORS = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd, as signed numbers of 64 bits


@dataclass(frozen=True)
class Stored:
    """A file with frozen weights.

    Attributes:
        path: the file's path in a published checkpoint.
        prints: fingerprints of the weights in the file, by name.
        known: the file's hash, and the identity of the hashed file.
    """

    path: Path
    prints: Mapping[str, bytes]
    known: KnownFile


class FrozenPart:
    """The location of a run's stored frozen weights."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self.stored: Stored | None = None
        self._written: tuple[dict[str, bytes], str] | None = None

    def names(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the bytes of each frozen parameter in `tensors`, by name; empty if their sum is below `least_bytes`.

        Buffers are not included, since training changes them.
        """
        frozen = {
            name: tensors[name]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and name in tensors and address_of(tensors[name]) == address_of(parameter)
        }
        if not frozen:
            return {}
        trained = {address_of(parameter) for parameter in model.parameters() if parameter.requires_grad}
        sizes = {name: num_bytes(tensor) for name, tensor in frozen.items() if address_of(tensor) not in trained}
        return sizes if sum(sizes.values()) >= self.least_bytes else {}

    def place(
        self,
        prints: Mapping[str, bytes],
        target: Path,
        later: Callable[[Callable[[], Any]], None],
    ) -> dict[str, KnownFile] | None:
        """Links the stored file to `target`, if it holds exactly these weights.

        Args:
            prints: fingerprints of the weights, by name.
            target: path in the new checkpoint.
            later: receives a function that copies the file, if it cannot be linked.

        Returns: the known file by its name, for `manifest.seal`; None if the weights must be written.
        """
        stored = self.stored
        if stored is None or stored.prints != prints or not stored.known.is_still(stored.path):
            return None
        try:
            os.link(stored.path, target)
        except OSError as error:
            logger.info("no link to %s (%s): it is copied", stored.path, error)
            later(partial(shutil.copyfile, stored.path, target))
            return {}
        return {target.name: stored.known}

    def written(self, prints: dict[str, bytes], name: str) -> None:
        """Records that the weights are in the file `name` of the checkpoint that will be published next."""
        self._written = prints, name

    def published(self, folder: Path) -> None:
        """Records that the checkpoint is published."""
        if self._written is None:
            return
        prints, name = self._written
        self._written = None
        known = entry_of(folder / name)
        self.stored = None if known is None else Stored(folder / name, prints, known)


def fingerprint(tensor: Tensor) -> bytes:
    """Returns a digest of a tensor's bits and their positions, computed on its device.

    On the host it is SHA-256 over pieces, on all cores, at 1 to 2 GB/s per core. On an accelerator, which avoids moving
    the bytes to the host, it consists of sums of 8-byte words, each mixed with its position. A single changed value is
    always detected; several changes are missed with a probability of about 1 in 2**32. This does not protect against
    deliberate manipulation.
    """
    data = tensor.detach().contiguous().view(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if data.numel() == 0:
        return digest.digest()
    if data.device.type == "cpu":
        octets = data.view(torch.uint8).numpy().data
        pieces = [octets[start : start + _HOST_PIECE] for start in range(0, len(octets), _HOST_PIECE)]
        if len(pieces) == 1:
            digest.update(pieces[0])
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
                for part in pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces):
                    digest.update(part)
    else:
        digest.update(mixed_sums(data))
    return digest.digest()


def mixed_sums(data: Tensor) -> bytes:
    """Returns sums, over pieces of 128 MiB, of 8-byte words mixed with their position; waits for the device once.

    The mixing follows SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195). It is one to one, so that
    a single change is always detected. It takes two rounds, since after one round, swapping two values that differ only
    in the highest bit (1.0 and -1.0) can go undetected. Takes the memory of three pieces.
    """
    if data.data_ptr() % 8:
        data = data.clone()
    octets = data.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    length = _DEVICE_PIECE // 8
    places = torch.arange(min(length, words.numel()), device=data.device).mul_(_STEP)
    sums = []
    for piece in torch.split(words, length) if whole else ():
        mixed = piece + places[: piece.numel()]
        for factor in _FACTORS:
            mixed.mul_(factor)
            mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))  # the mask undoes the sign extension of >>
        sums.append(mixed.sum())
    rest = octets[whole:].cpu().numpy().tobytes()
    return (torch.stack(sums).cpu().numpy().tobytes() if sums else b"") + rest
