"""Streaming metrics, updated batch by batch. Their state has a constant size, and two states can be merged.

    trainer = Trainer(model, args, eval_dataset=data, compute_metrics=Perplexity())

Most metrics keep sums, over the samples, of a few numbers per sample; the value is a function of the sums. So any split
into batches, and any order of merging shards, gives the same value, and sums over resampled samples give its confidence
interval (`paceline.core.intervals`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.contracts import StreamingMetric
from paceline.core.optional import LateModule
from paceline.core.outputs import EvalPrediction

if TYPE_CHECKING:
    from paceline.core import intervals
else:
    intervals = LateModule("paceline.core.intervals")

Array = np.ndarray[Any, Any]
IGNORE_INDEX = -100
# logits converted to float64 at once: small compared with the batch
CHUNK_ELEMENTS = 1 << 20


def is_streaming(metric: object) -> bool:
    """True if a `compute_metrics` is updated batch by batch. A callable with these methods counts as a function.

    Raises:
        TypeError: it has `update` but no `reset`, so a second evaluation would include the first.
    """
    if isinstance(metric, SumMetric | F1 | MetricGroup):
        return True
    if callable(metric) or not (hasattr(metric, "update") and hasattr(metric, "compute")):
        return False
    if not hasattr(metric, "reset"):
        raise TypeError(
            f"compute_metrics={type(metric).__name__}: it has `update` and `compute` but no `reset`, which is called "
            "before each evaluation; add it, or pass a function."
        )
    return True


def with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields (batch, is last). Reads one batch ahead, so that it works for streams of unknown length."""
    iterator = iter(batches)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for batch in iterator:
        yield held, False
        held = batch
    yield held, True


class SumMetric(ABC):
    """Base class of metrics that are functions of sums over samples. Subclasses define `rows` and `values`.

    Args:
        confidence: level of the intervals `<name>_low`, `<name>_high` of each value, 0 to 1; None computes none. They
            are bootstrap percentiles unless a metric documents otherwise.
        replicates: bootstrap replicates. The state holds `replicates` times the numbers per sample, in float64.
        seed: seed of the bootstrap weights.
    """

    def __init__(self, *, confidence: float | None = 0.95, replicates: int = 500, seed: int = 0) -> None:
        if confidence is not None and not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence}: it must lie between 0 and 1, or be None for no intervals.")
        if replicates < 2:
            raise ValueError(f"replicates={replicates}: an interval needs at least 2; confidence=None asks for none.")
        self.confidence, self.replicates, self.seed = confidence, replicates, seed
        self.reset()

    @abstractmethod
    def rows(self, prediction: EvalPrediction) -> Array:
        """Returns the summands, `(samples, numbers)`, float64. Each row depends on its own sample alone."""

    @abstractmethod
    def values(self, sums: Array) -> dict[str, Array]:
        """Returns the values, each of shape `(...)`, from sums `(..., numbers)` of the set or of all replicates."""

    def reset(self, first_sample: int = 0) -> None:
        """Resets the state.

        Args:
            first_sample: the index in the set of the next sample. Metrics to be merged start at different indices, so
                that no two samples share their bootstrap weights.
        """
        self.sums: Array | None = None
        self.resampled: Array | None = None
        self.first_sample = self.next_sample = first_sample

    def update(self, prediction: EvalPrediction, /) -> None:
        """Adds one batch."""
        rows = np.asarray(self.rows(prediction), dtype=np.float64)
        resampled = None
        if self.confidence is not None:
            weights = intervals.poisson_weights(self.next_sample, len(rows), self.replicates, self.seed)
            resampled = weights.T.astype(np.float64) @ rows
        self._add(rows.sum(0), resampled)
        self.next_sample += len(rows)

    def merge(self, other: SumMetric, /) -> None:
        """Merges the state of another metric of the same type.

        Raises:
            ValueError: it has other settings, or both started at the same sample index.
        """
        if type(other) is not type(self) or other.settings() != self.settings():
            raise ValueError(
                f"{self.settings()} cannot be merged with {other.settings()}: give both the same settings."
            )
        if other.sums is None:
            return
        if self.sums is not None and self.confidence is not None and self.first_sample == other.first_sample:
            raise ValueError(
                f"Both metrics counted their samples from {self.first_sample}: begin each shard with "
                "reset(first_sample=...), its place in the set, so that the intervals count every sample once."
            )
        self._add(other.sums, other.resampled)
        self.first_sample = min(self.first_sample, other.first_sample)
        self.next_sample = max(self.next_sample, other.next_sample)

    def _add(self, sums: Array, resampled: Array | None) -> None:
        self.sums = sums if self.sums is None else self.sums + sums
        if resampled is not None:
            self.resampled = resampled if self.resampled is None else self.resampled + resampled

    def compute(self) -> dict[str, float]:
        """Returns the values so far, with their intervals."""
        if self.sums is None:
            return {}
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = self.values(self.sums)
            spread = self.values(self.resampled) if self.resampled is not None else {}
        result: dict[str, float] = {}
        for name, value in found.items():
            result[name] = float(value)
            if self.confidence is not None:
                result[f"{name}_low"], result[f"{name}_high"] = self.interval(name, float(value), spread[name])
        return result

    def interval(self, name: str, value: float, resampled: Array) -> tuple[float, float]:
        """Returns the confidence interval of one value, from its replicates."""
        assert self.confidence is not None
        return intervals.percentiles(resampled, self.confidence)

    def settings(self) -> tuple[Any, ...]:
        """Returns the settings that must be equal for a merge."""
        return (type(self).__name__, self.confidence, self.replicates, self.seed)


class Mean(SumMetric):
    """The mean of a number per sample.

    Args:
        function: `(EvalPrediction) -> (samples,)`, or a pair of such arrays: numbers and their weights.
        name: the key of the value.
        options: options of `SumMetric`.
    """

    def __init__(self, function: Callable[[EvalPrediction], Any], name: str = "mean", **options: Any) -> None:
        self.function, self.name = function, name
        super().__init__(**options)

    def rows(self, prediction: EvalPrediction) -> Array:
        given = self.function(prediction)
        values, weights = given if isinstance(given, tuple) else (given, np.ones(len(given)))
        values, weights = np.asarray(values, np.float64), np.asarray(weights, np.float64)
        return np.stack([np.where(weights == 0, 0.0, values) * weights, weights], 1)

    def values(self, sums: Array) -> dict[str, Array]:
        return {self.name: sums[..., 0] / sums[..., 1]}

    def settings(self) -> tuple[Any, ...]:
        return (*super().settings(), self.name)


class Accuracy(SumMetric):
    """The share of correct predictions, over samples or over all their tokens.

    With one target per sample the interval is Wilson's (1927, "Probable inference"), which is valid at 0 and 1 too;
    with several targets per sample it is a bootstrap interval over samples.

    Args:
        shifted: the output at i predicts the target at i + 1, as in a causal language model.
        ignore_index: the target value to ignore.
        name: the key of the value.
        options: options of `SumMetric`.
    """

    def __init__(
        self, *, shifted: bool = False, ignore_index: int = IGNORE_INDEX, name: str = "accuracy", **options: Any
    ) -> None:
        self.shifted, self.ignore_index, self.name = shifted, ignore_index, name
        super().__init__(**options)

    def rows(self, prediction: EvalPrediction) -> Array:
        predictions, labels = read_arrays(prediction, self.shifted)
        counted = (labels != self.ignore_index).reshape(len(labels), -1)
        right = (read_classes(predictions, labels) == labels).reshape(len(labels), -1) & counted
        numbers = counted.sum(1)
        return np.stack([right.sum(1), numbers, numbers > 1], 1)

    def values(self, sums: Array) -> dict[str, Array]:
        return {self.name: sums[..., 0] / sums[..., 1]}

    def interval(self, name: str, value: float, resampled: Array) -> tuple[float, float]:
        assert self.sums is not None
        assert self.confidence is not None
        if self.sums[2] > 0 or self.sums[1] == 0:
            return super().interval(name, value, resampled)
        return intervals.wilson_interval(float(self.sums[0]), float(self.sums[1]), self.confidence)

    def settings(self) -> tuple[Any, ...]:
        return (*super().settings(), self.shifted, self.ignore_index, self.name)


class Perplexity(SumMetric):
    """exp of the mean negative log-likelihood of the targets, in nats, from logits `(samples, ..., classes)`.

    Args:
        shifted: the output at i predicts the target at i + 1, as in a causal language model.
        ignore_index: the target value to ignore.
        name: the key of the value.
        options: options of `SumMetric`.
    """

    def __init__(
        self, *, shifted: bool = True, ignore_index: int = IGNORE_INDEX, name: str = "perplexity", **options: Any
    ) -> None:
        self.shifted, self.ignore_index, self.name = shifted, ignore_index, name
        super().__init__(**options)

    def rows(self, prediction: EvalPrediction) -> Array:
        logits, labels = read_arrays(prediction, self.shifted)
        if logits.ndim != labels.ndim + 1:
            raise ValueError(
                f"Perplexity needs logits (*{labels.shape}, classes), not {logits.shape}: leave the logits as they are "
                "in preprocess_logits_for_metrics, or use Mean over what it returns."
            )
        losses = [token_losses(logits[i], labels[i], self.ignore_index) for i in range(len(labels))]
        return np.array([(row.sum(), row.size) for row in losses], np.float64).reshape(-1, 2)

    def values(self, sums: Array) -> dict[str, Array]:
        return {self.name: np.exp(sums[..., 0] / sums[..., 1])}

    def settings(self) -> tuple[Any, ...]:
        return (*super().settings(), self.shifted, self.ignore_index, self.name)


class Regression(SumMetric):
    """`mse`, `rmse`, `mae`, `r2` (the coefficient of determination) and `pearson` of predicted and true numbers.

    Several numbers per sample are pooled. Sums are taken about the first target to avoid cancellation for data far
    from 0.

    Args:
        options: options of `SumMetric`.
    """

    def reset(self, first_sample: int = 0) -> None:
        super().reset(first_sample)
        self.origin: float | None = None

    def rows(self, prediction: EvalPrediction) -> Array:
        predictions, labels = read_arrays(prediction, shifted=False)
        if predictions.size != labels.size:
            raise ValueError(f"Regression needs as many predictions {predictions.shape} as targets {labels.shape}.")
        if self.origin is None and labels.size:
            self.origin = float(labels.flat[0])
        y = labels.reshape(len(labels), -1).astype(np.float64) - (self.origin or 0.0)
        p = predictions.reshape(len(labels), -1).astype(np.float64) - (self.origin or 0.0)
        terms = (np.ones_like(y), y, y * y, p, p * p, y * p, (y - p) ** 2, np.abs(y - p))
        return np.stack([term.sum(1) for term in terms], 1)

    def merge(self, other: SumMetric, /) -> None:
        """Merges another metric's sums, shifted to this one's origin."""
        if isinstance(other, Regression) and other.origin is not None:
            if self.origin is None:
                self.origin = other.origin
            moved = Regression(confidence=other.confidence, replicates=other.replicates, seed=other.seed)
            moved.reset(other.first_sample)
            moved.next_sample = other.next_sample
            distance = self.origin - other.origin
            moved.sums = move_origin(other.sums, distance)
            moved.resampled = move_origin(other.resampled, distance)
            other = moved
        super().merge(other)

    def values(self, sums: Array) -> dict[str, Array]:
        n, y, yy, p, pp, yp, squared, absolute = np.moveaxis(sums, -1, 0)
        spread_y, spread_p = spread_of(n, y, yy), spread_of(n, p, pp)
        return {
            "mse": squared / n,
            "rmse": np.sqrt(squared / n),
            "mae": absolute / n,
            "r2": 1 - squared / spread_y,
            "pearson": (yp - y * p / n) / np.sqrt(spread_y * spread_p),
        }


def spread_of(number: Array, total: Array, squares: Array) -> Array:
    """Returns the sum of squared deviations from the mean; exactly 0 if only rounding error is left."""
    spread = squares - total * total / number
    return np.where(spread > 1e-12 * squares, spread, 0.0)


def move_origin(sums: Array | None, distance: float) -> Array | None:
    """Shifts the origin of `Regression`'s sums up by `distance`."""
    if sums is None or distance == 0:
        return sums
    n, y, yy, p, pp, yp, squared, absolute = np.moveaxis(sums, -1, 0)
    moved = (
        n,
        y - distance * n,
        yy - 2 * distance * y + distance**2 * n,
        p - distance * n,
        pp - 2 * distance * p + distance**2 * n,
        yp - distance * (y + p) + distance**2 * n,
        squared,
        absolute,
    )
    return np.stack(moved, -1)


@dataclass(eq=False)
class F1:
    """`f1`, `precision` and `recall` of a classifier, from its confusion matrix.

    Intervals come from resampling the matrix, which for independent targets equals the bootstrap. Targets of one sample
    (tags of one text) are assumed independent; if they are not, the interval is too narrow.

    Args:
        num_classes: number of classes; targets are 0 to num_classes - 1.
        average: `macro`: the mean over the classes; `weighted`: the mean weighted by their number of targets; `micro`:
            over all targets together; `binary`: of class 1. A class without targets and predictions counts as 0.
        shifted: the output at i predicts the target at i + 1.
        ignore_index: the target value to ignore.
        confidence: level of the intervals `<name>_low` and `<name>_high`; None computes none.
        replicates: bootstrap replicates, drawn when the values are computed.
        seed: seed of the bootstrap.

    Attributes:
        matrix: the confusion matrix `(num_classes, num_classes)`: rows are targets, columns are predicted classes.
    """

    num_classes: int
    average: str = "macro"
    _: KW_ONLY
    shifted: bool = False
    ignore_index: int = IGNORE_INDEX
    confidence: float | None = 0.95
    replicates: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.average not in ("macro", "weighted", "micro", "binary"):
            raise ValueError(f"average={self.average!r}: one of macro, weighted, micro, binary.")
        self.reset()

    def reset(self, first_sample: int = 0) -> None:
        """Resets the state. `first_sample` has no effect here."""
        self.matrix: Array = np.zeros((self.num_classes, self.num_classes), np.int64)

    def update(self, prediction: EvalPrediction, /) -> None:
        """Adds one batch.

        Raises:
            ValueError: a target or a predicted class is not below `num_classes`.
        """
        predictions, labels = read_arrays(prediction, self.shifted)
        kept = labels != self.ignore_index
        actual, found = labels[kept].astype(np.int64), read_classes(predictions, labels)[kept].astype(np.int64)
        for what, values in (("target", actual), ("predicted class", found)):
            if values.size and not 0 <= values.min() <= values.max() < self.num_classes:
                wrong = values.min() if values.min() < 0 else values.max()
                raise ValueError(f"F1(num_classes={self.num_classes}): there is a {what} of {wrong}.")
        cells = np.bincount(actual * self.num_classes + found, minlength=self.num_classes**2)
        self.matrix = self.matrix + cells.reshape(self.matrix.shape)

    def merge(self, other: F1, /) -> None:
        """Adds another metric's matrix.

        Raises:
            ValueError: it has other settings.
        """
        if type(other) is not type(self) or other.settings() != self.settings():
            raise ValueError(
                f"{self.settings()} cannot be merged with {other.settings()}: give both the same settings."
            )
        self.matrix = self.matrix + other.matrix

    def settings(self) -> tuple[Any, ...]:
        """Returns the settings that must be equal for a merge."""
        return (type(self).__name__, self.num_classes, self.average, self.confidence, self.replicates, self.seed)

    def compute(self) -> dict[str, float]:
        """Returns the values so far, with their intervals."""
        if not self.matrix.any():
            return {}
        result = {}
        right, actual, found = np.diag(self.matrix), self.matrix.sum(1), self.matrix.sum(0)
        spread = self._resampled() if self.confidence is not None else {}
        for name, value in f1_values(right, actual, found, self.average).items():
            result[name] = float(value)
            if self.confidence is not None:
                result[f"{name}_low"], result[f"{name}_high"] = intervals.percentiles(spread[name], self.confidence)
        return result

    def _resampled(self) -> dict[str, Array]:
        """Returns the values of `replicates` resampled matrices, drawn one at a time to save memory."""
        rows, columns = np.nonzero(self.matrix)
        counts = self.matrix[rows, columns]
        is_right = rows == columns
        generator = np.random.default_rng(self.seed)
        drawn = []
        for _ in range(self.replicates):
            sample = generator.multinomial(counts.sum(), counts / counts.sum())
            right = np.bincount(rows[is_right], sample[is_right], self.num_classes)
            actual = np.bincount(rows, sample, self.num_classes)
            found = np.bincount(columns, sample, self.num_classes)
            drawn.append(f1_values(right, actual, found, self.average))
        return {name: np.array([values[name] for values in drawn]) for name in drawn[0]}


def f1_values(right: Array, actual: Array, found: Array, average: str) -> dict[str, float]:
    """Returns F1, precision and recall from the number of correct, actual and predicted targets of each class."""
    if average == "micro":
        right, actual, found = right.sum(keepdims=True), actual.sum(keepdims=True), found.sum(keepdims=True)
    if average == "binary":
        right, actual, found = right[1:2], actual[1:2], found[1:2]
    each = {
        "f1": divide(2 * right, actual + found),
        "precision": divide(right, found),
        "recall": divide(right, actual),
    }
    weights = actual / actual.sum() if average == "weighted" else np.full(len(right), 1 / len(right))
    return {name: float((values * weights).sum()) for name, values in each.items()}


def divide(numbers: Array, by: Array) -> Array:
    """Divides element by element; division by 0 gives 0."""
    quotients: Array = np.divide(numbers, by, out=np.zeros(len(numbers)), where=by != 0)
    return quotients


class MetricGroup:
    """Combines several metrics over the same batches.

    Args:
        metrics: streaming metrics with different value names.
    """

    def __init__(self, *metrics: StreamingMetric) -> None:
        self.metrics = metrics

    def reset(self) -> None:
        """Resets every metric."""
        for metric in self.metrics:
            metric.reset()

    def update(self, prediction: EvalPrediction, /) -> None:
        """Adds one batch."""
        for metric in self.metrics:
            metric.update(prediction)

    def merge(self, other: MetricGroup, /) -> None:
        """Merges metric by metric."""
        for mine, theirs in zip(self.metrics, other.metrics, strict=True):
            mine.merge(theirs)

    def compute(self) -> dict[str, float]:
        """Returns the values of all metrics.

        Raises:
            ValueError: two metrics return the same name.
        """
        result: dict[str, float] = {}
        for metric in self.metrics:
            values = metric.compute()
            twice = sorted(result.keys() & values.keys())
            if twice:
                raise ValueError(f"Two metrics of the group are called {', '.join(twice)}: give one another `name=`.")
            result.update(values)
        return result


# ---- reading a batch


def read_arrays(prediction: EvalPrediction, shifted: bool) -> tuple[Array, Array]:
    """Returns (predictions, labels) of a batch, the first of each if there are several; `shifted` aligns them by one.

    Raises:
        ValueError: one of them is missing.
    """
    found = []
    for name, value in (("predictions", prediction.predictions), ("labels", prediction.label_ids)):
        if isinstance(value, Mapping):
            value = next(iter(value.values()))
        while isinstance(value, list | tuple):
            value = value[0]
        if value is None:
            raise ValueError(f"The batch has no {name}, which this metric compares.")
        found.append(np.asarray(value))
    predictions, labels = found
    return (predictions[:, :-1], labels[:, 1:]) if shifted else (predictions, labels)


def read_classes(predictions: Array, labels: Array) -> Array:
    """Returns predicted classes: the argmax of logits, or class indices from `preprocess_logits_for_metrics`.

    Raises:
        ValueError: the predictions are neither.
    """
    if predictions.ndim == labels.ndim + 1 and predictions.shape[:-1] == labels.shape:
        classes: Array = predictions.argmax(-1)
        return classes
    if predictions.shape == labels.shape and (predictions.dtype.kind in "iub"):
        return predictions
    raise ValueError(
        f"Targets {labels.shape} need logits (*{labels.shape}, classes) or as many class numbers, not "
        f"{predictions.shape} of {predictions.dtype}: choose them with preprocess_logits_for_metrics."
    )


def token_losses(logits: Array, labels: Array, ignore_index: int = IGNORE_INDEX) -> Array:
    """Returns the negative log-likelihood of each target that is not ignored, in float64, computed in chunks."""
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    (kept,) = np.nonzero(labels != ignore_index)
    losses = np.empty(len(kept))
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    for start in range(0, len(kept), step):
        places = kept[start : start + step]
        part = logits[places].astype(np.float64)
        highest = part.max(-1)
        targets = part[np.arange(len(places)), labels[places]]
        part -= highest[:, None]
        np.exp(part, out=part)
        losses[start : start + step] = np.log(part.sum(-1)) + highest - targets
    return losses
