"""Data that changes its own order from one reading to the next: the orders are counted, and repeated in a resumed run.

A `shuffle` of tf.data that reshuffles, or a PyDataset that shuffles in `on_epoch_end`, holds a state that each reading
moves on, by a training and an evaluation alike, and that cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.tensorflow.data.transformations import shuffles_of
from paceline.tensorflow.framework import keras

EPOCH_METHODS = ("on_epoch_begin", "on_epoch_end")
NUM_READS = "paceline_num_reads"  # attribute of the object that holds an order
# transformations after which one reading takes several orders of a shuffle before, or takes it late
NOT_COUNTED = {"Repeat", "Concatenate"}


@dataclass(eq=False)
class OwnOrder:
    """An object that gives another order in each reading.

    Args:
        holder: the object; the number of readings is kept as its attribute, since all that read it share it.
        advance: moves it to the next order.
        is_counted: a reading takes one order.
    """

    holder: Any
    advance: Callable[[], object]
    is_counted: bool = True

    @property
    def num_reads(self) -> int:
        """Returns the number of orders that were taken so far."""
        return int(getattr(self.holder, NUM_READS, 0))

    def count(self) -> None:
        """Counts an order that was taken."""
        setattr(self.holder, NUM_READS, self.num_reads + 1)

    def advance_to(self, number: int) -> None:
        """Moves to an order, by its number; one that has passed stays passed."""
        while self.num_reads < number:
            self.advance()
            self.count()


class OwnOrders:
    """The orders of one dataset, which may be made of several shuffled ones; often there are none.

    Args:
        orders: one that a reading takes twice is listed twice.
    """

    def __init__(self, orders: Sequence[OwnOrder] = ()) -> None:
        self.orders = list(orders)
        self.begun: list[int] = []  # number of each order in the epoch in progress
        self._loaded: Loaded | None = None
        self._later: list[int] = []  # readings to move on to as soon as the epoch is open

    def numbers(self) -> list[int]:
        """Returns the number of readings of each so far."""
        return [order.num_reads for order in self.orders]

    def begin(self, epoch: int) -> None:
        """Moves to the loaded orders; else to those of an epoch, or to later ones if the data was read more often."""
        begun = [epoch] * len(self.orders)
        self._later = []
        if self._loaded is not None:
            begun, self._later = self._loaded.targets(self.numbers())
            self._loaded = None
        self._advance_to(begun)
        self.begun = self.numbers()

    def count(self) -> None:
        """Counts a reading, once its orders are taken, and those made by the time of the checkpoint."""
        for order in self.orders:
            order.count()
        if self._later:
            self._advance_to(self._later)
            self._later = []

    def settle(self) -> None:
        """Moves to the readings that were loaded, if no epoch has begun since."""
        if self._loaded is not None:
            _, later = self._loaded.targets(self.numbers())
            self._loaded = None
            self._advance_to(later)

    def state_dict(self, *, is_within: bool) -> dict[str, Any]:
        """Returns the numbers of the orders, JSON-serializable; empty if there are none.

        Args:
            is_within: the epoch has begun.
        """
        if not self.orders:
            return {}
        if self._loaded is not None:
            return {"begun": self._loaded.begun, "read": self._loaded.read}
        return {"begun": list(self.begun) if is_within else self.numbers(), "read": self.numbers()}

    def load_state_dict(self, state: Mapping[str, Any], *, is_within: bool, is_complete: bool = False) -> None:
        """Loads the numbers for the next `begin`; those of other data are left.

        Args:
            state: the result of `state_dict`, or empty.
            is_within: the epoch to resume has begun.
            is_complete: no batch of it is left.

        Raises:
            ValueError: they are not whole numbers.
        """
        begun, read = (list(state.get(name, ())) for name in ("begun", "read"))
        if not all(isinstance(number, int) and number >= 0 for number in [*begun, *read]):
            raise ValueError("the orders of the data are not whole numbers")
        if len(begun) == len(read) == len(self.orders) > 0:
            self._loaded = Loaded(begun, read, is_within, is_complete, self.numbers())

    def is_lost(self) -> bool:
        """True if batches are left of a loaded epoch that had begun, and its order has passed or is not known."""
        if self._loaded is None or not self._loaded.is_within or self._loaded.is_complete:
            return False
        places = zip(self.orders, self._loaded.begun, self._loaded.read, strict=True)
        return any(
            order.num_reads > begun or not (order.is_counted or (begun == 0 and read <= 1))
            for order, begun, read in places
        )

    def _advance_to(self, numbers: Sequence[int]) -> None:
        for order, number in zip(self.orders, numbers, strict=True):
            order.advance_to(number)


@dataclass(frozen=True)
class Loaded:
    """The orders of an epoch to resume.

    Attributes:
        begun: the number of each order in that epoch.
        read: the readings of each by the time of the checkpoint.
        is_within: the epoch had begun.
        is_complete: no batch of it is left.
        before: the readings in this process when this was loaded.
    """

    begun: list[int]
    read: list[int]
    is_within: bool
    is_complete: bool
    before: list[int]

    def targets(self, now: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the orders to begin the epoch with, and the readings to move on to then.

        Args:
            now: the readings so far; an evaluation that the checkpoint requests comes before the epoch.
        """
        later = [read + count - before for read, count, before in zip(self.read, now, self.before, strict=True)]
        return self.begun if self.is_within else later, later


def orders_of(dataset: Any) -> OwnOrders:
    """Returns the orders of the shuffles in a tf.data.Dataset that reshuffle; one before a `cache` is taken once."""
    return OwnOrders(
        [
            OwnOrder(shuffle, partial(iter, shuffle), not NOT_COUNTED & set(later))
            for shuffle, later in shuffles_of(dataset)
            if shuffle._reshuffle_each_iteration and "Cache" not in later
        ]
    )


def epoch_methods_of(dataset: Any) -> list[str]:
    """Returns the names of the methods by which a PyDataset may change its order between epochs."""
    return [name for name in EPOCH_METHODS if getattr(type(dataset), name) is not getattr(keras.utils.PyDataset, name)]
