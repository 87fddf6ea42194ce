"""The dataset indices of the samples of an accumulation window, taken where the loader draws its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paceline.args.packing import JOINING, packing_of
from paceline.args.sections import Options
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.indexed import IndexedLoader


class WindowIds:
    """The sample ids of an accumulation window.

    Args:
        collect: draws the batches of a window.

    Attributes:
        current: the indices of this process's samples in the window that was drawn last, in their order.
    """

    def __init__(self, collect: Callable[..., Any]) -> None:
        self.current: list[int] = []
        self._collect = collect
        self._feed: StatefulDataIterator | None = None

    def follow(self, feed: StatefulDataIterator) -> None:
        """Sets the feed whose windows are drawn, before its first pass."""
        if isinstance(feed.loader, IndexedLoader):  # the parts that read the ids refuse other loaders
            self._feed = feed
            feed.loader.batches.keep_indices()

    def collect(self, batches: Iterator[Any], number: int) -> Any:
        """Draws a window, and takes the ids of its batches."""
        if self._feed is None:
            return self._collect(batches, number)
        found: list[int] = []
        taken = self._taking(batches, found)
        window = self._collect(taken, number)
        self.current = found
        return window

    def _taking(self, batches: Iterator[Any], found: list[int]) -> Iterator[Any]:
        assert self._feed is not None
        for batch in batches:
            reader: Any = self._feed._reader  # it has the indices of its own pass
            found += reader.indices.popleft()
            yield batch


def find_obstacle(options: Options, loader: object) -> str | None:
    """Returns the reason why the samples of a pass are not known, with the remedy; None if they are."""
    if not isinstance(loader, IndexedLoader):
        return "needs a dataset with an index and the Trainer's own loader, which record the samples of a batch."
    if packing_of(options) in JOINING:
        return f"is not possible with packing={options.packing!r}, which joins samples into rows: leave one out."
    if not options.dataloader_in_order:
        return "needs batches in the order of the sampler: set dataloader_in_order=True."
    for name in ("auto_find_batch_size", "deepspeed", "phases", "regularizers"):
        if getattr(options, name):
            return f"is not supported with {name}, whose passes do not run each sample once: leave one of them out."
    return None
