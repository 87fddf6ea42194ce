"""Iterates over training data one optimizer step at a time, with a position that is saved and restored.

A reader is one pass over a loader. There is a reader for each way to restore a loader's position: by index (our loader
of an indexed dataset), by the state of a stream (our loader of a stream), by the loader's own `state_dict`, and for any
other iterable by reading the same batches again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.pytorch.data.batches import batch_size_of, cut_batch
from paceline.pytorch.data.dispatch import DispatchedBatches, DispatchedLoader, failing, source_of
from paceline.pytorch.data.generators import capture_generators, capture_own, generators_at, own_generators, restore_own
from paceline.pytorch.data.indexed import IndexedLoader, end_kept_workers, set_epoch
from paceline.pytorch.data.lengths import global_micro_batch_size, loader_length, sample_count
from paceline.pytorch.data.portable import from_portable, to_portable
from paceline.pytorch.data.stream import StreamLoader, begin_pass, reread, samples_in

logger = logging.getLogger(__name__)

Window = tuple[list[Any], Any]  # micro-batches of an optimizer step, and their `num_items_in_batch`
Collect = Callable[[Iterator[Any], int], Window]
Synchronize = Callable[[Window, int], tuple[Window, int, int]]


class Saved(dict[str, Any]):
    """A saved position, and the file it was read from."""

    source = "The saved position"

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Converts errors that a damaged position causes in the block to a ValueError that names the file."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"{self.source} is damaged, or does not fit this data: {error}") from error

    def generators(self, own: Mapping[str, torch.Generator]) -> dict[str, Any]:
        """Returns the saved states of the generators, validated; the current ones if none were saved."""
        if "generators" not in self:
            return capture_generators(own)
        with self.restoring(), generators_at(self["generators"], own):
            return dict(self["generators"])


class Reader:
    """Iterates over the batches of one epoch, and counts them.

    Attributes:
        consumed: samples taken in this epoch.
        batches: micro-batches taken in this epoch.
    """

    iterator: Iterator[Any]

    def __init__(self, consumed: int, batches: int) -> None:
        self.consumed = consumed
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.iterator)
        self.consumed += self.count(batch)
        self.batches += 1
        return batch

    def count(self, batch: object) -> int:
        """Returns the number of samples in the last batch."""
        return batch_size_of(batch)

    def place(self) -> dict[str, Any]:
        """Returns the JSON-serializable state that restores this reader, besides the number of samples consumed."""
        return {}


class IndexReader(Reader):
    """A reader over our loader of an indexed dataset; resumes at any sample without reading earlier ones."""

    def __init__(self, loader: IndexedLoader, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        indices = loader.batches
        own = own_generators(loader)
        own.pop("loader", None)
        self.sampler = indices.sampler if indices.is_positionable else None
        # an order drawn from a generator is only reproducible from the same generator state
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
        # the sizes and indices of this pass, even if other code starts another pass
        self.sizes, self.indices = indices.sizes, indices.indices

    def __next__(self) -> Any:  # duplicates the base class to save a call on the hot path
        try:
            batch = next(self.iterator)
        except StopIteration as error:
            if self.sizes:  # a collator in a worker raised it
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
    """A reader over our loader of a stream."""

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

    def count(self, batch: object) -> int:
        return self.sizes.popleft()

    def place(self) -> dict[str, Any]:
        place = {"stream": to_portable(self.stream.position())}
        return place if self.generators is None else {**place, "generators": self.generators}


def unread(loader: StreamLoader, consumed: int) -> dict[str, Any]:
    """Returns the position of a stream of which only the number of samples read is known."""
    if loader.num_workers > 1:
        raise ValueError(
            f"dataloader_num_workers={loader.num_workers}: the checkpoint does not say how far each worker read into "
            "the stream. Resume with dataloader_num_workers=0, or set ignore_data_skip=True to restart the epoch."
        )
    place = {"num_read": consumed, "is_shared": True, "is_ended": False, "dataset": None}
    return {"num_workers": loader.num_workers, "last": -1, "workers": [place]}


class StatefulReader(Reader):
    """A reader over a user's loader with `state_dict` and `load_state_dict` (torchdata's, for instance)."""

    def __init__(self, loader: Any, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        self.loader = loader
        self.is_ended = bool(saved and saved.get("is_ended"))
        if saved is None or "loader" not in saved:
            self.iterator = iter(loader)
            return
        if getattr(loader, "persistent_workers", False):
            logger.warning(
                "%s keeps its workers (persistent_workers=True): a restart loses their state, so a "
                "resumed run is not equal bit for bit. Set persistent_workers=False for that.",
                type(loader).__name__,
            )
        if not consumed:
            with saved.restoring():
                loader.load_state_dict(from_portable(saved["loader"]))
            self.iterator = begin_pass(iter(loader), loader)
            return
        # the state at the end of an epoch starts the next epoch; torchdata's would repeat the same order
        if not (self.is_ended and is_of_torchdata(loader)):
            with saved.restoring():
                loader.load_state_dict(from_portable(saved["loader"]))
        with generators_at(None):
            self.iterator = iter(()) if self.is_ended else iter(loader)
        # some loaders do not restore the generators that determine the next epoch's order
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
    """A reader over any other iterable of batches.

    To resume, it restores the generators of the epoch's start and reads the epoch again up to the position.
    """

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
        """Returns the batches after the first `consumed` samples; a partly consumed batch is sliced."""
        left: list[Any] = []
        reread(itertools.islice(self.passing(source, consumed, left), consumed), consumed, "samples")
        return itertools.chain(left, source)

    def passing(self, source: Iterator[Any], consumed: int, left: list[Any]) -> Iterator[None]:
        """Yields one item per sample that is read again; appends the rest of a partly consumed batch to `left`."""
        for batch in source:
            size = self.count(batch)
            if size > consumed:
                left.append(cut_batch(batch, size, consumed, size))
            yield from itertools.repeat(None, min(size, consumed))
            consumed -= size
            if consumed <= 0:
                return

    def count(self, batch: object) -> int:
        try:
            return batch_size_of(batch)
        except ValueError:
            return int(self.fallback_size)

    def place(self) -> dict[str, Any]:
        place = {"generators": self.generators}
        if self.sampler is not None and hasattr(self.sampler, "state_dict"):
            place["order"] = self.sampler.state_dict()
        return place


class DispatchedReader(Reader):
    """A reader over a loader that one process reads for all; yields the batches dispatched to this process."""

    def __init__(self, loader: DispatchedLoader, consumed: int, batches: int, saved: Saved | None) -> None:
        super().__init__(consumed, batches)
        self.inner, source = None, None
        if loader.dispatcher.reads:
            try:
                self.inner = open_reader(loader.loader, consumed, batches, saved)
                source = sized(self.inner)
            except Exception as error:
                source = failing(error)
        self.dispatched = DispatchedBatches(loader.dispatcher, source)
        self.iterator = self.dispatched

    def count(self, batch: object) -> int:
        return self.dispatched.num_samples

    def place(self) -> dict[str, Any]:
        return self.inner.place() if self.inner is not None else {}


def sized(reader: Reader) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a reader, each with its number of samples."""
    before = reader.consumed
    for batch in reader:
        yield batch, reader.consumed - before
        before = reader.consumed


def forget_workers(loader: object) -> None:
    """Makes a user's loader start new workers, so that torch seeds them.

    Persistent workers keep the generator state of earlier epochs, and from the second epoch on the main process draws
    one number less per epoch. Neither can be restored after a restart.
    """
    if end_kept_workers(loader):
        logger.info("persistent_workers: workers are restarted at each epoch, so that the run can be resumed.")


class StatefulDataIterator:
    """Iterates over the micro-batches of one optimizer step at a time.

    The position counts the samples that were consumed, not those that were prefetched.

    Args:
        loader: from `make_loader`, or any iterable of batches.
        accumulation: micro-batches per optimizer step.
        collect: `(iterator, accumulation) -> (batches, num_items)`: draws the accumulation window; the Trainer's
            get_batch_samples.
        ignore_data_skip: a resumed run restarts the epoch in progress.

    Attributes:
        epoch: the epoch in progress.
        consumed: samples of this epoch consumed by all processes.
        batches: largest number of micro-batches of this epoch that a process consumed.
        synchronize: `(window, samples in it) -> (window, samples, micro-batches)`: agrees on the accumulation window
            with other processes. None with a single process.
        before_epoch: called before an epoch starts; it may replace the loader.
        meters: add entries to the log rows.
    """

    synchronize: Synchronize | None = None
    before_epoch: Callable[[], None] | None = None
    meters: tuple[Any, ...] = ()

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        collect: Collect,
        ignore_data_skip: bool = False,
    ) -> None:
        self.loader = loader
        self.accumulation = accumulation
        self.collect = collect
        self.ignore_data_skip = ignore_data_skip
        self.epoch = self.consumed = self.batches = 0
        self._num_read = 0  # samples that this process took; the position counts those of all processes
        self._reader: Reader | None = None
        self._saved: Saved | None = None  # a position for the next start_epoch
        self._is_at_end = False  # the last window was empty
        self._largest: int | None = 0  # most samples in a window so far; None: the saved position lacks it

    @property
    def is_restored(self) -> bool:
        """Returns True if `start_epoch` still has to apply a loaded position."""
        return self._saved is not None

    @property
    def is_common(self) -> bool:
        """Returns True if the position is the same on all processes, because they read shards of one order."""
        if isinstance(self.loader, DispatchedLoader):
            return True  # the position is that of the reading process
        return isinstance(self.loader, IndexedLoader) and self.loader.batches.is_positionable

    @property
    def _is_in_order(self) -> bool:
        """Returns True if a position counts samples globally, because this process reads a shard of one order."""
        loader = self.loader
        return self.is_common or (isinstance(loader, IndexedLoader) and loader.batches.batch_size is not None)

    def synchronize_with(self, synchronize: Synchronize, collect: Collect) -> None:
        """Makes `draw` synchronize each window with the other ranks from now on.

        Args:
            synchronize, collect: see the class.
        """
        self.synchronize = synchronize
        self.collect = collect

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch at its beginning, or at the loaded position.

        Our loaders leave the global generators unchanged. If samples are read again, every loader does.

        Raises:
            ValueError: the loaded position cannot be reached with this loader; the message names the option and the
                remedy.
        """
        if self.before_epoch is not None:
            self.before_epoch()
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
        # batches is negative if the rest of the restored order has more micro-batches than an epoch
        self.consumed, self.batches, self._num_read = consumed, max(batches, 0), own

    def replace_loader(self, loader: Any, accumulation: int) -> None:
        """Reads from another loader from the next epoch on.

        Args:
            loader: see the class.
            accumulation: micro-batches per optimizer step.
        """
        self.close()
        self.loader, self.accumulation = loader, accumulation
        self._saved = None  # between two epochs: a position of the old loader

    def draw(self) -> tuple[list[Any], Any]:
        """Returns the next accumulation window: (micro-batches, `num_items_in_batch`).

        The window has no micro-batches at the end of the epoch.
        """
        reader = self._reader
        if reader is None:
            return [], None
        window = self.collect(itertools.islice(reader, self.accumulation), self.accumulation)
        num_samples = reader.consumed - self._num_read
        self._num_read = reader.consumed
        if self.synchronize is None:
            self.batches = reader.batches
        else:
            window, num_samples, num_batches = self.synchronize(window, num_samples)
            self.batches += num_batches
        self.consumed += num_samples
        if self._largest is not None and num_samples > self._largest:
            self._largest = num_samples
        self._is_at_end = not window[0]
        return window

    def finish_epoch(self) -> None:
        """Ends this epoch; a position saved from now on is the start of the next epoch."""
        is_left = self._reader is not None and not self._is_at_end
        self._reader = None
        self.epoch, self.consumed, self.batches = self.epoch + 1, 0, 0
        position = Saved(self.state_dict())
        if is_left and self._begins_at(position):  # start the next epoch as a resumed run would
            self._saved = position

    def state_dict(self) -> dict[str, Any]:
        """Returns the JSON-serializable position: epoch, samples and micro-batches consumed, and the reader's state."""
        if self._saved is not None:
            return dict(self._saved)
        place = self._reader.place() if self._reader is not None else self._between()
        counts_own = self.synchronize is not None and self._reader is not None and not self._is_in_order
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "batches": self.batches,
            "batch_size": global_micro_batch_size(self.loader),
            "num_samples": sample_count(self.loader),
            "largest": self._largest,
            **({"is_dealt": True} if isinstance(self.loader, DispatchedLoader) else {}),
            **({"own_consumed": self._num_read} if counts_own else {}),
            **place,
        }

    def _between(self) -> dict[str, Any]:
        """Returns the state at the start of the next epoch: the generators of its order, and a stateful loader's
        position.
        """
        loader = source_of(self.loader)
        own = own_generators(loader)
        if isinstance(loader, IndexedLoader | StreamLoader):
            own.pop("loader", None)
        place: dict[str, Any] = {"own": capture_own(own)} if own else {}
        if isinstance(loader, StreamLoader):
            standing = loader.standing()
            if standing is not None:
                place["stream"] = to_portable(standing)
        elif is_stateful(loader) and not is_of_torchdata(loader):  # torchdata's epochs depend on generators only
            place["loader"] = to_portable(loader.state_dict())
        return place

    def _begins_at(self, saved: Saved) -> bool:
        """Returns True if a position saved between two epochs contains this loader's state."""
        source = source_of(self.loader)
        if isinstance(source, StreamLoader):
            return "stream" in saved and not source.num_workers
        return "loader" in saved and is_stateful(source)

    def load_state_dict(self, state: Mapping[str, Any], source: str = Saved.source) -> None:
        """Loads a position for the next `start_epoch` of its epoch. Only `epoch` and `consumed` are required.

        Args:
            state: from `state_dict`.
            source: the file it was read from, for the error message if the position cannot be restored.
        """
        saved = Saved(state)
        if self.ignore_data_skip:
            saved = Saved(epoch=saved["epoch"], consumed=0, batches=0)
        saved.source = source
        self._largest = state.get("largest")
        self._saved = saved
        self.epoch, self.consumed, self.batches = saved["epoch"], saved["consumed"], saved.get("batches", 0)

    def is_within(self, num_windows: int) -> bool:
        """Returns True if `num_windows` windows can contain the samples consumed.

        This rejects a wrong position, because reading up to it might never end.
        """
        return self._largest is None or self.consumed <= num_windows * self._largest

    def close(self) -> None:
        """Shuts the workers down."""
        self._reader = None
        if isinstance(self.loader, IndexedLoader | StreamLoader | DispatchedLoader):
            self.loader.close()
        elif not is_stateful(self.loader):
            end_kept_workers(self.loader)


def open_reader(loader: object, consumed: int, batches: int, saved: Saved | None) -> Reader:
    """Returns the reader for this type of loader, at its position."""
    kind: Callable[[Any, int, int, Saved | None], Reader] = ReplayReader
    if isinstance(loader, DispatchedLoader):
        kind = DispatchedReader
    elif isinstance(loader, IndexedLoader):
        kind = IndexReader
    elif isinstance(loader, StreamLoader):
        kind = StreamedReader
    elif is_stateful(loader):
        kind = StatefulReader
    return kind(loader, consumed, batches, saved)


def is_stateful(loader: object) -> bool:
    """Returns True if a loader saves its own position; loaders prepared by accelerate declare it by an attribute."""
    offers = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return offers and bool(getattr(loader, "use_stateful_dataloader", True))


def is_of_torchdata(loader: object) -> bool:
    """Returns True for a loader of torchdata, whose state at the end of an epoch repeats the same order."""
    return type(loader).__module__.startswith("torchdata.")


def announce_epoch(loader: object, epoch: int) -> None:
    """Sets the epoch of the loader, its samplers and its dataset, each once."""
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


def place_in(loader: object, saved: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (samples, micro-batches) consumed at a saved position.

    Micro-batches are converted to the current micro-batch size, so that the length of the epoch stays correct.
    """
    consumed, batches = int(saved["consumed"]), int(saved.get("batches", 0))
    batches_after = getattr(getattr(loader, "batch_sampler", None), "batches_after", None)
    if batches_after is not None:
        return consumed, len(loader) - batches_after(saved)  # type: ignore[arg-type]
    batch_size = global_micro_batch_size(loader)
    if batch_size is None or batch_size == saved.get("batch_size"):
        return consumed, batches
    source = source_of(loader)
    if isinstance(source, IndexedLoader) and source.batches.data_shard is not None:
        return consumed, source.batches.data_shard.num_slots(consumed)
    num_samples, num_batches = sample_count(loader), loader_length(loader)
    if num_samples is None or num_batches is None or isinstance(source, StreamLoader):
        return consumed, consumed // batch_size
    left = max(num_samples - consumed, 0)
    drops = bool(getattr(loader, "drop_last", False)) if isinstance(source, DataLoader) else False
    return consumed, max(num_batches - (left // batch_size if drops else -(-left // batch_size)), 0)
