"""Iteration over training data, one optimizer step at a time, with a position that is saved and restored."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from paceline.tensorflow.data.batches import separate, size_of
from paceline.tensorflow.data.sources import Source

logger = logging.getLogger(__name__)

Batch = tuple[Any, Any]


@dataclass(eq=False)
class TFFeed:
    """The training data of one run. The position is the number of samples consumed in the epoch.

    Args:
        source: yields the batches.
        accumulation: batches per optimizer step.
        label_names: the keys that are labels, if batches are dicts.
        ignore_data_skip: after a resume, restart the epoch.
    """

    source: Source
    _: KW_ONLY
    accumulation: int
    label_names: Sequence[str] | None
    ignore_data_skip: bool = False

    def __post_init__(self) -> None:
        self.epoch = 0
        self.consumed = 0  # samples consumed in the epoch
        self.batches = 0  # batches consumed in the epoch
        self._restored = False
        self._has_warned = False  # that the order of the data cannot be restored exactly
        self._iterator: Iterator[Any] | None = None
        self.before_epoch: Callable[[], None] | None = None  # called before an epoch's data is opened

    @property
    def is_restored(self) -> bool:
        """True if a position was loaded that `start_epoch` has not applied yet."""
        return self._restored

    def start_epoch(self, epoch: int) -> None:
        """Opens the data at the start of an epoch, or at the loaded position."""
        if self.before_epoch is not None:
            self.before_epoch()
        if not self._restored:
            self.epoch, self.consumed, self.batches = epoch, 0, 0
        elif not self._has_warned:
            self.source.warn_of_order()
            self._has_warned = True
        self._restored = False
        self._iterator = self.source.read(self.epoch, self.consumed, self.batches)

    def draw(self) -> tuple[list[Batch], None]:
        """Returns the (features, labels) batches of one optimizer step: fewer at the end of the data, then none."""
        assert self._iterator is not None
        drawn = list(itertools.islice(self._iterator, self.accumulation))
        batches = [separate(batch, self.label_names) for batch in drawn]
        self.batches += len(batches)
        self.consumed += sum(size_of(features) for features, _ in batches)
        return batches, None

    def replace_source(self, source: Source, accumulation: int) -> None:
        """Reads other data from the next epoch on.

        Args:
            source: yields the batches.
            accumulation: batches per optimizer step.
        """
        self.source.own_orders.settle()  # the other source may read the same data
        self.source, self.accumulation = source, accumulation

    def finish_epoch(self) -> None:
        """Advances the position to the next epoch, from which later checkpoints resume."""
        self.epoch, self.consumed, self.batches = self.epoch + 1, 0, 0

    def close(self) -> None:
        """Drops the iterator over the data."""
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the settings that it depends on, JSON-serializable."""
        orders = self.source.own_orders.state_dict(is_within=self.batches > 0)
        return ({"orders": orders} if orders else {}) | {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "batches": self.batches,
            "batch_size": self.source.batch_size,
            "num_samples": self.source.num_samples,
            "settings": dict(self.source.settings),
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Loads a position for the next `start_epoch`; an epoch in progress is continued in its original order.

        Raises:
            ValueError: the position is not made of whole numbers.
        """
        numbers = [state["epoch"], state["consumed"], state["batches"]]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("the position in the data is not made of whole numbers")
        self.epoch, self.consumed, self.batches = numbers
        if self.ignore_data_skip:
            self.consumed = self.batches = 0
        for name, now in (("num_samples", self.source.num_samples), ("settings", dict(self.source.settings))):
            if self.consumed and name in state and state[name] != now:
                logger.warning(
                    "The training data had %s %s when the checkpoint was written and has %s now: the samples left in "
                    "this epoch are not exactly those that were not seen yet.",
                    name,
                    state[name],
                    now,
                )
        self.batches = self.source.place(self.consumed, self.batches)
        self.source.own_orders.load_state_dict(
            state.get("orders") or {},
            is_within=self.batches > 0,
            is_complete=self.batches == self.source.num_batches,
        )
        self._restored = True
