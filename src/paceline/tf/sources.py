"""Where batches come from: arrays, samples, tf.data, PyDataset, generators; each can be read from any place on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.lengths import find_lengths, length_grouped_order
from paceline.tf.batches import Array, collate, leaves, map_leaves, size_of, to_array
from paceline.tf.framework import keras, tf

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
READS_OWN = "paceline_source"  # on a tf.data.Dataset that was made of a source: read that instead
# what takes batches apart, or puts something in their place that only its function knows
MAKE_SAMPLES = ("Unbatch", "FlatMap", "Interleave", "ParallelInterleave", "Window")


def epoch_order(size: int, seed: int, epoch: int) -> Array:
    """A permutation of `range(size)`, a function of (seed, epoch) alone.

    Sorted by the raw output of a counting generator (Philox; Salmon et al., 2011), which no release of numpy changes.
    """
    return np.argsort(np.random.Philox(key=[seed % 2**64, epoch]).random_raw(size), kind="stable")


class Source:
    """Batches of one data set, epoch after epoch.

    Attributes:
        batch_size: samples per batch; None where the data has batches of its own.
        num_samples: in one epoch; None: unknown.
        num_batches: in one epoch; None: unknown.
        settings: what the order of an epoch depends on, JSON-able; saved with the position.
    """

    batch_size: int | None = None
    num_samples: int | None = None
    num_batches: int | None = None
    settings: Mapping[str, Any] = {}

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        """The batches of an epoch, on from where `consumed` samples in `batches` batches have been read."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.read(0)

    def warn_of_order(self) -> None:
        """Say so where a place in the data cannot be gone back to exactly."""

    def sample_ids(self, epoch: int, first: int, count: int) -> list[int]:
        """The numbers of `count` samples in the data, from the `first` one of an epoch on; where samples have no
        numbers, their places in the epoch."""
        return list(range(first, first + count))

    def place(self, consumed: int, batches: int) -> int:
        """How many batches of the present size `consumed` samples make; `batches` where there is no telling."""
        return -(-consumed // self.batch_size) if self.batch_size else batches


class Indexed(Source):
    """Samples that can be read by their number, in a random order of each epoch or as they lie.

    Args:
        size: number of samples.
        take: list of numbers -> batch.
        batch_size: samples per batch.
        seed: of the order; None: as they lie.
        drop_last: leave out a last batch that is not full.
        lengths: of every sample: those of similar length are put together; None: they are not.
    """

    def __init__(
        self,
        size: int,
        take: Callable[[Array], Any],
        *,
        batch_size: int,
        seed: int | None,
        drop_last: bool,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.num_samples, self.take, self.batch_size = size, take, batch_size
        self.num_batches = size // batch_size if drop_last else -(-size // batch_size)
        self.drop_last, self.lengths = drop_last, lengths
        self.settings = {"kind": "sequential"} if seed is None else {"kind": "random", "seed": seed}
        if lengths is not None:
            self.settings |= {"kind": "group_by_length", "batch_size": batch_size}

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        step, order = self.batch_size or 1, self.order(epoch)
        for start in range(consumed, len(order), step):
            numbers = order[start : start + step]
            if self.drop_last and len(numbers) < step:
                return
            yield self.take(numbers)

    def order(self, epoch: int) -> Array:
        """The numbers of all samples in the order of an epoch."""
        size = self.num_samples or 0
        order = epoch_order(size, self.settings["seed"], epoch) if "seed" in self.settings else np.arange(size)
        if self.lengths is None:
            return order
        return np.array(length_grouped_order(self.lengths, self.settings["batch_size"], order), dtype=np.int64)

    def sample_ids(self, epoch: int, first: int, count: int) -> list[int]:
        """The numbers of samples in the data."""
        return [int(number) for number in self.order(epoch)[first : first + count]]


class OwnBatches(Source):
    """A Keras PyDataset: read by the number of a batch, of whatever size it makes them."""

    def __init__(self, dataset: Any, *, seed: int | None) -> None:
        self.dataset = dataset
        self.num_batches = dataset.num_batches if dataset.num_batches is not None else len(dataset)
        self.settings = {"kind": "sequential"} if seed is None else {"kind": "random", "seed": seed}

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        size = self.num_batches or 0
        order = epoch_order(size, self.settings["seed"], epoch) if "seed" in self.settings else np.arange(size)
        self.dataset.on_epoch_begin()
        for number in order[batches:].tolist():
            yield self.dataset[number]
        self.dataset.on_epoch_end()


class TensorData(Source):
    """A tf.data.Dataset, of samples or of batches.

    A place in it is gone to by skipping: the batches before are made again, so that what comes after is the same.

    Args:
        make: epoch -> the dataset of batches.
        num_samples, num_batches: of an epoch, where known.
        batch_size: samples per batch, where it is one.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        num_samples: int | None,
        num_batches: int | None,
        batch_size: int | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.make, self.num_samples, self.num_batches = make, num_samples, num_batches
        self.batch_size, self.settings = batch_size, settings
        self.num_reads = 0  # of which each moved a shuffle of the user's on to its next order

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        dataset = self.make(epoch)
        if any(shuffle._reshuffle_each_iteration for shuffle in shuffles_of(dataset)):
            while self.num_reads < epoch:
                iter(dataset)
                self.num_reads += 1
        self.num_reads = epoch + 1
        return iter(dataset.skip(batches) if batches else dataset)

    def warn_of_order(self) -> None:
        """Say so where the user's own shuffle has no seed."""
        if any(int(shuffle._seed) == int(shuffle._seed2) == 0 for shuffle in shuffles_of(self.make(0))):
            logger.warning(
                "The training data is shuffled by tf.data without a seed, in an order that nothing can repeat: the run "
                "goes on from its place, but other samples are there than would have been. Pass shuffle(..., seed=...)."
            )


class Stream(Source):
    """Samples that only come one after the other: an iterable, or a function that returns one.

    A place in it is gone to by reading the samples before once more.
    """

    def __init__(self, data: Any, collate_samples: Collate, *, batch_size: int, drop_last: bool) -> None:
        self.data, self.collate, self.batch_size, self.drop_last = data, collate_samples, batch_size, drop_last
        self.settings = {"kind": "stream"}
        if iter_is_itself(data):
            logger.warning(
                "The data is an iterator, which can be read once: a second epoch, a second evaluation and a resumed "
                "run find it empty. Pass the function that makes it instead."
            )

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        set_epoch = getattr(self.data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        samples = iter(self.data() if callable(self.data) else self.data)
        for _ in itertools.islice(samples, consumed):
            pass
        while chunk := list(itertools.islice(samples, self.batch_size)):
            if self.drop_last and len(chunk) < (self.batch_size or 0):
                return
            yield self.collate(chunk)


def iter_is_itself(data: Any) -> bool:
    """Whether data is an iterator, which is used up by reading it."""
    return hasattr(data, "__next__") and not callable(data)


def make_source(
    data: Any,
    *,
    batch_size: int,
    seed: int | None,
    drop_last: bool = False,
    collator: Collate | None = None,
    pad: Callable[[list[Any]], Any] | None = None,
    columns: Sequence[str] | None = None,
    lengths: Callable[[Any], Sequence[int]] | None = None,
) -> Source:
    """A source over whatever holds data.

    Args:
        data: `(features, labels)` arrays, a dict of arrays, a list of samples or anything with an index and a length
            (a `datasets.Dataset` too), a tf.data.Dataset of samples, a Keras PyDataset, an iterable of samples or a
            function that returns one.
        batch_size: samples per batch, over all replicas.
        seed: of the order; None: as the data lies.
        drop_last: leave out a last batch that is not full.
        collator: list of samples -> batch; None: rows are stacked.
        pad: for the default collator.
        columns: of a `datasets.Dataset`, those to read; None: all that are numbers.
        lengths: data -> length of every sample, to put those of similar length together; None: they are not.

    Raises:
        TypeError: it is none of these.
        ValueError: arrays differ in length, or a tf.data.Dataset holds batches already.
    """
    own = getattr(data, READS_OWN, None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "drop_last": drop_last}
    if lengths is not None:
        options["lengths"] = lengths(data)
    if isinstance(data, tf.data.Dataset):
        return source_of_samples(data, **options)
    if isinstance(data, keras.utils.PyDataset):
        return OwnBatches(data, seed=seed)
    collate_samples = collator if collator is not None else lambda samples: collate(samples, pad)
    if hasattr(data, "column_names") and hasattr(data, "select_columns") and hasattr(data, "__len__"):
        return source_of_table(data, columns, collate_samples, options)
    if is_arrays(data):
        return source_of_arrays(data, options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):

        def take(numbers: Array) -> Any:
            return collate_samples([data[number] for number in numbers.tolist()])

        return Indexed(len(data), take, **options)
    if (callable(data) or hasattr(data, "__iter__")) and not isinstance(data, Mapping):
        return Stream(data, collate_samples, batch_size=batch_size, drop_last=drop_last)
    lists = [name for name, column in data.items() if is_list(column)] if isinstance(data, Mapping) else []
    if lists:
        raise TypeError(
            f"A dict with Python lists ({', '.join(map(repr, lists))}) cannot be read as data: make arrays of them, "
            "{name: np.asarray(column) for name, column in data.items()}, or, where rows differ in length, use "
            "datasets.Dataset.from_dict(data)."
        )
    raise TypeError(
        f"A {type(data).__name__} cannot be read as data: pass arrays (features, labels), a list of samples, a "
        "tf.data.Dataset, a datasets.Dataset, a PyDataset, or a function that returns an iterator of samples."
    )


def lengths_of(data: Any, column: str, input_name: str | None) -> Sequence[int]:
    """The length of every sample, for `train_sampling_strategy="group_by_length"`.

    Args:
        data: a list of samples, which may be `(features, labels)`, or a `datasets.Dataset`.
        column: of it, that holds the lengths.
        input_name: what is measured where there is no such column; None: `input_ids`.

    Raises:
        ValueError: samples cannot be picked by their numbers, or have nothing to measure.
    """
    if isinstance(data, tf.data.Dataset | keras.utils.PyDataset) or not hasattr(data, "__len__") or is_arrays(data):
        raise ValueError(
            "train_sampling_strategy='group_by_length' needs samples of their own lengths that are read by number, and "
            f"the training data is a {type(data).__name__}: pass a list of samples or a datasets.Dataset, or use "
            "'random'; tf.data has bucket_by_sequence_length."
        )
    if len(data) and not isinstance(data[0], Mapping):
        parts = (data[number] for number in range(len(data)))
        features = [part[0] if isinstance(part, tuple) else part for part in parts]
        if not isinstance(features[0], Mapping) and np.ndim(features[0]):
            return [len(value) for value in features]
        return find_lengths(features, column, input_name)
    return find_lengths(data, column, input_name)


def is_list(column: Any) -> bool:
    """Whether a value of a dict is a column as a Python list: of numbers, texts, or lists of them; not of samples."""
    return isinstance(column, list) and all(isinstance(row, int | float | str | list) for row in column[:1])


def is_columns(data: Any) -> bool:
    """Whether a dict holds the columns of one data set, rather than several data sets by name."""
    return isinstance(data, dict) and all(hasattr(value, "shape") or is_list(value) for value in data.values())


def named_dataset(default: Any, asked: Any) -> Any:
    """The evaluation set that was asked for: itself, the one of that name in a dict of them, or None for the default.

    Raises:
        ValueError: there is none; the message lists the names that there are.
    """
    if isinstance(asked, str):
        names = list(default) if isinstance(default, Mapping) and not is_columns(default) else []
        if asked not in names:
            there = f"those of {', '.join(map(repr, names))}" if names else "no dict of them"
            raise ValueError(f"eval_dataset={asked!r}: the TFTrainer has no evaluation set of that name, but {there}.")
        return default[asked]
    data = default if asked is None else asked
    if data is None:
        raise ValueError("Evaluation needs an `eval_dataset`: pass one to TFTrainer, or to evaluate().")
    return data


def is_arrays(data: Any) -> bool:
    """Whether data is a nest of arrays whose rows are the samples."""
    if not isinstance(data, tuple | Mapping | np.ndarray) and not isinstance(data, tf.Tensor):
        return False
    found = list(leaves(data))
    return bool(found) and all(len(getattr(leaf, "shape", ())) > 0 for leaf in found)


def source_of_arrays(data: Any, options: Mapping[str, Any]) -> Source:
    """A source over arrays with one row per sample."""
    arrays = map_leaves(to_array, data)
    sizes = {len(leaf) for leaf in leaves(arrays)}
    if len(sizes) != 1:
        raise ValueError(f"The arrays differ in their number of rows: {sorted(sizes)}. Give each one row per sample.")
    return Indexed(sizes.pop(), lambda numbers: map_leaves(lambda leaf: leaf[numbers], arrays), **options)


def source_of_table(
    data: Any, columns: Sequence[str] | None, collate_samples: Collate, options: Mapping[str, Any]
) -> Source:
    """A source over a `datasets.Dataset`, rows of which are read together."""
    table = data if columns is None else data.select_columns([name for name in data.column_names if name in columns])

    def take(numbers: Array) -> Any:
        found = table[numbers.tolist()]
        names = list(found)
        return collate_samples([{name: found[name][row] for name in names} for row in range(len(numbers))])

    return Indexed(len(data), take, **options)


def source_of_samples(data: Any, *, batch_size: int, seed: int | None, drop_last: bool) -> Source:
    """A source over a tf.data.Dataset of samples, shuffled through a buffer of all of them where their number is known.

    Raises:
        ValueError: its elements are batches.
    """
    if is_batched(data):
        raise ValueError(
            "The tf.data.Dataset holds batches: pass it before .batch(), or with .unbatch(); "
            "per_device_train_batch_size and per_device_eval_batch_size make the batches. To use yours as they are, "
            "override get_train_tfdataset or get_eval_tfdataset."
        )
    size = known_size(data)
    shuffled = seed is not None and size is not None and size > 1

    def make(epoch: int) -> Any:
        dataset = data
        if shuffled:
            key = int(np.random.SeedSequence([seed or 0, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
            dataset = dataset.shuffle(size, seed=key, reshuffle_each_iteration=False)
        return dataset.batch(batch_size, drop_remainder=drop_last).prefetch(1)

    num_batches = None if size is None else size // batch_size if drop_last else -(-size // batch_size)
    settings = {"kind": "random", "seed": seed} if shuffled else {"kind": "sequential"}
    return TensorData(make, num_samples=size, num_batches=num_batches, batch_size=batch_size, settings=settings)


def source_of_batches(dataset: Any) -> Source:
    """A source over a tf.data.Dataset of batches, such as an own get_train_tfdataset returns."""
    own = getattr(dataset, READS_OWN, None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    if isinstance(dataset, Source):
        return dataset
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"A tf.data.Dataset of batches is needed; {type(dataset).__name__} was returned.")
    return TensorData(
        lambda epoch: dataset,
        num_samples=None,
        num_batches=known_size(dataset),
        batch_size=None,
        settings={"kind": "batches"},
    )


def shuffles_of(dataset: Any) -> Iterator[Any]:
    """The shuffles that a tf.data.Dataset is made with, but for those inside functions."""
    if type(dataset).__name__ == "_ShuffleDataset":
        yield dataset
    for source in dataset._inputs():
        yield from shuffles_of(source)


def known_size(dataset: Any) -> int | None:
    """The number of elements of a tf.data.Dataset; None where it is unknown or endless."""
    size = int(dataset.cardinality())
    return size if size >= 0 else None


def is_batched(dataset: Any, is_mapped: bool = False) -> bool:
    """Whether the elements of a tf.data.Dataset are batches: it was batched, and not taken apart again since.

    Args:
        dataset: walked back through what was done to it.
        is_mapped: a function is applied to its elements afterwards: single numbers batched before it were not samples
            but the tokens of a text, cut into sequences.
    """
    name = type(dataset).__name__.strip("_").removesuffix("Dataset")
    if name in MAKE_SAMPLES:
        return False
    sources = dataset._inputs()
    if name.lower().endswith("batch"):
        return not (is_mapped and is_of_tokens(sources[0]))
    if name == "GroupByWindow":  # bucket_by_sequence_length too
        return True
    if name == "DirectedInterleave":  # the first says whose turn it is
        sources = sources[1:]
    return any(is_batched(source, is_mapped or name.endswith("Map")) for source in sources)


def is_of_tokens(dataset: Any) -> bool:
    """Whether each element is one number or text, and none that counts rows (as `to_tf_dataset` of datasets has)."""
    spec = dataset.element_spec
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 0:
        return False
    while dataset._inputs():
        dataset = dataset._inputs()[0]
    return type(dataset).__name__ != "_RangeDataset"


def as_dataset(source: Source) -> Any:
    """A tf.data.Dataset over the batches of a source, for whoever wants one; a Trainer reads the source itself."""
    if isinstance(source, TensorData):
        dataset = source.make(0)
    else:
        first = next(iter(source.read(0)), None)
        if first is None:
            raise ValueError("The data is empty: there is no sample in it.")
        size_of(first)
        spec = map_leaves(spec_of, first)
        dataset = tf.data.Dataset.from_generator(lambda: map(as_tensors, source.read(0)), output_signature=spec)
        if source.num_batches is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(source.num_batches))
    setattr(dataset, READS_OWN, source)
    return dataset


def spec_of(leaf: Any) -> Any:
    """The form of a leaf whose first dimension, and any that is padded, may be another in the next batch."""
    array = to_array(leaf)
    return tf.TensorSpec((None,) * array.ndim, tf.as_dtype(array.dtype))


def as_tensors(batch: Any) -> Any:
    """A batch as tf.data takes it."""
    return map_leaves(tf.convert_to_tensor, batch)
