"""A shuffle buffer for streams; its contents are restored on resume."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from paceline.pytorch.data.generators import capture_generators, generators_at
from paceline.pytorch.data.indexed import set_epoch
from paceline.pytorch.data.stream import reread, restores_exactly, start_of, with_own_position

logger = logging.getLogger(__name__)


class ShuffleBuffer(IterableDataset[Any]):
    """Shuffles a stream, in a different order each epoch; its position is saved and restored exactly.

    The buffer holds `buffer_size` samples. In each round, these samples leave in random order while the next block of
    the stream replaces them, so a sample is shuffled within its block of `buffer_size`. The content of the buffer
    follows from the stream's position at the start of the round and the number of samples that have left since. A
    checkpoint contains only these two. On resume, at most `2 * buffer_size` samples are read again if the stream has
    `state_dict` and `load_state_dict`; otherwise all previous samples are, with a warning.

    Args:
        stream: any iterable of samples; it is sharded among workers as without a buffer.
        buffer_size: samples held, at least 1.
        seed: the seed of the orders, the same in every worker; epoch e and round r draw from (seed, e, r).
        transform: applied to a sample as it leaves the buffer. Random augmentation belongs here or into the collator:
            applied before the buffer, it would draw different numbers when samples are read again.

    Raises:
        ValueError: `buffer_size` is below 1.
    """

    def __init__(
        self,
        stream: Any,
        buffer_size: int,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size}: a buffer holds 1 sample or more.")
        self.stream = with_own_position(stream)
        self.buffer_size = buffer_size
        self.seed = seed
        self.transform = transform
        self.epoch = 0
        self._epoch = 0  # epoch of the current order; a partly read epoch is finished in its original order
        self._round = 0
        self._left = 0  # samples that have left in this round
        self._begin: Any = None  # the stream's state at the beginning of this round
        self._is_restored = False
        self._is_checked = False

    @property
    def restores_exactly(self) -> bool:
        """Returns True if a resume reads only the buffer's samples again."""
        return restores_exactly(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch = epoch
        self._forget()
        set_epoch(self.stream, epoch)

    def __len__(self) -> int:
        """Returns the number of samples of the stream; raises TypeError if it is unknown."""
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the samples yielded so far."""
        has_begun = self._round > 0 or self._left > 0
        return {
            "epoch": self._epoch if has_begun else self.epoch,
            "round": self._round,
            "left": self._left,
            "buffer_size": self.buffer_size,
            "seed": self.seed,
            "stream": self._begin if has_begun else self._start(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position for the next `iter`.

        Raises:
            ValueError: it was saved with another buffer size or seed, and therefore another order.
        """
        has_begun = state["round"] > 0 or state["left"] > 0
        for name in ("buffer_size", "seed"):
            if has_begun and state[name] != getattr(self, name):
                raise ValueError(
                    f"ShuffleBuffer: {name}={getattr(self, name)}, and the checkpoint was written in the middle of an "
                    f"epoch with {name}={state[name]}. Use that until the epoch is over, or set ignore_data_skip=True "
                    "to restart it."
                )
        self._round, self._left, self._begin = state["round"], state["left"], state["stream"]
        self._epoch = state.get("epoch", self.epoch)
        self._is_restored = True
        if self.restores_exactly:
            self.stream.load_state_dict(self._begin)

    def __iter__(self) -> Iterator[Any]:
        is_resumed = self._is_restored and (self._round > 0 or self._left > 0)
        if not is_resumed:
            self._forget()
            self._begin = self._start()
        self._is_restored = False
        skipped, self._left = self._left, 0
        # reading samples again must not change the generators
        with generators_at(None) if is_resumed else nullcontext():
            source = iter(self.stream)
            if not self.restores_exactly:
                reread(source, self._round * self.buffer_size, "samples")
            held = self._fill(source)
            samples = self._rounds(source, held)
            for _ in itertools.islice(samples, skipped):
                pass
        for sample in samples:
            yield sample if self.transform is None else self.transform(sample)
        self._forget()

    def _rounds(self, source: Iterator[Any], held: list[Any]) -> Iterator[Any]:
        """Yields samples from the start of the current round on."""
        while held:
            following = self._state()  # the stream's position when the next round begins
            coming: list[Any] = []
            for slot in self._order(len(held)):
                sample, held[slot] = held[slot], None
                coming += itertools.islice(source, 1)
                self._left += 1
                yield sample
            held = coming
            self._round, self._left, self._begin = self._round + 1, 0, following

    def _fill(self, source: Iterator[Any]) -> list[Any]:
        if self._is_checked:
            return list(itertools.islice(source, self.buffer_size))
        before = capture_generators()
        held = list(itertools.islice(source, self.buffer_size))
        self._is_checked = True
        if capture_generators() != before:
            logger.warning(
                "ShuffleBuffer: reading this stream draws random numbers, and will draw others when samples are read "
                "again: a resumed run sees every sample once, but not bit for bit as it would have. Give what draws "
                "them as `transform`, which is applied as a sample leaves the buffer."
            )
        return held

    def _order(self, size: int) -> list[int]:
        key = np.random.SeedSequence([self.seed % 2**64, self._epoch, self._round])
        order: list[int] = np.random.default_rng(key).permutation(size).tolist()
        return order

    def _start(self) -> Any:
        return start_of(self.stream) if self.restores_exactly else None

    def _state(self) -> Any:
        return self.stream.state_dict() if self.restores_exactly else None

    def _forget(self) -> None:
        self._round = 0
        self._left = 0
        self._begin = None
        self._is_restored = False
        self._epoch = self.epoch
