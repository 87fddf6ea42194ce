"""Sources of batches (arrays, samples, tf.data, PyDataset, generators), each readable from any position."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.core.lengths import GivenLengths, find_lengths, length_grouped_order
from paceline.tensorflow.data.batches import Array, collate, leaves, map_leaves, size_of, to_array
from paceline.tensorflow.data.orders import OwnOrder, OwnOrders, epoch_methods_of, orders_of
from paceline.tensorflow.data.transformations import is_batched, is_infinite, known_size, shuffles_of
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
READS_OWN = "paceline_source"  # on a tf.data.Dataset made from a source: read that source instead


def epoch_order(size: int, seed: int, epoch: int) -> Array:
    """Returns a permutation of `range(size)` that depends on (seed, epoch) only.

    It sorts the raw output of a counter-based generator (Philox; Salmon et al., 2011), which is the same in all numpy
    releases.
    """
    return np.argsort(np.random.Philox(key=[seed % 2**64, epoch]).random_raw(size), kind="stable")


class Source:
    """Reads batches of one dataset, epoch after epoch.

    Attributes:
        batch_size: samples per batch; None if the data has its own batches.
        num_samples: samples per epoch; None if unknown.
        num_batches: batches per epoch; None if unknown.
        settings: the settings that determine the order of an epoch, JSON-serializable; saved with the position.
        is_endless: an epoch never ends.
        own_orders: the orders that the data itself changes from one reading to the next.
    """

    batch_size: int | None = None
    num_samples: int | None = None
    num_batches: int | None = None
    settings: Mapping[str, Any] = {}
    is_endless = False
    own_orders = OwnOrders()

    def check_end(self) -> None:
        """Checks that an epoch ends.

        Raises:
            ValueError: it never ends.
        """
        if self.is_endless:
            raise ValueError(
                "The data of an evaluation or prediction repeats without end: leave repeat() out, or give a part of it "
                "(dataset.take(number of samples))."
            )

    def check_rewind(self) -> None:
        """Checks that the source can go back within an epoch, as `nonfinite_policy="rollback"` does.

        Raises:
            UnsupportedOption: the data goes on to another order whenever it is read.
        """

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        """Yields the batches of an epoch that follow the first `consumed` samples, which were `batches` batches."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.read(0)

    def warn_of_order(self) -> None:
        """Warns if a position in the data cannot be restored exactly."""

    def sample_ids(self, epoch: int, first: int, count: int) -> list[int]:
        """Returns the ids of `count` samples of an epoch from position `first` on; positions if there are no ids."""
        return list(range(first, first + count))

    def place(self, consumed: int, batches: int) -> int:
        """Returns the number of batches of the current size in `consumed` samples; `batches` if the size is unknown."""
        return -(-consumed // self.batch_size) if self.batch_size else batches


class Indexed(Source):
    """Samples that are read by index, in a new random order each epoch or in dataset order.

    Args:
        size: number of samples.
        take: array of indices -> batch.
        batch_size: samples per batch.
        seed: seed of the random order; None keeps dataset order.
        drop_last: leave out a last batch that is not full.
        lengths: length of every sample, to group samples of similar length; None: no grouping.
    """

    def __init__(
        self,
        size: int,
        take: Callable[[Array], Any],
        *,
        batch_size: int,
        seed: int | None,
        drop_last: bool,
        lengths: GivenLengths | None = None,
    ) -> None:
        self.num_samples = size
        self.take = take
        self.batch_size = batch_size
        self.num_batches = size // batch_size if drop_last else -(-size // batch_size)
        self.drop_last = drop_last
        self.lengths = lengths
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
        """Returns the indices of all samples in the order of an epoch."""
        size = self.num_samples or 0
        order = epoch_order(size, self.settings["seed"], epoch) if "seed" in self.settings else np.arange(size)
        if self.lengths is None:
            return order
        return length_grouped_order(self.lengths, self.settings["batch_size"], order)

    def sample_ids(self, epoch: int, first: int, count: int) -> list[int]:
        """Returns the indices of samples in the data."""
        return [int(number) for number in self.order(epoch)[first : first + count]]


class OwnBatches(Source):
    """A Keras PyDataset, which is read by batch index; batches may have any size.

    Args:
        dataset: the PyDataset.
        seed: seed of the random order of batches; None keeps their order.
        calls_epoch_methods: call `on_epoch_begin` and `on_epoch_end`, which may change the order of the samples.
    """

    def __init__(self, dataset: Any, *, seed: int | None, calls_epoch_methods: bool = True) -> None:
        self.dataset = dataset
        self.num_batches = dataset.num_batches  # None: endless
        self.is_endless = self.num_batches is None
        is_shuffled = seed is not None and not self.is_endless
        self.settings = {"kind": "random", "seed": seed} if is_shuffled else {"kind": "sequential"}
        self.calls_epoch_methods = calls_epoch_methods
        self.epoch_methods = epoch_methods_of(dataset) if calls_epoch_methods else []
        self.own_orders = OwnOrders([OwnOrder(dataset, self.pass_epoch)] if self.epoch_methods else [])

    def pass_epoch(self) -> None:
        """Calls the epoch methods as an epoch does, without reading a batch."""
        self.dataset.on_epoch_begin()
        self.dataset.on_epoch_end()

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        size = self.num_batches or 0
        order = epoch_order(size, self.settings["seed"], epoch) if "seed" in self.settings else np.arange(size)
        self.own_orders.begin(epoch)
        if self.calls_epoch_methods:
            self.dataset.on_epoch_begin()
        for number in itertools.count(batches) if self.is_endless else order[batches:].tolist():
            yield self.dataset[number]
        if self.calls_epoch_methods:
            self.dataset.on_epoch_end()
        self.own_orders.count()

    def check_rewind(self) -> None:
        """Refuses epoch methods, which change the order between the step to rewind to and the one found to be bad.

        Raises:
            UnsupportedOption: the PyDataset has any.
        """
        if self.epoch_methods:
            raise UnsupportedOption(
                f"nonfinite_policy='rollback' is not supported with {' and '.join(self.epoch_methods)} of "
                f"{type(self.dataset).__name__}, which may change the order of the samples and cannot be undone: leave "
                "them out, as the Trainer shuffles the batches in each epoch, or set nonfinite_policy='skip'."
            )

    def warn_of_order(self) -> None:
        """Warns if the data may change its own order between epochs."""
        if self.own_orders.is_lost():
            logger.warning(
                "%s, which was called more often than in the run that is resumed, as the PyDataset was read in this "
                "process before: if it changes the order of the samples, samples are seen twice or never. Pass a "
                "PyDataset that was not read yet.",
                self.named_methods(),
            )
        elif self.epoch_methods:
            logger.warning(
                "%s, which is called once for each epoch before the one that is resumed: if it changes the "
                "order of the samples with random numbers other than those of its own seeded generator, samples are "
                "seen twice or never.",
                self.named_methods(),
            )

    def named_methods(self) -> str:
        """Returns the PyDataset and its epoch methods, for a message."""
        return f"{type(self.dataset).__name__} has {' and '.join(self.epoch_methods)}"


class TensorData(Source):
    """A tf.data.Dataset of batches.

    A position is restored by skipping: what comes before it is computed again, so that the rest is the same.

    Args:
        make: (epoch, samples to leave out) -> the dataset of batches.
        num_samples, num_batches: per epoch; None if unknown.
        batch_size: samples per batch; None if the data has its own batches, of which whole ones are left out.
        settings: see `Source`.
    """

    def __init__(
        self,
        make: Callable[[int, int], Any],
        *,
        num_samples: int | None,
        num_batches: int | None,
        batch_size: int | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.make = make
        self.num_samples = num_samples
        self.num_batches = num_batches
        self.batch_size = batch_size
        self.settings = settings
        self.own_orders = orders_of(make(0, 0))

    def read(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[Any]:
        dataset = self.make(epoch, consumed)
        self.own_orders.begin(epoch)
        batches_left = iter(dataset.skip(batches) if batches and self.batch_size is None else dataset)
        batch = next(batches_left, None)
        self.own_orders.count()  # not before: a shuffle that another one follows takes its order with the first batch
        while batch is not None:
            yield batch
            batch = next(batches_left, None)

    def check_rewind(self) -> None:
        """Refuses shuffles that reshuffle: their orders before are passed.

        Raises:
            UnsupportedOption: there is one.
        """
        if any(shuffle._reshuffle_each_iteration for shuffle, _ in shuffles_of(self.make(0, 0))):
            raise UnsupportedOption(
                "nonfinite_policy='rollback' is not supported with a tf.data.Dataset that has another order whenever "
                "it is read, and cannot go back to the one before: pass shuffle(..., reshuffle_each_iteration=False), "
                "as the Trainer shuffles samples in each epoch, or set nonfinite_policy='skip'."
            )

    def warn_of_order(self) -> None:
        """Warns if the user's own shuffle has no seed, or has passed the order of the epoch to resume."""
        if any(int(shuffle._seed) == int(shuffle._seed2) == 0 for shuffle, _ in shuffles_of(self.make(0, 0))):
            logger.warning(
                "The training data is shuffled by tf.data without a seed, in an order that cannot be repeated: the run "
                "resumes from its position, but with other samples than before. Pass shuffle(..., seed=...)."
            )
        elif self.own_orders.is_lost():
            logger.warning(
                "The training data is shuffled by tf.data in another order whenever it is read, and cannot go back to "
                "that of the epoch that is resumed, as it was read in this process before, or is repeated or "
                "concatenated after the shuffle: samples are seen twice or never. Make the dataset anew before train, "
                "or pass shuffle(..., reshuffle_each_iteration=False)."
            )


class Stream(Source):
    """Samples that are read in sequence, from an iterable or a function that returns one.

    A position is restored by reading and dropping the earlier samples.
    """

    def __init__(self, data: Any, collate_samples: Collate, *, batch_size: int, drop_last: bool) -> None:
        self.data = data
        self.collate = collate_samples
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.settings = {"kind": "stream"}
        if iter_is_itself(data):
            logger.warning(
                "The data is an iterator, which can be read once: a second epoch, a second evaluation and a resumed "
                "run find it empty. Pass the function that makes it instead."
            )

    def check_rewind(self) -> None:
        """Refuses an iterator.

        Raises:
            UnsupportedOption: the data is one.
        """
        if iter_is_itself(self.data):
            raise UnsupportedOption(
                "nonfinite_policy='rollback' is not supported with an iterator, which cannot go back: pass the "
                "function that makes it, or set nonfinite_policy='skip'."
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


def iter_is_itself(data: object) -> bool:
    """True if data is an iterator, which can be read only once."""
    return hasattr(data, "__next__") and not callable(data)


def make_source(
    data: object,
    *,
    batch_size: int,
    seed: int | None,
    drop_last: bool = False,
    collator: Collate | None = None,
    pad: Callable[[list[Any]], Any] | None = None,
    columns: Sequence[str] | None = None,
    lengths: Callable[[Any], GivenLengths] | None = None,
    calls_epoch_methods: bool = True,
) -> Source:
    """Returns a source over any supported data.

    Args:
        data: `(features, labels)` arrays, a dict of arrays, a list of samples or anything with an index and a length
            (a `datasets.Dataset` too), a tf.data.Dataset of samples, a Keras PyDataset, an iterable of samples or a
            function that returns one.
        batch_size: samples per batch, over all replicas.
        seed: seed of the random order; None keeps dataset order.
        drop_last: leave out a last batch that is not full.
        collator: list of samples -> batch, where a sample of arrays is a row of each; None stacks rows.
        pad: padding function of the default collator.
        columns: columns of a `datasets.Dataset` to read; None reads all numeric ones.
        lengths: data -> length of every sample, to group samples of similar length; None: no grouping.
        calls_epoch_methods: call `on_epoch_begin` and `on_epoch_end` of a PyDataset.

    Raises:
        TypeError: the data is of no supported kind.
        ValueError: arrays differ in length, or a tf.data.Dataset holds batches already; or an option is about batches
            that are not made here.
    """
    own = getattr(data, READS_OWN, None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    check_batching(data, collator, drop_last=drop_last)
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "drop_last": drop_last}
    if lengths is not None:
        options["lengths"] = lengths(data)
    if isinstance(data, tf.data.Dataset):
        return source_of_samples(data, **options)
    if isinstance(data, keras.utils.PyDataset):
        return OwnBatches(data, seed=seed, calls_epoch_methods=calls_epoch_methods)
    collate_samples = collator if collator is not None else lambda samples: collate(samples, pad)
    if hasattr(data, "column_names") and hasattr(data, "select_columns") and hasattr(data, "__len__"):
        return source_of_table(data, columns, collate_samples, options)
    if is_arrays(data):
        return source_of_arrays(data, collator, options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):

        def take(numbers: Array) -> Any:
            return collate_samples([data[number] for number in numbers.tolist()])

        return Indexed(len(data), take, **options)
    if (callable(data) or hasattr(data, "__iter__")) and not isinstance(data, Mapping):
        return Stream(data, collate_samples, batch_size=batch_size, drop_last=drop_last)
    raise unreadable(data)


def check_batching(data: object, collator: Collate | None, *, drop_last: bool = False) -> None:
    """Refuses options about batches for data that makes them itself.

    Raises:
        UnsupportedOption: a collator for a tf.data.Dataset or a PyDataset, or `dataloader_drop_last` for a PyDataset.
    """
    if hasattr(data, READS_OWN):
        return
    name = getattr(collator, "__name__", type(collator).__name__)
    if collator is not None and isinstance(data, tf.data.Dataset):
        raise UnsupportedOption(
            f"data_collator={name} is not supported with a tf.data.Dataset, whose samples TensorFlow makes into "
            "batches: apply it to the samples with dataset.map, or pass a list of samples."
        )
    if collator is not None and isinstance(data, keras.utils.PyDataset):
        raise UnsupportedOption(
            f"data_collator={name} is not supported with a {type(data).__name__}, a PyDataset, which makes its own "
            "batches: call it in __getitem__, or pass a list of samples."
        )
    if drop_last and isinstance(data, keras.utils.PyDataset):
        raise UnsupportedOption(
            f"dataloader_drop_last=True is not supported with a {type(data).__name__}, a PyDataset, which makes its "
            "own batches: leave the last one out of its __len__, and set dataloader_drop_last=False."
        )


def unreadable(data: object) -> TypeError:
    """Returns the error for data that is of no supported kind."""
    lists = [name for name, column in data.items() if is_list(column)] if isinstance(data, Mapping) else []
    if lists:
        return TypeError(
            f"A dict with Python lists ({', '.join(map(repr, lists))}) cannot be read as data: make arrays of them, "
            "{name: np.asarray(column) for name, column in data.items()}, or, where rows differ in length, use "
            "datasets.Dataset.from_dict(data)."
        )
    return TypeError(
        f"A {type(data).__name__} cannot be read as data: pass arrays (features, labels), a list of samples, a "
        "tf.data.Dataset, a datasets.Dataset, a PyDataset, or a function that returns an iterator of samples."
    )


def lengths_of(data: Any, column: str, input_name: str | None) -> GivenLengths:
    """Returns the length of every sample, for `train_sampling_strategy="group_by_length"`.

    Args:
        data: a list of samples, which may be `(features, labels)`, or a `datasets.Dataset`.
        column: name of a column that holds the lengths.
        input_name: the input to measure if there is no such column; None: `input_ids`.

    Raises:
        ValueError: samples cannot be read by index, or have no length.
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


def is_list(column: object) -> bool:
    """True if a dict's value is a column as a Python list of numbers, texts or lists, rather than a list of samples."""
    return isinstance(column, list) and all(isinstance(row, int | float | str | list) for row in column[:1])


def is_columns(data: object) -> bool:
    """True if a dict holds the columns of one dataset, rather than several datasets by name."""
    return isinstance(data, dict) and all(hasattr(value, "shape") or is_list(value) for value in data.values())


def named_dataset(default: Any, asked: Any) -> Any:
    """Returns the requested evaluation set.

    Args:
        default: the Trainer's evaluation set, or a dict of several.
        asked: a dataset, the name of one in `default`, or None for `default`.

    Raises:
        ValueError: there is no such set; the message lists the known names.
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


def is_arrays(data: object) -> bool:
    """True if data is a nest of arrays whose rows are the samples."""
    if not isinstance(data, tuple | Mapping | np.ndarray) and not isinstance(data, tf.Tensor):
        return False
    found = list(leaves(data))
    return bool(found) and all(len(getattr(leaf, "shape", ())) > 0 for leaf in found)


def source_of_arrays(data: object, collator: Collate | None, options: Mapping[str, Any]) -> Source:
    """Returns a source over arrays with one row per sample.

    Args:
        data: a nest of arrays.
        collator: list of nests with a row of each array -> batch; None reads the rows of a batch at once.
        options: of `Indexed`.
    """
    if isinstance(data, tuple):
        data = tuple(part for part in data if part is not None)  # (features, None), as `fit` takes it
    arrays = map_leaves(to_array, data)
    sizes = {len(leaf) for leaf in leaves(arrays)}
    if len(sizes) != 1:
        raise ValueError(f"The arrays differ in their number of rows: {sorted(sizes)}. Give each one row per sample.")

    def take(numbers: Any) -> Any:
        return map_leaves(lambda leaf: leaf[numbers], arrays)

    return Indexed(sizes.pop(), take if collator is None else lambda order: collator([*map(take, order)]), **options)


def source_of_table(
    data: Any,
    columns: Sequence[str] | None,
    collate_samples: Collate,
    options: Mapping[str, Any],
) -> Source:
    """Returns a source over a `datasets.Dataset`; the rows of a batch are read in one call."""
    table = data if columns is None else data.select_columns([name for name in data.column_names if name in columns])

    def take(numbers: Array) -> Any:
        found = table[numbers.tolist()]
        names = list(found)
        return collate_samples([{name: found[name][row] for name in names} for row in range(len(numbers))])

    return Indexed(len(data), take, **options)


def source_of_samples(data: Any, *, batch_size: int, seed: int | None, drop_last: bool) -> Source:
    """Returns a source over a tf.data.Dataset of samples.

    With a seed and a known number of samples, they are shuffled through a buffer that holds all of them.

    Raises:
        ValueError: the elements are batches.
    """
    if is_batched(data):
        raise ValueError(
            "The tf.data.Dataset holds batches: pass it before .batch(), or with .unbatch(); "
            "per_device_train_batch_size and per_device_eval_batch_size make the batches. To use yours as they are, "
            "override get_train_tfdataset or get_eval_tfdataset."
        )
    size = known_size(data)
    shuffled = seed is not None and size is not None and size > 1

    def make(epoch: int, consumed: int) -> Any:
        dataset = data
        if shuffled:
            key = int(np.random.SeedSequence([seed or 0, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
            dataset = dataset.shuffle(size, seed=key, reshuffle_each_iteration=False)
        if consumed:
            dataset = dataset.skip(consumed)
        return dataset.batch(batch_size, drop_remainder=drop_last).prefetch(1)

    num_batches = None
    if size is not None:
        num_batches = size // batch_size if drop_last else -(-size // batch_size)
    settings = {"kind": "random", "seed": seed} if shuffled else {"kind": "sequential"}
    source = TensorData(make, num_samples=size, num_batches=num_batches, batch_size=batch_size, settings=settings)
    source.is_endless = is_infinite(data)
    return source


def source_of_batches(dataset: object) -> Source:
    """Returns a source over a tf.data.Dataset of batches, such as an overridden get_train_tfdataset returns.

    Raises:
        TypeError: it is no tf.data.Dataset.
    """
    own = getattr(dataset, READS_OWN, None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    if isinstance(dataset, Source):
        return dataset
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"Expected a tf.data.Dataset of batches; {type(dataset).__name__} was returned.")
    source = TensorData(
        lambda epoch, consumed: dataset,
        num_samples=None,
        num_batches=known_size(dataset),
        batch_size=None,
        settings={"kind": "batches"},
    )
    source.is_endless = is_infinite(dataset)
    return source


def as_dataset(source: Source) -> Any:
    """Returns a tf.data.Dataset over the batches of a source; a Trainer reads the attached source directly.

    Raises:
        ValueError: the source is empty.
    """
    if isinstance(source, TensorData):
        dataset = source.make(0, 0)
    else:
        first = next(iter(source.read(0)), None)
        if first is None:
            raise ValueError("The data is empty: there is no sample in it.")
        size_of(first)
        spec = without_lists(map_leaves(spec_of, first))
        dataset = tf.data.Dataset.from_generator(lambda: map(as_tensors, source.read(0)), output_signature=spec)
        if source.num_batches is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(source.num_batches))
    setattr(dataset, READS_OWN, source)
    return dataset


def without_lists(nest: object) -> Any:
    """Returns the nest with lists turned into tuples, since tf.data interprets lists as arrays."""
    if isinstance(nest, Mapping):
        return {name: without_lists(value) for name, value in nest.items()}
    return tuple(map(without_lists, nest)) if isinstance(nest, list | tuple) else nest


def spec_of(leaf: object) -> Any:
    """Returns the spec of a leaf, with all dimensions unknown, since batch size and padding may vary."""
    array = to_array(leaf)
    return tf.TensorSpec((None,) * array.ndim, tf.as_dtype(array.dtype))


def as_tensors(batch: object) -> Any:
    """Returns a batch as tensors, with tuples in place of lists."""
    return without_lists(map_leaves(tf.convert_to_tensor, batch))
