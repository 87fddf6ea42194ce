"""Handing out training data one update at a time, with a position that survives a restart.

A reader is one pass over a loader. There is one for each way in which a loader can be put back to a place: by index
(ours, over a dataset with an index), by the state of a stream (ours), by the loader's own `state_dict`, and, for any
other iterable, by reading again what was read before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.batches import batch_size_of, cut_batch
from paceline.data.dispatch import DealtBatches, DispatchedLoader, failing, source_of
from paceline.data.generators import capture_generators, capture_own, generators_at, own_generators, restore_own
from paceline.data.indexed import IndexedLoader, set_epoch
from paceline.data.lengths import loader_length, sample_count, samples_at_once
from paceline.data.portable import from_portable, to_portable
from paceline.data.stream import StreamLoader, begin_pass, reread, samples_in

logger = logging.getLogger(__name__)

class Saved(dict[str, Any]):
    """A position that was saved, and the file it was read from."""

    source = "The saved position"

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """What a damaged position makes the block raise becomes a ValueError that names the file."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"{self.source} is damaged, or does not fit this data: {error}") from error

    def generators(self, own: Mapping[str, torch.Generator]) -> dict[str, Any]:
        """The saved states of the generators, which were tried; those of now where none were saved."""
        if "generators" not in self:
            return capture_generators(own)
        with self.restoring(), generators_at(self["generators"], own):
            return dict(self["generators"])


class Reader:
    """Batches of one epoch, counted as they are taken.

    Attributes:
        consumed: samples taken in this epoch.
        batches: micro-batches taken in this epoch.
    """

    iterator: Iterator[Any]

    def __init__(self, consumed: int, batches: int) -> None:
        self.consumed, self.batches = consumed, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.iterator)
        self.consumed += self.count(batch)
        self.batches += 1
        return batch

    def count(self, batch: Any) -> int:
        """Number of samples in the batch just taken."""
        return batch_size_of(batch)

    def place(self) -> dict[str, Any]:
        """What restores this reader, beside the number of samples consumed; JSON-able."""
        return {}


class IndexReader(Reader):
    """Over our loader of a dataset with an index: resumes at any sample, reading none."""

    def __init__(self, loader: IndexedLoader, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        indices = loader.batches
        own = own_generators(loader)
        own.pop("loader", None)
        self.sampler = indices.sampler if indices.is_positionable else None
        # an order that comes out of a generator can be had again only from the same state of the generator
        self.generators = None
        if self.sampler is None:
            self.generators = capture_generators(own) if saved is None else saved.generators(own)
        if saved is not None:
            if self.sampler is not None and "order" in saved:
                with saved.restoring():
                    self.sampler.load_state_dict(saved["order"])
            with generators_at(self.generators, own):
                indices.set_position(consumed)
        self.iterator = iter(loader)
        self.sizes = indices.sizes  # of this pass, even if someone else starts another

    def __next__(self) -> Any:  # the hot path: one hop less
        try:
            batch = next(self.iterator)
        except StopIteration as error:
            if self.sizes:  # raised by a collator in a worker
                raise RuntimeError("StopIteration was raised while making a batch: it would end the epoch.") from error
            raise
        self.consumed += self.sizes.popleft()
        self.batches += 1
        return batch

    def place(self) -> dict[str, Any]:
        if self.sampler is not None:
            return {"order": self.sampler.state_dict()}
        return {"generators": self.generators}


class StreamedReader(Reader):
    """Over our loader of a stream."""

    def __init__(self, loader: StreamLoader, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        self.generators = None
        if not loader.restores and not loader.num_workers:
            self.generators = capture_generators() if saved is None else saved.generators({})
        if saved is None:
            self.stream = loader.open()
        else:
            if "stream" in saved:
                with saved.restoring():
                    position = from_portable(saved["stream"])
                    if samples_in(position) != consumed:
                        raise ValueError(f"{samples_in(position)} samples were read, but {consumed} were consumed")
            else:
                position = unread(loader, consumed)
            loader.set_position(position)
            with generators_at(self.generators):
                self.stream = loader.open()
        self.iterator = self.stream
        self.sizes = self.stream.sizes

    def count(self, batch: Any) -> int:
        return self.sizes.popleft()

    def place(self) -> dict[str, Any]:
        place = {"stream": to_portable(self.stream.position())}
        return place if self.generators is None else {**place, "generators": self.generators}


def unread(loader: StreamLoader, consumed: int) -> dict[str, Any]:
    """The position of a stream of which only the number of samples read is known."""
    if loader.num_workers > 1:
        raise ValueError(
            f"dataloader_num_workers={loader.num_workers}: the checkpoint does not say how far each worker read into "
            "the stream. Resume with dataloader_num_workers=0, or set ignore_data_skip=True to begin the epoch anew."
        )
    place = {"num_read": consumed, "is_shared": True, "is_ended": False, "dataset": None}
    return {"num_workers": loader.num_workers, "last": -1, "workers": [place]}


class StatefulReader(Reader):
    """Over someone else's loader that has `state_dict` and `load_state_dict` (torchdata's, for instance)."""

    def __init__(self, loader: Any, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        self.loader = loader
        self.is_ended = bool(saved and saved.get("is_ended"))
        if saved is None or "loader" not in saved:
            self.iterator = iter(loader)
            return
        if getattr(loader, "persistent_workers", False):
            logger.warning(
                "%s keeps its workers (persistent_workers=True): what they are after a restart is not what they were, "
                "so the run does not go on bit for bit. Set persistent_workers=False for that.",
                type(loader).__name__,
            )
        if not consumed:
            with saved.restoring():
                loader.load_state_dict(from_portable(saved["loader"]))
            self.iterator = begin_pass(iter(loader), loader)
            return
        # at its end such a loader stands at the start of the next epoch; torchdata's would draw the same order again
        if not (self.is_ended and is_of_torchdata(loader)):
            with saved.restoring():
                loader.load_state_dict(from_portable(saved["loader"]))
        with generators_at(None):
            self.iterator = iter(()) if self.is_ended else iter(loader)
        # not every such loader brings back the generators that the next epoch's order comes from
        with saved.restoring():
            restore_own(saved.get("own") or {}, own_generators(loader))

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.is_ended = True
            raise

    def place(self) -> dict[str, Any]:
        return {
            "loader": to_portable(self.loader.state_dict()),
            "is_ended": self.is_ended,
            "own": capture_own(own_generators(self.loader)),
        }


class ReplayReader(Reader):
    """Over any other iterable of batches: what was read is read again, under the generators of the epoch's start."""

    def __init__(self, loader: Any, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        forget_workers(loader)
        own = own_generators(loader)
        sampler = getattr(loader, "sampler", None)
        self.fallback_size = getattr(loader, "batch_size", None) or 1
        self.sampler = sampler if callable(getattr(sampler, "set_position", None)) else None
        self.generators = capture_generators(own) if saved is None else saved.generators(own)
        if saved is None or not consumed:
            self.iterator = iter(loader)
        elif self.sampler is not None:
            if "order" in saved:
                with saved.restoring():
                    self.sampler.load_state_dict(saved["order"])
            self.sampler.set_position(consumed)
            self.iterator = iter(loader)
        else:
            with generators_at(self.generators, own):
                self.iterator = self.replay(iter(loader), consumed)

    def replay(self, source: Iterator[Any], consumed: int) -> Iterator[Any]:
        """The batches after the first `consumed` samples; one that only some of its samples were taken from is cut."""
        left: list[Any] = []
        reread(itertools.islice(self.passing(source, consumed, left), consumed), consumed, "samples")
        return itertools.chain(left, source)

    def passing(self, source: Iterator[Any], consumed: int, left: list[Any]) -> Iterator[None]:
        """One item per sample read again; what a batch holds beyond `consumed` is put into `left`."""
        for batch in source:
            size = self.count(batch)
            if size > consumed:
                left.append(cut_batch(batch, size, consumed, size))
            yield from itertools.repeat(None, min(size, consumed))
            consumed -= size
            if consumed <= 0:
                return

    def count(self, batch: Any) -> int:
        try:
            return batch_size_of(batch)
        except ValueError:
            return int(self.fallback_size)

    def place(self) -> dict[str, Any]:
        place = {"generators": self.generators}
        if self.sampler is not None and hasattr(self.sampler, "state_dict"):
            place["order"] = self.sampler.state_dict()
        return place


class DealtReader(Reader):
    """Over a loader that one process reads for all: what this one is dealt of it."""

    def __init__(self, loader: DispatchedLoader, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        self.inner, source = None, None
        if loader.deal.reads:
            try:
                self.inner = open_reader(loader.loader, consumed, batches, saved)
                source = sized(self.inner)
            except Exception as error:
                source = failing(error)
        self.dealt = DealtBatches(loader.deal, source)
        self.iterator = self.dealt

    def count(self, batch: Any) -> int:
        return self.dealt.num_samples

    def place(self) -> dict[str, Any]:
        return self.inner.place() if self.inner is not None else {}


def sized(reader: Reader) -> Iterator[tuple[Any, int]]:
    """The batches of a reader, each with its number of samples."""
    before = reader.consumed
    for batch in reader:
        yield batch, reader.consumed - before
        before = reader.consumed


def forget_workers(loader: Any) -> None:
    """Let someone else's loader start its workers anew, which is when torch seeds them.

    Kept ones would have drawn what they drew in the epochs before, and an epoch would begin with one draw less than the
    first of a process: neither can be had again after a restart.
    """
    if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is not None:
        logger.info("persistent_workers: the loader's workers start anew with each epoch, so that it can be resumed.")
        loader._iterator = None


class Feed:
    """Hands out the micro-batches of one update at a time. Its position counts samples consumed, never prefetched.

    Args:
        loader: from `make_loader`, or any iterable of batches.
        accumulation: micro-batches of one update.
        collect: `(iterator, accumulation) -> (batches, num_items)`: draws the window; the Trainer's get_batch_samples.
        ignore_data_skip: begin the epoch in progress anew after a restart.

    Attributes:
        epoch: the epoch in progress.
        consumed: samples consumed in it, by all processes.
        batches: micro-batches consumed in it, of the process that had most.
        meet: `(window, samples in it) -> (window, samples, micro-batches)`: with other processes, what the window is
            for all of them. None: there are none.
    """

    meet: Callable[[tuple[list[Any], Any], int], tuple[tuple[list[Any], Any], int, int]] | None = None

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        collect: Callable[[Iterator[Any], int], tuple[list[Any], Any]],
        ignore_data_skip: bool = False,
    ) -> None:
        self.loader, self.accumulation, self.collect = loader, accumulation, collect
        self.ignore_data_skip = ignore_data_skip
        self.epoch = self.consumed = self.batches = 0
        self._num_read = 0  # where the reader stands: it counts what is taken here, the position what all take
        self._reader: Reader | None = None
        self._saved: Saved | None = None  # a position that the next start_epoch goes to
        self._is_at_end = False  # the latest window was empty
        self._largest: int | None = 0  # the most samples that a window held; None: a position did not say

    @property
    def is_restored(self) -> bool:
        """Whether a position was loaded that `start_epoch` has not gone to yet."""
        return self._saved is not None

    @property
    def is_common(self) -> bool:
        """Whether the position is the same on all processes: they read parts of one order, and need no more."""
        if isinstance(self.loader, DispatchedLoader):
            return True  # that of the one process which reads
        return isinstance(self.loader, IndexedLoader) and self.loader.batches.is_positionable

    @property
    def _is_in_order(self) -> bool:
        """Whether a place in the data is a number of samples of all: this process reads its parts of one order."""
        loader = self.loader
        return self.is_common or (isinstance(loader, IndexedLoader) and loader.batches.batch_size is not None)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in the one that was loaded.

        Our loaders leave the global generators as they were; whatever is read again, any loader does.

        Raises:
            ValueError: the loaded position cannot be reached with this loader; names the option and the remedy.
        """
        saved, self._saved = self._saved, None
        if saved is not None and saved["epoch"] != epoch:
            saved = None
        self._reader = None
        source = source_of(self.loader)
        announce_epoch(source, epoch)
        consumed, batches = (0, 0) if saved is None else place_in(self.loader, saved)
        if saved is not None and consumed == 0:
            with saved.restoring():
                restore_own(saved.get("own") or {}, own_generators(source))
            if not self._begins_at(saved):
                saved = None
        self.epoch = epoch
        own = consumed if saved is None or self._is_in_order else int(saved.get("own_consumed", consumed))
        self._reader = open_reader(self.loader, own, batches, saved)
        self.consumed, self.batches, self._num_read = consumed, batches, own

    def draw(self) -> tuple[list[Any], Any]:
        """The next window: (micro-batches, what they were counted as); no batches at the end of the epoch."""
        reader = self._reader
        if reader is None:
            return [], None
        window = self.collect(itertools.islice(reader, self.accumulation), self.accumulation)
        num_samples = reader.consumed - self._num_read
        self._num_read = reader.consumed
        if self.meet is None:
            self.batches = reader.batches
        else:
            window, num_samples, num_batches = self.meet(window, num_samples)
            self.batches += num_batches
        self.consumed += num_samples
        if self._largest is not None and num_samples > self._largest:
            self._largest = num_samples
        self._is_at_end = not window[0]
        return window

    def finish_epoch(self) -> None:
        """Count this epoch as done: a position saved from now on is the start of the next one."""
        is_left = self._reader is not None and not self._is_at_end
        self._reader = None
        self.epoch, self.consumed, self.batches = self.epoch + 1, 0, 0
        position = Saved(self.state_dict())
        if is_left and self._begins_at(position):  # go on where it was left, as a resumed run does
            self._saved = position

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able: epoch, samples and micro-batches consumed, and what the loader's kind needs."""
        if self._saved is not None:
            return dict(self._saved)
        place = self._reader.place() if self._reader is not None else self._between()
        counts_own = self.meet is not None and self._reader is not None and not self._is_in_order
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "batches": self.batches,
            "batch_size": samples_at_once(self.loader),
            "num_samples": sample_count(self.loader),
            "largest": self._largest,
            **({"is_dealt": True} if isinstance(self.loader, DispatchedLoader) else {}),
            **({"own_consumed": self._num_read} if counts_own else {}),
            **place,
        }

    def _between(self) -> dict[str, Any]:
        """What the next epoch begins from: generators that its order is drawn from, and a place that goes on."""
        loader = source_of(self.loader)
        own = own_generators(loader)
        if isinstance(loader, IndexedLoader | StreamLoader):
            own.pop("loader", None)
        place: dict[str, Any] = {"own": capture_own(own)} if own else {}
        if isinstance(loader, StreamLoader):
            standing = loader.standing()
            if standing is not None:
                place["stream"] = to_portable(standing)
        elif is_stateful(loader) and not is_of_torchdata(loader):  # those begin from generators alone
            place["loader"] = to_portable(loader.state_dict())
        return place

    def _begins_at(self, saved: Saved) -> bool:
        """Whether a position between two epochs says where this loader's data goes on."""
        source = source_of(self.loader)
        if isinstance(source, StreamLoader):
            return "stream" in saved and not source.num_workers
        return "loader" in saved and is_stateful(source)

    def load_state_dict(self, state: Mapping[str, Any], source: str = Saved.source) -> None:
        """Go to a position at the next `start_epoch` of its epoch. Only `epoch` and `consumed` are needed.

        Args:
            state: from `state_dict`.
            source: where it was read, for the error of a position that cannot be gone to.
        """
        saved = Saved(state)
        if self.ignore_data_skip:
            saved = Saved(epoch=saved["epoch"], consumed=0, batches=0)
        saved.source = source
        self._largest = state.get("largest")
        self._saved = saved
        self.epoch, self.consumed, self.batches = saved["epoch"], saved["consumed"], saved.get("batches", 0)

    def is_within(self, num_windows: int) -> bool:
        """Whether so many windows can have held the samples consumed: to read up to there could take for ever."""
        return self._largest is None or self.consumed <= num_windows * self._largest

    def close(self) -> None:
        """Shut the workers down."""
        self._reader = None
        if isinstance(self.loader, IndexedLoader | StreamLoader | DispatchedLoader):
            self.loader.close()


def open_reader(loader: Any, consumed: int, batches: int, saved: Saved | None) -> Reader:
    """The reader for this kind of loader, at its place."""
    kind: Callable[[Any, int, int, Saved | None], Reader] = ReplayReader
    if isinstance(loader, DispatchedLoader):
        kind = DealtReader
    elif isinstance(loader, IndexedLoader):
        kind = IndexReader
    elif isinstance(loader, StreamLoader):
        kind = StreamedReader
    elif is_stateful(loader):
        kind = StatefulReader
    return kind(loader, consumed, batches, saved)


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its own position. Loaders that accelerate prepared say so by an attribute."""
    offers = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return offers and bool(getattr(loader, "use_stateful_dataloader", True))


def is_of_torchdata(loader: Any) -> bool:
    """Whether a loader is one of torchdata, whose state at the end of an epoch begins the same order again."""
    return type(loader).__module__.startswith("torchdata.")


def announce_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to everything that shuffles by it, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = [getattr(batch_sampler, name, None) for name in ("batch_sampler", "sampler")]
    holders = [loader, batch_sampler, *inner, getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    if isinstance(loader, IndexedLoader):
        holders = [loader, loader.dataset]
    elif isinstance(loader, StreamLoader):
        holders = [loader]
    told: list[Any] = []
    for holder in holders:
        if holder is not None and not any(holder is other for other in told):
            told.append(holder)
            set_epoch(holder, epoch)


def place_in(loader: Any, saved: Mapping[str, Any]) -> tuple[int, int]:
    """(samples, micro-batches) consumed; micro-batches of the present size, so that the epoch ends at its length."""
    consumed, batches = int(saved["consumed"]), int(saved.get("batches", 0))
    batch_size = samples_at_once(loader)
    if batch_size is None or batch_size == saved.get("batch_size"):
        return consumed, batches
    source = source_of(loader)
    if isinstance(source, IndexedLoader) and source.batches.shares is not None:
        return consumed, source.batches.shares.num_slots(consumed)
    num_samples, num_batches = sample_count(loader), loader_length(loader)
    if num_samples is None or num_batches is None or isinstance(source, StreamLoader):
        return consumed, consumed // batch_size
    left = max(num_samples - consumed, 0)
    drops = bool(getattr(loader, "drop_last", False)) if isinstance(source, DataLoader) else False
    return consumed, max(num_batches - (left // batch_size if drops else -(-left // batch_size)), 0)
