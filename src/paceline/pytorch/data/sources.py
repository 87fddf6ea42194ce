"""The source of each training sample, from the sample to the accumulation window.

The collator adds the names of the sources to a batch; they are taken out again when the window is drawn, before
anything else reads the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from paceline.args.errors import UnsupportedOption

KEY = "__sources__"  # of a batch between the collator and the window


class SourceCollator:
    """A collator that adds the source of each sample to the batch.

    Args:
        collate: `(samples) -> batch`; the batch must be a dict.
        column: entry of a sample, a dict, that holds the name or the number of its source.
        dataset: a mixture that marks its samples under `column` has the names of the numbers.

    Raises:
        UnsupportedOption: (when called) a sample has no such entry, or the batch is no dict.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], column: str, dataset: Any) -> None:
        self.collate, self.column = collate, column
        is_own = getattr(dataset, "source_column", None) == column
        self.names = tuple(dataset.names) if is_own else None

    def __call__(self, samples: list[Any]) -> Any:
        sources = [self._source_of(sample) for sample in samples]
        batch = self.collate(samples)
        if not isinstance(batch, MutableMapping):
            raise UnsupportedOption(
                f"loss_by_source={self.column!r} needs batches that are dicts, and the data collator returned a "
                f"{type(batch).__name__}: return a dict there, or leave loss_by_source out."
            )
        batch[KEY] = sources
        return batch

    def _source_of(self, sample: Any) -> str:
        if not isinstance(sample, Mapping) or self.column not in sample:
            found = f"a {type(sample).__name__}" if not isinstance(sample, Mapping) else ", ".join(map(str, sample))
            raise UnsupportedOption(
                f"loss_by_source={self.column!r} names an entry of the training samples, and a sample has {found}: set "
                f"source_column={self.column!r} of the mixture, add it to the samples, or leave loss_by_source out."
            )
        value = sample[self.column]
        value = value.item() if hasattr(value, "item") else value
        return str(value) if self.names is None else self.names[value]


class WindowSources:
    """The sources of the samples of an accumulation window.

    Args:
        column: value of the option, for the error.
        collect: draws the batches of a window.

    Attributes:
        current: the sources of this process's samples in the window that was drawn last, in their order.
    """

    def __init__(self, column: str, collect: Callable[[Iterator[Any], int], Any]) -> None:
        self.column = column
        self.current: list[str] = []
        self._collect = collect

    def collect(self, batches: Iterator[Any], number: int) -> Any:
        """Draws a window, and takes the sources out of its batches.

        Raises:
            UnsupportedOption: a batch has none.
        """
        found: list[str] = []
        window = self._collect(self._taking(batches, found), number)
        self.current = found
        return window

    def _taking(self, batches: Iterator[Any], found: list[str]) -> Iterator[Any]:
        for batch in batches:
            if not isinstance(batch, MutableMapping) or KEY not in batch:
                raise UnsupportedOption(
                    f"loss_by_source={self.column!r} needs batches of the Trainer's own loader: leave "
                    "get_train_dataloader as it is, or leave loss_by_source out."
                )
            found += batch.pop(KEY)
            yield batch
