"""Poisson sampling: each optimizer step takes each sample with the same probability, independently of all others.

Differential privacy counts on it (Abadi et al., 2016, arXiv:1607.00133). The samples of a step are a function of (key,
epoch, step): their number is drawn first, from the binomial distribution, and then as many different samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.pytorch.data.sampling import PlacedBatch, RankBatches, SamplerRequest

Indices = NDArray[np.int64]
PURPOSE = zlib.crc32(b"poisson sampling")  # keeps its numbers apart from others that are drawn with the key


class PoissonBatches(RankBatches):
    """Micro-batches of Poisson samples; each optimizer step has the same number of micro-batches.

    A micro-batch must not be empty: one without a sample gets a filler, whose gradient the run must drop. Sizes vary:
    their standard deviation is about the root of the expected size.

    Args:
        size: number of samples.
        batch_size: expected samples per optimizer step.
        accumulation: micro-batches per optimizer step.
        seed: the key until `use_key` is called.
        drop_last: an epoch has `size // batch_size` steps, and otherwise one more for the rest.
    """

    def __init__(self, size: int, batch_size: int, accumulation: int, seed: int, drop_last: bool = False) -> None:
        self.num_samples = size  # expected in an epoch
        self.settings: dict[str, Any] = {
            "kind": "poisson",
            "size": size,
            "batch_size": min(batch_size, size),
            "accumulation": accumulation,
        }
        self.num_steps = size // batch_size if drop_last else -(-size // batch_size)
        self._key = seed
        self._current = self.settings

    def use_key(self, key: int) -> None:
        """Sets the key, which must stay secret, because it determines the samples of each step."""
        self._key = key

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings, without the key."""
        return dict(self.settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks the settings of the epoch in progress.

        Raises:
            ValueError: they differ, so that the remaining steps would have another sampling rate.
        """
        for name, value in self.settings.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the epoch in progress has Poisson sampling with {name}={value!r}, and had {state.get(name)!r}: "
                    "resume with the batch size, the accumulation and the data that it had, or from the end of an "
                    "epoch"
                )

    def __len__(self) -> int:
        """Returns the number of micro-batches in an epoch."""
        return self.num_steps * int(self.settings["accumulation"])

    def counts(self, epoch: int) -> Indices:
        """Returns the number of samples of each step of an epoch."""
        size, expected = self.settings["size"], self.settings["batch_size"]
        return self._generator(epoch, 0).binomial(size, expected / size, self.num_steps).astype(np.int64)

    def fillers(self, epoch: int, step: int) -> list[int]:
        """Returns the positions, in an optimizer step of an epoch, of the micro-batches that are a filler."""
        number, parts = int(self.counts(epoch)[step]), int(self.settings["accumulation"])
        return list(range(min(number, parts), parts))

    def _generator(self, epoch: int, number: int) -> np.random.Generator:
        return np.random.default_rng([abs(self._key), PURPOSE, epoch, number])

    def __iter__(self) -> Iterator[list[int]]:
        return self._walk(self.epoch, self.position)

    def _walk(self, epoch: int, consumed: int) -> Iterator[list[int]]:
        """Yields the micro-batches of an epoch that follow the first `consumed` samples, fillers included."""
        size, parts = int(self.settings["size"]), int(self.settings["accumulation"])
        position = 0
        for step, count in enumerate(self.counts(epoch).tolist()):
            if position + max(count, parts) <= consumed:  # nothing of earlier steps is drawn again
                position += max(count, parts)
                continue
            drawn = self._generator(epoch, step + 1).choice(size, count, replace=False)
            for part in np.array_split(drawn, parts):
                indices = part.tolist() or [0]
                if position >= consumed:
                    yield PlacedBatch(indices, position)
                position += len(indices)


def make_poisson(request: SamplerRequest) -> PoissonBatches:
    """Returns the order of `DPSGD(sampling="poisson")`."""
    return PoissonBatches(
        request.size,
        request.batch_size * request.accumulation,
        request.accumulation,
        request.seed,
        request.drop_last,
    )
